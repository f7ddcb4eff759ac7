"""A recorded call of an operator: its arguments, and the sizes that data decided in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from planner._torch.operators import OpOverload, sized_by_data
from planner._torch.tensors import SPARSE, call_tensors
from planner._torch.without_data.answers import MASK_TYPES, asks_for_data
from planner._torch.without_data.fake_values import known_count
from planner._torch.without_data.plain import device_of

aten = torch.ops.aten

Sizes = tuple[tuple[int, ...], ...]
"""The shape of each tensor, or a tuple of one number for each mask: the elements that it selects."""

WRITES_AT_MASKS = frozenset(
    {
        *(aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put),
        aten.masked_scatter_backward,
    }
)
"""Operators whose memory depends on how many elements the masks in their second argument select."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operator with its arguments. Tensors among these may be fake, and may be in nested lists.

    Attributes:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        sizes: The sizes that data decided: the shapes of its results, as those of ``nonzero``; of an operator
            in ``WRITES_AT_MASKS``, how many elements each mask selects. None where shapes of the arguments
            decide them, or where they are not known.
    """

    func: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sizes | None = None


def sizes_by_data(func: Any, args: Sequence[Any], result: Any) -> Sizes | None:
    """The ``sizes`` of a :class:`Call` with a given result."""
    if getattr(func, "overloadpacket", None) in WRITES_AT_MASKS:
        return _selected_counts(args)
    # The lengths, which are data, decide the size of its result; PyTorch gives it no tag that says so.
    packs = func is torch.ops.aten._pack_padded_sequence.default
    if not packs and (not sized_by_data(func) or not asks_for_data(func, args)):
        return None
    shapes = shapes_of(result)
    return shapes if all(type(size) is int for shape in shapes for size in shape) else None


def _selected_counts(args: Sequence[Any]) -> Sizes | None:
    """How many elements each mask selects; None where there is no mask, or one whose data is not known."""
    masks = [tensor for tensor in call_tensors(args[1:2]) if tensor.dtype in MASK_TYPES]
    counts = [known_count(mask) for mask in masks]
    known = tuple((count,) for count in counts if count is not None)
    return known if known and len(known) == len(masks) else None


def shapes_of(result: Any) -> Sizes:
    """The shapes of the tensors among an operator's results."""
    return tuple(tuple(tensor.shape) for tensor in call_tensors(result))


_HASHABLE = frozenset({int, float, bool, type(None), torch.dtype, torch.device, str})
"""The types of most arguments that are no tensors; the others are tried."""


def signature_of(value: Any) -> Any:
    """A hashable key for one argument of a call, or for several.

    Keys are equal where numbers and options are equal, and tensors have the same shape, strides, type, device
    and bytes of storage, whatever their data.
    """
    if isinstance(value, torch.Tensor):
        if value.layout in SPARSE:
            return (tuple(value.shape), value.layout, value.dtype, value.device)
        storage_bytes = value.untyped_storage().nbytes()
        is_lazy = (value.is_conj(), value.is_neg())  # operators materialise such views, which takes memory
        return (value.shape, value.stride(), value.dtype, device_of(value), storage_bytes, is_lazy)
    if isinstance(value, list | tuple):
        return tuple(signature_of(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, signature_of(v)) for k, v in value.items())
    if type(value) in _HASHABLE:
        return (type(value), value)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return (type(value), value)
