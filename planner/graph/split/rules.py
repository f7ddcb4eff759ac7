"""How an operation is computed for some of its rows, operator by operator.

The rows of a tensor are one or several of its dimensions that lie beside each other: (batch, sequence) of
logits of (batch, sequence, vocabulary). In a piece they are one dimension.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch.fx import Node

from planner._torch.operators import uses_generator

aten = torch.ops.aten


class Rows(NamedTuple):
    """The dimensions of a tensor that are rows, from `start` to before `end`."""

    start: int
    end: int

    def dim(self, dim: int) -> int:
        """Where a dimension that is none of the rows is in a piece."""
        return dim if dim < self.start else dim - (self.end - self.start - 1)

    def sizes(self, sizes: Sequence[int], rows: int) -> list[int]:
        """The sizes of a piece of so many rows."""
        return [*sizes[: self.start], rows, *sizes[self.end :]]


Kind = Literal["rows", "product", "several", "sum", "mean"]
"""What a result is: rows; rows that a product with a weight made; several results, each of which is taken by
itself; or a sum or a mean over all rows."""


@dataclass(frozen=True)
class Piecewise:
    """How an operation is computed for some rows.

    Attributes:
        kind: What its result is.
        rows: The rows of its result, where it has rows.
        operands: Which of its operands from outside of the run have rows, and where.
        args: Its arguments in a piece of so many rows; nodes are those of the joint graph.
        target: The operator in a piece.
        kwargs: Its arguments by name.
        count: How many elements are averaged in all, of a mean.
        added: The two factors, of a product that sums over rows.
    """

    kind: Kind
    rows: Rows | None
    args: Callable[[int], tuple[Any, ...]]
    target: Any
    operands: Mapping[Node, Rows] = field(default_factory=dict)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1
    added: bool = False


class Known(NamedTuple):
    """What is known of a run so far.

    Attributes:
        size: How many rows it has.
        rows: Where the rows are of its values.
    """

    size: int
    rows: Mapping[Node, Rows]

    def placed(self, shape: Sequence[int], before: int, after: int) -> Rows | None:
        """The dimensions of a shape that are the rows, with so many elements before and after."""
        start, seen = 0, 1
        while start < len(shape) and (seen < before or shape[start] == 1):
            seen *= shape[start]
            start += 1
        end, rows = start, 1
        while end < len(shape) and rows < self.size:
            rows *= shape[end]
            end += 1
        fits = seen == before and rows == self.size and math.prod(shape[end:]) == after
        return Rows(start, end) if fits else None


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
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = _pointwise
    return None if rule is None else rule(node, known)


def product_of_rows(node: Node) -> Known | None:
    """What is known of a run that begins with a product of rows and a weight; None for all else."""
    if node.target not in (aten.mm.default, aten.addmm.default) or not isinstance(
        node.meta.get("val"), torch.Tensor
    ):
        return None
    count = shape_of(node)[0]
    return Known(count, {node: Rows(0, 1)}) if isinstance(count, int) and count > 1 else None


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
    rows, before = known.rows[source], shape_of(source)
    found = known.placed(shape, math.prod(before[: rows.start]), math.prod(before[rows.end :]))
    if found is None:
        return None
    return _in_rows(node, found, lambda n: (source, found.sizes(shape, n)))


def _same(node: Node, known: Known) -> Piecewise | None:
    return _in_rows(node, known.rows[given(node)[0]])


def _transposed(node: Node, known: Known) -> Piecewise | None:
    source = given(node)[0]
    rows, rank = known.rows[source], len(shape_of(node))
    first, second = (d % rank for d in given(node)[1:]) if len(given(node)) == 3 else (0, rank - 1)
    if rank < 2 or rows.end - rows.start != 1:
        return None
    start = {first: second, second: first}.get(rows.start, rows.start)
    return _in_rows(node, Rows(start, start + 1))


def _unsqueezed(node: Node, known: Known) -> Piecewise | None:
    rows, dim = known.rows[given(node)[0]], given(node)[1] % len(shape_of(node))
    if rows.start < dim < rows.end:
        return None
    found = rows if dim >= rows.end else Rows(rows.start + 1, rows.end + 1)
    return _in_rows(node, found, lambda _n: (given(node)[0], found.dim(dim)))


def _squeezed(node: Node, known: Known) -> Piecewise | None:
    source = given(node)[0]
    rows, rank = known.rows[source], len(shape_of(source))
    dim = given(node)[1] % rank
    if rows.start <= dim < rows.end or shape_of(source)[dim] != 1:
        return None
    found = rows if dim >= rows.end else Rows(rows.start - 1, rows.end - 1)
    return _in_rows(node, found, lambda _n: (source, rows.dim(dim)))


def _expanded(node: Node, known: Known) -> Piecewise | None:
    source, shape = given(node)[0], shape_of(node)
    rows, more = known.rows[source], len(shape) - len(shape_of(source))
    found = Rows(rows.start + more, rows.end + more)
    return _in_rows(node, found, lambda n: (source, found.sizes(shape, n)))


def _sliced(node: Node, known: Known) -> Piecewise | None:
    source, dim = given(node)[0], given(node)[1] if len(given(node)) > 1 else 0
    rows, dim = known.rows[source], dim % len(shape_of(source))
    if rows.start <= dim < rows.end:
        return None
    return _in_rows(node, rows, lambda _n: (source, rows.dim(dim), *given(node)[2:]))


def _sliced_backward(node: Node, known: Known) -> Piecewise | None:
    source, sizes, dim = given(node)[:3]
    rows, dim = known.rows[source], dim % len(sizes)
    if rows.start <= dim < rows.end:
        return None
    return _in_rows(node, rows, lambda n: (source, rows.sizes(sizes, n), rows.dim(dim), *given(node)[3:]))


# ---- element by element, and along other dimensions ----------------------------------------------------


def _pointwise(node: Node, known: Known) -> Piecewise | None:
    shape, found = shape_of(node), set[Rows]()
    for operand in node.all_input_nodes:
        if operand in known.rows:
            rows, more = known.rows[operand], len(shape) - len(shape_of(operand))
            found.add(Rows(rows.start + more, rows.end + more))
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
        if beside == shape[rows.start : rows.end]:
            operands[operand] = Rows(rows.start - more, rows.end - more)
        elif any(size != 1 for size in beside) or len(beside) > 1:
            return None
    return Piecewise("rows", rows, _as_they_are(node), node.target, operands, node.kwargs)


def _along_a_dimension(node: Node, known: Known) -> Piecewise | None:
    """Softmax over a dimension that has no rows, and its backward."""
    place = 1 if node.target in (aten._log_softmax.default, aten._softmax.default) else 2
    tensors = given(node)[:place]
    found = {known.rows[n] for n in tensors if n in known.rows}
    (rows,) = found if len(found) == 1 else (None,)
    if rows is None:
        return None
    dim = given(node)[place] % len(shape_of(node))
    if rows.start <= dim < rows.end:
        return None
    operands = {n: rows for n in tensors if n not in known.rows}

    def args(_n: int) -> tuple[Any, ...]:
        return *tensors, rows.dim(dim), *given(node)[place + 1 :]

    return Piecewise("rows", rows, args, node.target, operands, node.kwargs)


def _reduced(node: Node, known: Known) -> Piecewise | None:
    source = given(node)[0]
    rows, shape = known.rows[source], shape_of(source)
    named = given(node)[1] if len(given(node)) > 1 else None
    listed = [named] if isinstance(named, int) else (named or range(len(shape)))
    dims = {d % len(shape) for d in listed}
    keep = bool(given(node)[2]) if len(given(node)) > 2 else False
    over = dims & {*range(*rows)}
    if not over:
        fewer = 0 if keep else sum(d < rows.start for d in dims)
        found = Rows(rows.start - fewer, rows.end - fewer)
        return _in_rows(
            node,
            found,
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
    found = {known.rows[n] for n in node.all_input_nodes if n in known.rows}
    return _gathered_of(node, *found) if len(found) == 1 else None


def _gathered_of(node: Node, rows: Rows) -> Piecewise | None:
    """What reads, or writes, at indices along a dimension that has no rows."""
    shape = shape_of(node)
    dim = given(node)[1] % len(shape)
    if rows.start <= dim < rows.end:
        return None
    for operand in node.all_input_nodes:
        sizes = shape_of(operand)
        if len(sizes) != len(shape) or sizes[slice(*rows)] != shape[slice(*rows)]:
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
    if target is aten.mm.default:
        return begin(node) if rows == Rows(0, 1) else None
    if target is aten.expand.default:
        made = _pointwise_of(node, rows)
        return made and replace(made, args=in_shape(source))
    if target in _SAME or target in _VIEWED:
        known = Known(math.prod(shape[slice(*rows)]), {})
        before, after = math.prod(shape[: rows.start]), math.prod(shape[rows.end :])
        found = known.placed(shape_of(source), before, after)
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
    rows = [known.rows.get(n) for n in (first, second)]
    contracted = [rows[0] == Rows(1, 2), rows[1] == Rows(0, 1)]
    if any(contracted):
        if not all(c or r is None for c, r in zip(contracted, rows, strict=True)):
            return None
        operands = {n: Rows(1 - i, 2 - i) for i, n in enumerate((first, second)) if rows[i] is None}
        return Piecewise("sum", None, _as_they_are(node), node.target, operands, added=True)
    if rows == [Rows(0, 1), None] or rows == [None, Rows(1, 2)]:
        found = Rows(0, 1) if rows[1] is None else Rows(1, 2)
        return Piecewise("product", found, _as_they_are(node), node.target)
    return None


def _product_and_bias(node: Node, known: Known) -> Piecewise | None:
    bias, first, second = given(node)
    if known.rows.get(first) != Rows(0, 1) or bias in known.rows or second in known.rows:
        return None
    if len(shape_of(bias)) != 1:
        return None
    return Piecewise("product", Rows(0, 1), _as_they_are(node), node.target, kwargs=node.kwargs)


# ---- negative log likelihood, whose means are sums that are divided, see `pieces.py` ---------------------


def _nll(node: Node, known: Known) -> Piecewise | None:
    scores, target, weight, reduction, _ = given(node)
    if known.rows.get(scores) != Rows(0, 1) or len(shape_of(scores)) != 2:
        return None
    if reduction == 1 or target in known.rows or weight in known.rows:
        return None
    return Piecewise("several", None, _as_they_are(node), node.target, {target: Rows(0, 1)})


def _one_of_several(node: Node, known: Known) -> Piecewise | None:  # noqa: ARG001
    call, position = given(node)
    if getattr(call, "target", None) is not aten.nll_loss_forward.default:
        return None
    rows = Rows(0, 1) if given(call)[3] == 0 and position == 0 else None
    return Piecewise("sum" if rows is None else "rows", rows, _as_they_are(node), operator.getitem)


def _nll_backward(node: Node, known: Known) -> Piecewise | None:
    gradient, scores, target, weight, reduction, _, total = given(node)
    if known.rows.get(scores) != Rows(0, 1) or len(shape_of(scores)) != 2:
        return None
    if reduction == 1 or any(n in known.rows for n in (target, weight, total)):
        return None
    operands = {target: Rows(0, 1)}
    if reduction == 0 and gradient not in known.rows:
        operands[gradient] = Rows(0, 1)
    return Piecewise("rows", Rows(0, 1), _as_they_are(node), node.target, operands)


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
"""What makes tensors of one number, and which number."""

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
    aten.mm.default: _product,
    aten.addmm.default: _product_and_bias,
    aten.nll_loss_forward.default: _nll,
    operator.getitem: _one_of_several,
    aten.nll_loss_backward.default: _nll_backward,
}  # fmt: skip
"""By operator; all others that compute element by element follow one rule."""
