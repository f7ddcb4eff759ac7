"""How an operation is computed for some of its rows, operator by operator."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from planner._torch.execution.mask_operators import DRAW_MASK, MASKED_PRODUCT
from planner._torch.operators import uses_generator
from planner.graph.split.rows import Known, Part, Piecewise, Rows

aten = torch.ops.aten


def _placed(like: Rows, of: Sequence[int], shape: Sequence[int]) -> Rows | None:
    """The dimensions of a shape that are the rows of another shape of as many elements."""
    before, many, after = math.prod(of[: like.start]), math.prod(like.of(of)), math.prod(of[like.end :])
    start, seen = 0, 1
    while start < len(shape) and (seen < before or (shape[start] == 1 < many)):
        seen *= shape[start]
        start += 1
    end, rows = start, 1
    while end < len(shape) and (rows < many or end == start):  # a single row has a dimension too
        rows *= shape[end]
        end += 1
    fits = end > start and seen == before and rows == many and math.prod(shape[end:]) == after
    return like._replace(start=start, end=end) if fits else None


Rule = Callable[[Node, Known], Piecewise | None]


def given(node: Node) -> Any:
    """The arguments of a node, of whatever types they are."""
    return node.args


def shape_of(node: Node) -> tuple[int, ...]:
    """The sizes of a node's tensor."""
    return tuple(node.meta["val"].shape)


def piecewise(node: Node, known: Known) -> Piecewise | None:
    """How an operation with operands in a run is computed for some rows; None where it cannot be."""
    if uses_generator(node.target):
        return None  # a piece would draw other numbers
    rule = _RULES.get(node.target)
    one_result = isinstance(node.meta.get("val"), torch.Tensor)
    if rule is None and one_result and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = _pointwise
    made = None if rule is None else rule(node, known)
    return None if made is not None and one_result and _repeats(node, made, known) else made


def _repeats(node: Node, made: Piecewise, known: Known) -> bool:
    """Whether a result has more rows than what it is computed of, each of which is repeated then."""
    if made.rows is None:
        return False
    count = math.prod(made.rows.of(shape_of(node)))
    read = [n for n in node.all_input_nodes if n in known and isinstance(n.meta["val"], torch.Tensor)]
    alike = [n for n in read if known[n].parts == made.rows.parts]  # a slice has other rows
    return any(math.prod(known[n].of(shape_of(n))) != count for n in alike)


def is_mask(node: Node) -> bool:
    """Whether an operation draws a mask of dropout, for which it reads no more than a shape."""
    return node.target is DRAW_MASK and bool(node.meta["val"].is_contiguous())


def rows_of_product(node: Node) -> int | None:
    """How many rows a run has that begins with a product of rows and a weight; None for all else."""
    if node.target not in (aten.mm.default, aten.addmm.default) or not isinstance(
        node.meta.get("val"), torch.Tensor
    ):
        return None
    count = shape_of(node)[0]
    return count if isinstance(count, int) and count > 1 else None


def begin(node: Node) -> Piecewise:
    """How the first product of a run is computed for some rows."""
    factor = given(node)[0 if node.target is aten.mm.default else 1]
    assert isinstance(factor, Node)
    return Piecewise("rows", Rows(0, 1), _as_they_are(node), node.target, {factor: Rows(0, 1)}, node.kwargs)


def _as_they_are(node: Node) -> Callable[[int], tuple[Any, ...]]:
    return lambda _rows: tuple(given(node))


def _in_rows(node: Node, rows: Rows, args: Callable[[int], tuple[Any, ...]] | None = None) -> Piecewise:
    return Piecewise("rows", rows, args or _as_they_are(node), node.target, kwargs=node.kwargs)


# ---- views ---------------------------------------------------------------------------------------------


def _view(node: Node, known: Known) -> Piecewise | None:
    source, shape = given(node)[0], shape_of(node)
    rows, before = known[source], shape_of(source)
    found = _placed(rows, before, shape)
    if found is None:
        return None
    return _in_rows(node, found, lambda n: (source, found.sizes(shape, n)))


