"""Batches padded to the longest sequence that is expected."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from planner.training_step.inputs import InputError
from planner.training_step.step import map_tensors, tensors_in


@dataclass(frozen=True)
class Padded:
    """Pads the tensors of a batch to a number of tokens; longer ones stay as they are.

    The sequence is the second dimension of the tensors that are as long there as most are. What they are
    padded with does not matter: only sizes are planned.

    Attributes:
        length: The number of tokens.
    """

    length: int

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = Counter(int(t.shape[1]) for t in tensors_in((args, kwargs)) if t.dim() >= 2)
        if not found:
            return args, kwargs
        ((tokens, _),) = found.most_common(1)

        def padded(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() < 2 or tensor.shape[1] != tokens or tokens >= self.length:
                return tensor
            more = tensor.new_zeros(len(tensor), self.length - tokens, *tensor.shape[2:])
            return torch.cat([tensor.detach(), more], 1).requires_grad_(tensor.requires_grad)

        longest: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(padded, (args, kwargs))
        return longest


def checked_length(length: object) -> int:
    """Check that a length is a number of tokens.

    Raises:
        InputError: It is not.
    """
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise InputError(f"max_length={length!r}: expected the number of tokens of the longest sequence")
    return length
