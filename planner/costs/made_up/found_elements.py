"""Data in which operators find as many elements as they found in the step (``nonzero``, ``x[mask]``).

The workspace of such an operator depends on that number, too: the positions that a mask selects are alive
until the elements there have been copied. Where data decide the sizes of results, they get the sizes that the
step recorded. Where an operator writes to elements that a mask selects, the mask selects as many as in the
step if that is known, or else as many as there are values to write. In the gradient of such a write it
selects as many as were written.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from planner._torch.tensors import schema_of
from planner._torch.without_data.answers import MASK_TYPES
from planner.training_step.call import WRITES_AT_MASKS, Call, Sizes, shapes_of

aten = torch.ops.aten

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def told_sizes(call: Call) -> Sizes | None:
    """The sizes that data decided in a call, if made-up data can reproduce them; see :class:`Call`."""
    packet = call.func.overloadpacket
    return call.sizes if packet in _SIZED or packet in _WRITTEN else None


def give(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Change a call's arguments with data so that it finds as many elements as in the step, where known."""
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
    """Check that a call returned the sizes of the step for made-up data.

    Raises:
        ValueError: It returned other sizes.
    """
    expected = told_sizes(call) if call.func.overloadpacket in _SIZED else None
    if expected is not None and (found := shapes_of(result)) != expected:
        raise ValueError(f"not measured: made-up data gave results of sizes {found}, not {expected}")


def _first(tensor: torch.Tensor, count: int, of: int) -> None:
    """Set elements of a tensor to 1 and the others to 0, so that ``count`` of ``of`` elements are 1.

    The operator expands the tensor to ``of`` elements.
    """
    each = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
    ones = torch.arange(each.numel(), device=each.device) < count // max(of // max(each.numel(), 1), 1)
    each.copy_(ones.view(each.shape))


def _masks(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [index for index in indices if index is not None and index.dtype in MASK_TYPES]


def _place(indices: Sequence[torch.Tensor | None]) -> tuple[int, int]:
    """The dimension of an indexed result for the elements that masks select; and how many dimensions fewer
    than the tensor the result has."""
    places, at = list[int](), 0
    for index in indices:
        # A mask stands for as many indices as it has dimensions.
        taken = index.dim() if index is not None and index.dtype in MASK_TYPES else 1
        places += range(at, at + taken) if index is not None else ()
        at += taken
    side_by_side = places[-1] - places[0] == len(places) - 1
    dims = max(1 if index.dtype in MASK_TYPES else index.dim() for index in indices if index is not None)
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
    """Set the longest target of a CTC loss; the result has a blank before each label and at the end."""
    if isinstance(named["target_lengths"], torch.Tensor):
        _one_number(named["target_lengths"], sizes[1][2] // 2)


def _packed(named: Mapping[str, Any], sizes: Sizes) -> None:
    """Set the lengths of sequences, the longest first, to as many steps in all as were packed.

    The kernel copies all steps but those that lie together already: of all sequences up to the end of the
    shortest, or of the longest beyond the others. With these lengths hardly any do: no others take more.
    """
    lengths, (steps, *_), (longest,) = named["lengths"], *sizes
    lengths.fill_(1)
    for i in range(len(lengths)):
        lengths[i] += min(steps - int(lengths.sum()), longest - 1)


def _one_number(numbers: torch.Tensor, number: int) -> None:
    numbers.zero_()
    if numbers.numel():
        numbers.view(-1)[0] = number


def _distinct(named: Mapping[str, Any], sizes: Sizes) -> None:
    """Make as many elements, or slices along a dimension, distinct; equal ones follow each other."""
    tensor, dim = named["self"], named.get("dim")
    of = tensor.numel() if dim is None else tensor.shape[dim]
    numbers = torch.arange(of, device=tensor.device).clamp(max=sizes[0][0 if dim is None else dim] - 1)
    if tensor.is_floating_point():  # floats of 16 bits hold few integers; their bit patterns are distinct
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
    aten._pack_padded_sequence: _packed,
    aten._unique: _distinct,
    aten._unique2: _distinct,
    aten.unique_consecutive: _distinct,
    aten.unique_dim: _distinct,
    aten.unique_dim_consecutive: _distinct,
    aten._ctc_loss: _lengths,
}

# ---- writes to elements that masks select --------------------------------------------------------


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
        return  # one value for all
    for mask in masks:
        _first(mask, values.shape[-1 - behind], mask.numel())


def _scattered(named: Mapping[str, Any], selected: Sizes | None) -> None:
    mask = named["mask"]
    if selected is not None:
        _first(mask, selected[0][0], mask.numel())
    else:
        _first(mask, math.prod(named["sizes"]), named["grad_output"].numel())


def _taken(named: Mapping[str, Any], _: Sizes | None) -> None:
    """Select no more elements than the source has: with too few the kernel of a GPU stops the process."""
    both = torch.broadcast_shapes(named["self"].shape, named["mask"].shape)
    _first(named["mask"], named["source"].numel(), math.prod(both))


_WRITTEN: dict[object, Callable[[Mapping[str, Any], Sizes | None], None]] = {
    **dict.fromkeys(WRITES_AT_MASKS, _put),
    aten.masked_scatter_backward: _scattered,
    aten.masked_scatter: _taken,
    aten.masked_scatter_: _taken,
}