def _same(node: Node, known: Known) -> Piecewise | None:
    source = given(node)[0]
    if node.target is aten.clone.default and known[source].parts != _parts_read(source, known):
        return _as_it_is(source, known[source])  # a copy of the rows of a slice
    return _in_rows(node, known[source])


def _as_it_is(source: Node, rows: Rows) -> Piecewise:
    return Piecewise("rows", rows, lambda _n: (source,), aten.alias.default)


def _parts_read(node: Node, known: Known) -> tuple[Part, ...]:
    read = [known[n].parts for n in node.all_input_nodes if n in known]
    return read[0] if read else known[node].parts


def _transposed(node: Node, known: Known) -> Piecewise | None:
    source = given(node)[0]
    rows, rank = known[source], len(shape_of(node))
    first, second = (d % rank for d in given(node)[1:]) if len(given(node)) == 3 else (0, rank - 1)
    if rank < 2 or rows.end - rows.start != 1:
        return None
    start = {first: second, second: first}.get(rows.start, rows.start)
    return _in_rows(node, rows._replace(start=start, end=start + 1))


def _unsqueezed(node: Node, known: Known) -> Piecewise | None:
    rows, dim = known[given(node)[0]], given(node)[1] % len(shape_of(node))
    if rows.start < dim < rows.end:
        return None
    found = rows if dim >= rows.end else rows.moved(1)
    return _in_rows(node, found, lambda _n: (given(node)[0], found.dim(dim)))


def _squeezed(node: Node, known: Known) -> Piecewise | None:
    source = given(node)[0]
    rows, rank = known[source], len(shape_of(source))
    dim = given(node)[1] % rank
    if rows.at(dim) or shape_of(source)[dim] != 1:
        return None
    found = rows if dim >= rows.end else rows.moved(-1)
    return _in_rows(node, found, lambda _n: (source, rows.dim(dim)))


def _expanded(node: Node, known: Known) -> Piecewise | None:
    source, shape = given(node)[0], shape_of(node)
    rows, more = known[source], len(shape) - len(shape_of(source))
    found = rows.moved(more)
    return _in_rows(node, found, lambda n: (source, found.sizes(shape, n)))


def _sliced(node: Node, known: Known) -> Piecewise | None:
    source, dim = given(node)[0], given(node)[1] if len(given(node)) > 1 else 0
    rows, dim = known[source], dim % len(shape_of(source))
    if not rows.at(dim):
        return _in_rows(node, rows, lambda _n: (source, rows.dim(dim), *given(node)[2:]))
    taken = _part(node, rows, shape_of(source), dim, given(node)[2:])
    return None if taken is None else _as_it_is(source, rows._replace(parts=(*rows.parts, *taken)))


def _sliced_backward(node: Node, known: Known) -> Piecewise | None:
    source, sizes, dim = given(node)[:3]
    rows, dim = known[source], dim % len(sizes)
    if not rows.at(dim):
        return _in_rows(node, rows, lambda n: (source, rows.sizes(sizes, n), rows.dim(dim), *given(node)[3:]))
    taken = _part(source, rows, sizes, dim, given(node)[3:])
    if taken is None or rows.parts[len(rows.parts) - len(taken) :] != tuple(taken):
        return None
    return _as_it_is(source, rows._replace(parts=rows.parts[: len(rows.parts) - len(taken)]))


def _part(
    sliced: Node, rows: Rows, sizes: Sequence[int], dim: int, bounds: Sequence[Any]
) -> list[Part] | None:
    """The part of the rows that a slice of a dimension takes; an empty list if it takes all of them."""
    left_out: list[Any] = [None, None, 1]
    first, last, step = [*bounds, *left_out[len(bounds) :]]
    begin, end, _ = slice(first, last).indices(sizes[dim])
    if step != 1 or begin == end or end - begin != shape_of(sliced)[dim]:
        return None
    whole = end - begin == sizes[dim]
    return [] if whole else [Part(tuple(rows.of(sizes)), dim - rows.start, begin, end)]


