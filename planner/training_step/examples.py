"""Tensors without data that stand for the tensors of recorded calls."""

from typing import Any

import torch

from planner._torch import pytree
from planner._torch.tensors import SPARSE, as_lazy_as


class Examples:
    """Tensors like those of calls, with storages of their own and no data.

    Making a tensor without data takes as long as running an operation, and every call of an optimizer gets
    lists of all parameters. So calls share examples; within one call each tensor has its own.
    """

    def __init__(self, mode: Any) -> None:
        """
        Args:
            mode: The fake mode that they are made under.
        """
        self._mode = mode
        self._made: dict[object, list[torch.Tensor]] = {}

    def of_call(self, *trees: Any) -> list[Any]:
        """The arguments and results of one call, with examples in the place of tensors."""
        used: dict[object, int] = {}

        def example(tensor: torch.Tensor) -> torch.Tensor:
            kind = _kind(tensor)
            number = used.get(kind, 0)
            used[kind] = number + 1
            made = self._made.setdefault(kind, [])
            if number == len(made):
                made.append(shape_only(tensor))
            return made[number]

        with self._mode:
            return [pytree.tree_map_only(torch.Tensor, example, tree) for tree in trees]


def _kind(tensor: torch.Tensor) -> object:
    kind = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout)
    if tensor.layout in SPARSE:
        return kind
    lazy = (tensor.is_conj(), tensor.is_neg())
    return (*kind, lazy, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())


def shape_only(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides, dtype and device with a storage (and no data) of its own."""
    if tensor.layout in SPARSE:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, layout=tensor.layout)
    span = tensor.untyped_storage().nbytes() // max(tensor.element_size(), 1)
    base = torch.empty(span, dtype=tensor.dtype, device=tensor.device)
    # Products that cannot read conjugated tensors copy them, which takes memory.
    return as_lazy_as(tensor, base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
