"""The random generators that a training step may draw from: PyTorch's, Python's, numpy's, the model's own."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from planner._torch import pytree


@dataclass(frozen=True)
class GeneratorStates:
    """The states of all generators."""

    cpu: torch.Tensor
    cuda: list[torch.Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> Self:
        """The present states. CUDA's generators are included where CUDA is in use already."""
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
        """Whether every generator is in the same state."""
        cuda = len(self.cuda) == len(other.cuda) and all(map(torch.equal, self.cuda, other.cuda))
        numpy = self.numpy[2] == other.numpy[2] and bool((self.numpy[1] == other.numpy[1]).all())
        return bool(torch.equal(self.cpu, other.cpu)) and cuda and self.python == other.python and numpy


class OwnGenerators:
    """Generators that a model holds or a step is given, besides the default ones.

    Args:
        model: Attributes of its modules are searched.
        args, kwargs: What the step is given; searched.
    """

    def __init__(
        self, model: torch.nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        held = [value for part in model.modules() for value in vars(part).values()]
        given = pytree.tree_leaves((tuple(args), dict(kwargs or {})))
        self._found = {id(x): x for x in (*held, *given) if isinstance(x, _KINDS)}.values()

    def states(self) -> list[Any]:
        """The state of each, as can be compared with ``==``."""
        return [_state(generator) for generator in self._found]

    def restore(self, states: list[Any]) -> None:
        """Restore each."""
        for generator, state in zip(self._found, states, strict=True):
            if isinstance(generator, torch.Generator):
                generator.set_state(torch.tensor(state, dtype=torch.uint8))
            elif isinstance(generator, random.Random):
                generator.setstate(state)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            else:
                generator.set_state(state)


_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return _plain(
        generator.bit_generator.state
        if isinstance(generator, np.random.Generator)
        else generator.get_state(legacy=False)
    )


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state