# ---- element by element, and along other dimensions ----------------------------------------------------


def _pointwise(node: Node, known: Known) -> Piecewise | None:
    shape, found = shape_of(node), set[Rows]()
    for operand in node.all_input_nodes:
        if operand in known:
            rows, more = known[operand], len(shape) - len(shape_of(operand))
            found.add(rows.moved(more))
    return _pointwise_of(node, *found) if len(found) == 1 else None


def _pointwise_of(node: Node, rows: Rows) -> Piecewise | None:
    shape, operands = shape_of(node), {}
    for operand in node.all_input_nodes:
        if not isinstance(operand.meta.get("val"), torch.Tensor):
            return None
        more, sizes = len(shape) - len(shape_of(operand)), shape_of(operand)
        if more >= rows.end:
            continue
        beside = sizes[max(rows.start - more, 0) : rows.end - more]
        if beside == rows.of(shape):
            operands[operand] = rows.moved(-more)
        elif any(size != 1 for size in beside) or len(beside) > 1:
            return None
    return Piecewise("rows", rows, _as_they_are(node), node.target, operands, node.kwargs)


def _along_a_dimension(node: Node, known: Known) -> Piecewise | None:
    """Softmax over a dimension that has no rows, and its backward."""
    place = 1 if node.target in (aten._log_softmax.default, aten._softmax.default) else 2
    tensors = given(node)[:place]
    found = {known[n] for n in tensors if n in known}
    (rows,) = found if len(found) == 1 else (None,)
    if rows is None:
        return None
    dim = given(node)[place] % len(shape_of(node))
    if rows.at(dim):
        return None
    operands = {n: rows for n in tensors if n not in known}

    def args(_n: int) -> tuple[Any, ...]:
        return *tensors, rows.dim(dim), *given(node)[place + 1 :]

    return Piecewise("rows", rows, args, node.target, operands, node.kwargs)


def _reduced(node: Node, known: Known) -> Piecewise | None:
    source = given(node)[0]
    rows, shape = known[source], shape_of(source)
    named = given(node)[1] if len(given(node)) > 1 else None
    listed = [named] if isinstance(named, int) else (named or range(len(shape)))
    dims = {d % len(shape) for d in listed}
    keep = bool(given(node)[2]) if len(given(node)) > 2 else False
    over = {d for d in dims if rows.at(d)}
    if not over:
        fewer = 0 if keep else sum(d < rows.start for d in dims)
        return _in_rows(
            node,
            rows.moved(-fewer),
            lambda _n: (source, _like(named, [rows.dim(d) for d in sorted(dims)]), *given(node)[2:]),
        )
    if len(over) != rows.end - rows.start:
        return None
    left = sorted({rows.dim(d) if d not in over else rows.start for d in dims})
    kwargs = dict(node.kwargs)
    if node.meta["val"].dtype in (torch.float16, torch.bfloat16):
        kwargs["dtype"] = torch.float32  # sums may be larger than any number of half precision
    if node.target in (aten.sum.dim_IntList, aten.sum.default):
        return Piecewise("sum", None, lambda _n: (source, left, keep), aten.sum.dim_IntList, kwargs=kwargs)
    if node.target in (aten.mean.dim, aten.mean.default) and not node.kwargs:
        count = math.prod(shape[d] for d in dims)
        return Piecewise(
            "mean", None, lambda _n: (source, left, keep), aten.sum.dim_IntList, kwargs=kwargs, count=count
        )
    return None


def _like(named: Any, dims: list[int]) -> Any:
    return dims[0] if isinstance(named, int) else dims


def _gathered(node: Node, known: Known) -> Piecewise | None:
    found = {known[n] for n in node.all_input_nodes if n in known}
    return _gathered_of(node, *found) if len(found) == 1 else None


