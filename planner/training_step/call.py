"""One call of an operator, as a recording keeps it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from planner._torch.operators import OpOverload, sized_by_data
from planner._torch.tensors import SPARSE, call_tensors
from planner._torch.without_data.answers import asks_for_data
from planner._torch.without_data.fake_values import known_count
from planner._torch.without_data.plain import device_of

aten = torch.ops.aten

Sizes = tuple[tuple[int, ...], ...]

MASKS = (torch.bool, torch.uint8)
WRITES_AT_MASKS = frozenset(
    {
        *(aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put),
        aten.masked_scatter_backward,
    }
)
"""Operators whose memory depends on how many elements the masks in their second argument select."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operator with its arguments. Tensors among them may be fake, and may be nested in lists.

    Attributes:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        sizes: Sizes that data decided: of its results, or, where it writes through masks, the number of
            elements that each mask selects. None where the arguments alone decide, or where the sizes are
            not known.
    """

    func: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sizes | None = None


def sizes_by_data(func: Any, args: Sequence[Any], result: Any) -> Sizes | None:
    """The sizes that data decided in a call, see :class:`Call`; None where there are none."""
    if getattr(func, "overloadpacket", None) in WRITES_AT_MASKS:
        return _selected_counts(args)
    packs = func is torch.ops.aten._pack_padded_sequence.default  # by lengths, and no tag says so
    if not packs and (not sized_by_data(func) or not asks_for_data(func, args)):
        return None
    sizes = sizes_of(result)
    return sizes if all(type(size) is int for shape in sizes for size in shape) else None


def _selected_counts(args: Sequence[Any]) -> Sizes | None:
    """How many elements each mask selects; None where that is not known of all of them."""
    masks = [tensor for tensor in call_tensors(args[1:2]) if tensor.dtype in MASKS]
    counts = [known_count(mask) for mask in masks]
    known = tuple((count,) for count in counts if count is not None)
    return known if known and len(known) == len(masks) else None


def sizes_of(result: Any) -> Sizes:
    """The sizes of the tensors among an operator's results."""
    return tuple(tuple(tensor.shape) for tensor in call_tensors(result))


_PLAIN = frozenset({int, float, bool, type(None), torch.dtype, torch.device, str})


def signature_of(value: Any) -> Any:
    """A key for one argument of a call, or for several: equal for equal values, and tensors of one form."""
    if isinstance(value, torch.Tensor):
        if value.layout in SPARSE:
            return (tuple(value.shape), value.layout, value.dtype, value.device)
        storage = value.untyped_storage().nbytes()
        lazy = (value.is_conj(), value.is_neg())
        return (value.shape, value.stride(), value.dtype, device_of(value), storage, lazy)
    if isinstance(value, list | tuple):
        return tuple(signature_of(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, signature_of(v)) for k, v in value.items())
    if type(value) in _PLAIN:
        return (type(value), value)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return (type(value), value)
