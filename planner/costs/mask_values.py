"""Which elements of a made-up mask are true, where it decides what a kernel takes."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from planner._torch.fake import concrete_size

aten = torch.ops.aten

_PUT = frozenset((aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put))


def true_elements(func: object, args: Sequence[Any], otherwise: bool) -> int:
    """How many elements of a mask among a call's arguments are true: the first, as they lie in memory.

    Where elements that a mask selects are written, they are as many as there is to write. Elsewhere it is
    all or none of them, as ``otherwise`` says.
    """
    count = _written(args[0], args[1], args[2]) if getattr(func, "overloadpacket", None) in _PUT else None
    return sys.maxsize * otherwise if count is None else count


def _written(whole: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor) -> int | None:
    """How many elements one mask among the indices selects, by what is written; None: it is not known."""
    given = [(position, index) for position, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dtype is not torch.bool:
        return None
    position, mask = given[0]
    inner = whole.dim() - position - mask.dim()  # dimensions after those that the mask selects from
    if values.dim() <= inner or concrete_size(values.shape[-1 - inner]) == 1:
        return None  # one for all
    return concrete_size(values.shape[-1 - inner])