def _gathered_of(node: Node, rows: Rows) -> Piecewise | None:
    """What reads, or writes, at indices along a dimension that has no rows."""
    shape = shape_of(node)
    dim = given(node)[1] % len(shape)
    if rows.at(dim):
        return None
    for operand in node.all_input_nodes:
        sizes = shape_of(operand)
        if len(sizes) != len(shape) or rows.of(sizes) != rows.of(shape):
            return None
    operands = dict.fromkeys(node.all_input_nodes, rows)

    def args(_n: int) -> tuple[Any, ...]:
        return given(node)[0], rows.dim(dim), *given(node)[2:]

    return Piecewise("rows", rows, args, node.target, operands, node.kwargs)


# ---- what a run reads from outside, computed for some rows too -----------------------------------------


def computed_for(node: Node, rows: Rows) -> Piecewise | None:
    """How an operand from outside of a run, of which it reads the rows, is computed for some of them; None
    where it cannot be."""
    target, shape = node.target, shape_of(node)

    def in_shape(source: Any) -> Callable[[int], tuple[Any, ...]]:
        return lambda n: (source, rows.sizes(shape, n))

    if target in _FILLED:
        value, number = node.meta["val"], _FILLED[target](node)
        kwargs = {"dtype": value.dtype, "device": value.device}
        return Piecewise(
            "rows", rows, lambda n: (rows.sizes(shape, n), number), aten.full.default, kwargs=kwargs
        )
    source = given(node)[0] if given(node) else None
    if not isinstance(source, Node) or not isinstance(source.meta.get("val"), torch.Tensor):
        return None
    if target in _GATHERED:
        return _gathered_of(node, rows)
    if target is aten.slice_backward.default and rows.at(given(node)[2] % len(shape)):
        taken = _part(source, rows, shape, given(node)[2] % len(shape), given(node)[3:])
        found = None if taken is None else rows._replace(parts=(*rows.parts, *taken))
        return found and replace(_as_it_is(source, rows), operands={source: found})
    if target is aten.mm.default:
        return begin(node) if rows[:2] == (0, 1) and not rows.parts else None
    if target is aten.expand.default:
        made = _pointwise_of(node, rows)
        return made and replace(made, args=in_shape(source))
    if target in _SAME or target in _VIEWED:
        found = _placed(rows, shape, shape_of(source))
        if found is None:
            return None
        if target in _SAME:
            return Piecewise("rows", rows, _as_they_are(node), target, {source: found}, node.kwargs)
        return Piecewise("rows", rows, in_shape(source), aten.view.default, {source: found})
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return _pointwise_of(node, rows)
    return None


# ---- products ------------------------------------------------------------------------------------------


def _product(node: Node, known: Known) -> Piecewise | None:
    first, second = given(node)
    rows = [known.get(n) for n in (first, second)]
    (parts, *others) = {r.parts for r in rows if r is not None}
    if others:
        return None
    contracted = [rows[0] == Rows(1, 2, parts), rows[1] == Rows(0, 1, parts)]
    if any(contracted):
        if not all(c or r is None for c, r in zip(contracted, rows, strict=True)):
            return None
        operands = {n: Rows(1 - i, 2 - i, parts) for i, n in enumerate((first, second)) if rows[i] is None}
        return Piecewise("sum", None, _as_they_are(node), node.target, operands, added=True)
    if rows == [Rows(0, 1, parts), None] or rows == [None, Rows(1, 2, parts)]:
        return Piecewise("product", rows[0] or rows[1], _as_they_are(node), node.target)
    return None


def _product_and_bias(node: Node, known: Known) -> Piecewise | None:
    bias, first, second = given(node)
    rows = known.get(first)
    if rows is None or rows[:2] != (0, 1) or bias in known or second in known:
        return None
    if len(shape_of(bias)) != 1:
        return None
    return Piecewise("product", rows, _as_they_are(node), node.target, kwargs=node.kwargs)


# ---- negative log likelihood, whose means are sums that are divided, see `pieces.py` ---------------------


