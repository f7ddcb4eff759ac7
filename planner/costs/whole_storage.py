"""Operations whose result is as large as the whole storage of their first argument, which may be a view.

They are functional forms of writes into views. They copy the whole storage, so that the result lies in its
copy as the view lay in the original. Their allocations do not follow from sizes and strides, and kernels
without data do not show them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from planner._torch.fake import concrete_size, storage_bytes

aten = torch.ops.aten

_COPY_STORAGE = frozenset(
    (aten.copy, aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter, aten.as_strided_scatter)
)


def whole_storage(func: object, args: Sequence[Any]) -> tuple[int, int] | None:
    """The elements of the storage of a call's first argument, and its offset; None for other operations."""
    if getattr(func, "overloadpacket", None) not in _COPY_STORAGE or not args:
        return None
    first = args[0]
    if not isinstance(first, torch.Tensor) or first.layout is not torch.strided:
        return None
    return storage_bytes(first) // first.element_size(), concrete_size(first.storage_offset())
