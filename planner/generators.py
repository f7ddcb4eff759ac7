"""The random generators that a training step may draw from: PyTorch's, Python's and numpy's."""

import random
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch


@dataclass(frozen=True)
class GeneratorStates:
    """Where every generator stands."""

    cpu: torch.Tensor
    cuda: list[torch.Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> Self:
        """The present states. CUDA's generators are looked at where CUDA is in use already."""
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        cuda = torch.cuda.get_rng_state_all() if in_use else []
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Put every generator back."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def same_as(self, other: "GeneratorStates") -> bool:
        """Whether every generator stands in the same place."""
        cuda = len(self.cuda) == len(other.cuda) and all(map(torch.equal, self.cuda, other.cuda))
        numpy = self.numpy[2] == other.numpy[2] and bool((self.numpy[1] == other.numpy[1]).all())
        return bool(torch.equal(self.cpu, other.cpu)) and cuda and self.python == other.python and numpy