def _nll(node: Node, known: Known) -> Piecewise | None:
    scores, target, weight, reduction, _ = given(node)
    rows = known.get(scores)
    if rows is None or rows[:2] != (0, 1) or len(shape_of(scores)) != 2:
        return None
    if reduction == 1 or target in known or weight in known:
        return None
    return Piecewise("several", rows, _as_they_are(node), node.target, {target: rows})


def _one_of_several(node: Node, known: Known) -> Piecewise | None:
    call, position = given(node)
    target = getattr(call, "target", None)
    if target is aten.nll_loss_forward.default:
        of_rows = given(call)[3] == 0 and position == 0
    elif target is aten.native_layer_norm_backward.default:
        of_rows = position == 0
    elif target is aten.native_layer_norm.default:
        of_rows = True
    else:
        return None
    rows = known[call] if of_rows else None
    return Piecewise("sum" if rows is None else "rows", rows, _as_they_are(node), operator.getitem)


def _nll_backward(node: Node, known: Known) -> Piecewise | None:
    gradient, scores, target, weight, reduction, _, total = given(node)
    rows = known.get(scores)
    if rows is None or rows[:2] != (0, 1) or len(shape_of(scores)) != 2:
        return None
    if reduction == 1 or any(n in known for n in (target, weight, total)):
        return None
    operands = {target: rows}
    if reduction == 0 and gradient not in known:
        operands[gradient] = rows
    return Piecewise("rows", rows, _as_they_are(node), node.target, operands)


# ---- layer norms -----------------------------------------------------------------------------------------


def _layer_norm(node: Node, known: Known) -> Piecewise | None:
    """A norm of rows, or its backward, whose gradients of weight and bias are sums over rows."""
    sizes = given(node)[1 if node.target is aten.native_layer_norm.default else 2]
    normed = [n for n in node.all_input_nodes if len(shape_of(n)) > len(sizes)]
    found = {known[n] for n in normed if n in known}
    (rows,) = found if len(found) == 1 else (None,)
    if rows is None or rows.end > len(shape_of(normed[0])) - len(sizes):
        return None
    operands = {n: rows for n in normed if n not in known}
    return Piecewise("several", rows, _as_they_are(node), node.target, operands)


_GATHERED = (aten.gather.default, aten.scatter_add.default, aten.scatter.value, aten.scatter.src)

_SAME = (aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default)

_LIKE = (aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default)

_VIEWED = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.unsqueeze.default, aten.squeeze.dim),
)

_FILLED: dict[Any, Callable[[Node], Any]] = {
    **dict.fromkeys((aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default), lambda _node: 0),
    **dict.fromkeys((aten.ones.default, aten.new_ones.default, aten.ones_like.default), lambda _node: 1),
    aten.full.default: lambda node: given(node)[1],
}
"""By operator that fills a tensor with one number: a function that reads this number from its node."""

_RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _view),
    **dict.fromkeys((*_SAME, *_LIKE), _same),
    **dict.fromkeys((aten.t.default, aten.transpose.int), _transposed),
    aten.unsqueeze.default: _unsqueezed,
    aten.squeeze.dim: _squeezed,
    aten.expand.default: _expanded,
    aten.slice.Tensor: _sliced,
    aten.slice_backward.default: _sliced_backward,
    **dict.fromkeys(
        (aten._log_softmax.default, aten._softmax.default, aten._log_softmax_backward_data.default,
         aten._softmax_backward_data.default), _along_a_dimension
    ),
    **dict.fromkeys(
        (aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.amax.default,
         aten.amin.default, aten.logsumexp.default, aten.argmax.default), _reduced
    ),
    **dict.fromkeys(_GATHERED, _gathered),
    **dict.fromkeys(
        (aten.native_layer_norm.default, aten.native_layer_norm_backward.default), _layer_norm
    ),
    aten.mm.default: _product,
    aten.addmm.default: _product_and_bias,
    MASKED_PRODUCT: _pointwise,
    aten.nll_loss_forward.default: _nll,
    operator.getitem: _one_of_several,
    aten.nll_loss_backward.default: _nll_backward,
}  # fmt: skip
"""By operator; all others that compute element by element follow one rule."""
