"""Data in which operators find as many elements as they found in the step (``nonzero``, ``x[mask]``).

What such an operator allocates besides its results follows from how many these are, too: the positions that a
mask selects are there until what lies at them has been copied. Where data decide the sizes of results, these
are those that the step recorded. Where elements that a mask selects are written, they are as many as it
selects if that is known, else as many as there is to write, and where their gradient is taken as many as were
written.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from planner._torch.tensors import schema_of
from planner.training_step.call import MASKS, WRITES_AT_MASKS, Call, Sizes, sizes_of

aten = torch.ops.aten

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def told_sizes(call: Call) -> Sizes | None:
    """The sizes of a call's results, if data decide them and it is known which data do; of what is selected
    where it writes there."""
    packet = call.func.overloadpacket
    return call.sizes if packet in _SIZED or packet in _WRITTEN else None


def give(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Change arguments for a call, which have data, so that it finds as many elements as are known."""
    sized, written = _SIZED.get(call.func.overloadpacket), _WRITTEN.get(call.func.overloadpacket)
    if written is None and (sized is None or call.sizes is None):
        return
    names = (argument.name for argument in schema_of(call.func).arguments)
    named = dict(zip(names, args, strict=False)) | dict(kwargs)
    if written is not None:
        written(named, call.sizes)
    elif sized is not None and call.sizes is not None:
        sized(named, call.sizes)


def check(call: Call, result: Any) -> None:
    """
    Raises:
        ValueError: what a call returned for made-up data does not have the sizes that it was to have.
    """
    expected = told_sizes(call) if call.func.overloadpacket in _SIZED else None
    if expected is not None and (found := sizes_of(result)) != expected:
        raise ValueError(f"not measured: made-up data gave results of sizes {found}, not {expected}")


def _first(tensor: torch.Tensor, count: int, of: int) -> None:
    """Make ones of elements of a tensor, and zeros of the others, so that ``count`` are ones where the tensor
    is expanded to ``of`` elements."""
    each = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
    there = torch.arange(each.numel(), device=each.device) < count // max(of // max(each.numel(), 1), 1)
    each.copy_(there.view(each.shape))


def _masks(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [index for index in indices if index is not None and index.dtype in MASKS]


def _place(indices: Sequence[torch.Tensor | None]) -> tuple[int, int]:
    """Which dimension of what is indexed has the elements that masks among the indices select, and how many
    dimensions of the tensor are before it, or are indexed: what follows is as in the tensor."""
    places, at = list[int](), 0
    for index in indices:
        taken = index.dim() if index is not None and index.dtype in MASKS else 1  # a mask is so many indices
        places += range(at, at + taken) if index is not None else ()
        at += taken
    side_by_side = places[-1] - places[0] == len(places) - 1
    dims = max(1 if index.dtype in MASKS else index.dim() for index in indices if index is not None)
    return (places[0] if side_by_side else 0) + dims - 1, len(places) - dims


# ---- results whose sizes data decide -------------------------------------------------------------


def _index(named: Mapping[str, Any], sizes: Sizes) -> None:
    place, _ = _place(named["indices"])
    for mask in _masks(named["indices"]):
        _first(mask, sizes[0][place], mask.numel())


def _selected(named: Mapping[str, Any], sizes: Sizes) -> None:
    both = torch.broadcast_shapes(named["self"].shape, named["mask"].shape)
    _first(named["mask"], sizes[0][0], math.prod(both))


def _nonzero(named: Mapping[str, Any], sizes: Sizes) -> None:
    _first(named["self"], sizes[0][0], named["self"].numel())


def _repeated(named: Mapping[str, Any], sizes: Sizes) -> None:
    _one_number(named["repeats"], sizes[0][0])


def _counted(named: Mapping[str, Any], sizes: Sizes) -> None:
    _one_number(named["self"], sizes[0][0] - 1)  # the largest is that of the last bin


def _lengths(named: Mapping[str, Any], sizes: Sizes) -> None:
    """The longest target of those of a CTC loss, with a blank before each of its labels and behind them."""
    if isinstance(named["target_lengths"], torch.Tensor):
        _one_number(named["target_lengths"], sizes[1][2] // 2)


def _one_number(numbers: torch.Tensor, number: int) -> None:
    numbers.zero_()
    if numbers.numel():
        numbers.view(-1)[0] = number


def _distinct(named: Mapping[str, Any], sizes: Sizes) -> None:
    """As many distinct elements, or slices along a dimension, the same ones one after the other."""
    tensor, dim = named["self"], named.get("dim")
    of = tensor.numel() if dim is None else tensor.shape[dim]
    numbers = torch.arange(of, device=tensor.device).clamp(max=sizes[0][0 if dim is None else dim] - 1)
    if tensor.is_floating_point():  # which need not hold all integers; bits of numbers are numbers, in order
        numbers = numbers.to(_INTEGERS[tensor.element_size()]).view(tensor.dtype)
    if dim is None:
        tensor.copy_(numbers.view(tensor.shape))
    else:
        tensor.movedim(dim, -1).copy_(numbers)


_SIZED: dict[object, Callable[[Mapping[str, Any], Sizes], None]] = {
    aten.index: _index,
    aten.masked_select: _selected,
    aten.nonzero: _nonzero,
    aten.argwhere: _nonzero,
    aten.repeat_interleave: _repeated,
    aten.bincount: _counted,
    aten._unique: _distinct,
    aten._unique2: _distinct,
    aten.unique_consecutive: _distinct,
    aten.unique_dim: _distinct,
    aten.unique_dim_consecutive: _distinct,
    aten._ctc_loss: _lengths,
}

# ---- writes to what masks select -----------------------------------------------------------------


def _put(named: Mapping[str, Any], selected: Sizes | None) -> None:
    indices, values = named["indices"], named["values"]
    if not (masks := _masks(indices)):
        return
    if selected is not None:
        for mask, (count,) in zip(masks, selected, strict=True):
            _first(mask, count, mask.numel())
        return
    place, fewer = _place(indices)
    behind = named["self"].dim() - fewer - place - 1  # dimensions after those that masks select from
    if values.dim() <= behind or values.shape[-1 - behind] == 1:
        return  # one for all
    for mask in masks:
        _first(mask, values.shape[-1 - behind], mask.numel())


def _scattered(named: Mapping[str, Any], selected: Sizes | None) -> None:
    mask = named["mask"]
    if selected is not None:
        _first(mask, selected[0][0], mask.numel())
    else:
        _first(mask, math.prod(named["sizes"]), named["grad_output"].numel())


def _taken(named: Mapping[str, Any], _: Sizes | None) -> None:
    """No more than the source has: where there are too few, the kernel on a GPU stops the whole process."""
    both = torch.broadcast_shapes(named["self"].shape, named["mask"].shape)
    _first(named["mask"], named["source"].numel(), math.prod(both))


_WRITTEN: dict[object, Callable[[Mapping[str, Any], Sizes | None], None]] = {
    **dict.fromkeys(WRITES_AT_MASKS, _put),
    aten.masked_scatter_backward: _scattered,
    aten.masked_scatter: _taken,
    aten.masked_scatter_: _taken,
}
