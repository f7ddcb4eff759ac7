"""Batches padded to the longest sequence that will come."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from planner._torch import pytree
from planner.training_step.inputs import InputError
from planner.training_step.step import map_tensors, tensors_in


@dataclass(frozen=True)
class Padded:
    """Pads the tensors of a batch to a number of tokens; longer ones stay as they are.

    The sequence is the second dimension. Tensors are padded if they have the most frequent length there. The
    values do not matter: only sizes are planned. A list of mappings, as Sentence Transformers has one for
    each column of the data, is several batches; nothing beside them is padded.

    Attributes:
        length: The number of tokens.
    """

    length: int

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch = args, kwargs
        padded: tuple[tuple[Any, ...], dict[str, Any]]
        if any(map(_is_columns, pytree.tree_leaves(batch, is_leaf=_is_columns))):
            padded = pytree.tree_map(self._columns, batch, is_leaf=_is_columns)
        else:
            padded = self._batch(batch)
        return padded

    def _columns(self, leaf: Any) -> Any:
        return type(leaf)([self._batch(column) for column in leaf]) if _is_columns(leaf) else leaf

    def _batch(self, tree: Any) -> Any:
        """One batch, whose sequences all have the same length."""
        lengths = Counter(int(t.shape[1]) for t in tensors_in(tree) if t.dim() >= 2)
        if not lengths:
            return tree
        ((tokens, _),) = lengths.most_common(1)

        def padded(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() < 2 or tensor.shape[1] != tokens or tokens >= self.length:
                return tensor
            more = tensor.new_zeros(len(tensor), self.length - tokens, *tensor.shape[2:])
            return torch.cat([tensor.detach(), more], 1).requires_grad_(tensor.requires_grad)

        return map_tensors(padded, tree)


def _is_columns(tree: Any) -> bool:
    return type(tree) in (list, tuple) and bool(tree) and all(isinstance(one, Mapping) for one in tree)


def checked_length(length: object) -> int:
    """Check that a length is a number of tokens.

    Raises:
        InputError: It is not.
    """
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise InputError(f"max_length={length!r}: expected the number of tokens of the longest sequence")
    return length
