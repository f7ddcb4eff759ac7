"""A joint graph whose row-wise runs are computed in pieces, one after the other.

In the form "backward" the pieces of the forward compute the loss, and the backward begins with the pieces of
its own. They read values of the forward, which are kept or computed again like all others. In the form
"forward" each piece of the forward is followed at once by its gradients, for a gradient of 1 of the loss. The
backward multiplies them by the true gradient of the loss: no product runs twice.

Sums over rows are added up in place, in single precision at least.
"""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from planner._torch import fake, operators
from planner._torch.execution.mask_operators import DRAW_MASK
from planner._torch.joint import aot_metadata
from planner._torch.joint.graph_modules import graph_module
from planner.errors import CaptureError
from planner.graph.spec import Split, SplitRuns
from planner.graph.split.emitter import Emitter, called, tensors_in
from planner.graph.split.linear import is_linear
from planner.graph.split.loops import join_loops
from planner.graph.split.rows import Piecewise, Rows
from planner.graph.split.rules import given, shape_of
from planner.graph.split.runs import Run, find_runs

aten = torch.ops.aten

_VIEWS = frozenset(
    {
        *(aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default),
        *(aten.alias.default, aten.detach.default),
    }
)


_NOT_EARLY = (
    "split='loss': gradients cannot be computed in the forward, as they are no multiples of one number that "
    "arrives, or are in half precision. Plan with split='none'"
)
_ALL_AT_ONCE = (
    "split='loss': what is computed of some rows needs a sum over all of them. Plan with split='none'"
)


class NothingToSplit(CaptureError):
    """A graph has no run that can be split."""


class SplitGraph(NamedTuple):
    """The result of :func:`split_joint`.

    Attributes:
        joint: The graph with pieces.
        runs: The runs of the original graph that were split.
        dropped: By position: results of the forward that are no longer computed, without data.
    """

    joint: GraphModule
    runs: list[Run]
    dropped: dict[int, torch.Tensor]


def split_joint(joint: GraphModule, forward_outputs: int, split: Split) -> SplitGraph:
    """A copy of a graph in which its runs are computed in pieces.

    Args:
        joint: The graph.
        forward_outputs: How many of its outputs belong to the forward.
        split: The form, and how many pieces.

    Raises:
        CaptureError: It has no run, or none that can be split in this form.
    """
    copied, runs = splittable(joint, forward_outputs, split.what)
    dropped: dict[int, torch.Tensor] = {}
    replaced: dict[Node, Node] = {}
    for run in runs:
        dropped |= _Pieces(copied, run, split, forward_outputs, replaced).run()
    return SplitGraph(copied, runs, dropped)


def split_where_possible(joint: GraphModule, forward_outputs: int, split: Split) -> SplitGraph:
    """The same for a step of other rows or other precision than the planned one: in the form "backward" where
    "forward" is not possible, and whole where nothing has several rows.

    Args:
        joint, forward_outputs, split: As for :func:`split_joint`.
    """
    try:
        return split_joint(joint, forward_outputs, split)
    except NothingToSplit:
        return SplitGraph(joint, [], {})
    except CaptureError:
        return split_joint(joint, forward_outputs, split._replace(form="backward"))


def splittable(joint: GraphModule, forward_outputs: int, what: SplitRuns) -> tuple[GraphModule, list[Run]]:
    """A copy of a joint graph, and its runs.

    Raises:
        NothingToSplit: It has none.
    """
    copied = _copied(joint)
    _divide_means(copied)
    join_loops(copied)
    runs, why = find_runs(copied, forward_outputs, what)
    if not runs:
        of = "nothing" if what == "loss" else "no MLP, and nothing"
        raise NothingToSplit(
            f"split='{what}': {of} that ends in the loss can be computed in pieces of rows: {why}. Plan "
            "with split='none'"
        )
    return copied, runs


def _copied(joint: GraphModule) -> GraphModule:
    graph = FxGraph()
    nodes: dict[Node, Node] = {}
    for node in joint.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    return graph_module(joint, graph)


def _divide_means(joint: GraphModule) -> None:
    """Let a mean of negative log likelihoods be their sum, divided by the sum of their weights, and that be
    computed of the targets alone, where each has a weight of one. In half precision a mean is rounded once,
    as by kernels of whole means: sums may be larger than any of its numbers."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default):
        scores, target, weight, reduction, ignored = node.args
        dtype = scores.meta["val"].dtype
        wide = {"dtype": torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype}
        results = {user.args[1]: user for user in node.users}
        after = node.next
        while after in results.values():
            after = after.next
        emit = Emitter(graph, after, "is_forward")
        total = results.get(1)
        if total is not None and weight is None and reduction != 0:
            counted = emit.call(node, aten.ne.Scalar, (target, ignored))
            count = emit.call(node, aten.sum.dim_IntList, (counted, [0]), wide)
            total.replace_all_uses_with(_cast(emit, count, dtype))
            total = count
        if reduction == 1 and 0 in results:
            node.args = (*node.args[:3], 2, ignored)
            total, summed = total or emit.call(node, operator.getitem, (node, 1)), results[0]
            if wide["dtype"] is not dtype:
                each = emit.call(node, node.target, (scores, target, weight, 0, ignored))
                each = emit.call(node, operator.getitem, (each, 0))
                summed = emit.call(node, aten.sum.dim_IntList, (each, [0]), wide)
            divided = emit.call(node, aten.div.Tensor, (summed, total))
            mean = _cast(emit, divided, dtype)
            results[0].replace_all_uses_with(mean, delete_user_cb=lambda user, by=divided: user is not by)
    for node in graph.find_nodes(op="call_function", target=aten.nll_loss_backward.default):
        gradient, *between, reduction, ignored, total = node.args
        emit = Emitter(graph, node, "is_backward")
        if reduction == 1:
            # Where all rows are ignored their gradients are zeros, not 0 / 0.
            _, target, weight = between
            counted = total
            if weight is not None:  # weights of zero are 0 / 0 without a plan too
                found = emit.call(node, aten.ne.Scalar, (target, ignored))
                counted = emit.call(node, aten.sum.dim_IntList, (found, [0]))
            none = emit.call(node, aten.eq.Scalar, (counted, 0))
            count = emit.call(node, aten.masked_fill.Scalar, (total, none, 1))
            gradient = emit.call(node, aten.div.Tensor, (gradient, count))
        value = total.meta["val"]
        unused = emit.call(node, aten.full.default, ([], 1.0), {"dtype": value.dtype, "device": value.device})
        node.args = (gradient, *between, 2 if reduction == 1 else reduction, ignored, unused)


def _cast(emit: Emitter, node: Node, dtype: torch.dtype) -> Node:
    """A value in a type."""
    same = node.meta["val"].dtype is dtype
    return node if same else emit.call(node, aten._to_copy.default, (node,), {"dtype": dtype})


class _Pieces:
    """One run of a graph, put into pieces; ``replaced`` has what stands for results of runs before it."""

    def __init__(
        self,
        joint: GraphModule,
        run: Run,
        split: Split,
        forward_outputs: int,
        replaced: dict[Node, Node],
    ) -> None:
        self._joint, self._run = joint, run
        self._graph, self._replaced = joint.graph, replaced
        self._forward_outputs = forward_outputs
        self._place = {node: place for place, node in enumerate(self._graph.nodes)}
        self._backward = aot_metadata.backward_calls(self._graph)
        self._of_gradients = _reached(self._graph, _gradients(self._graph))
        steps = run.steps
        self._halves = (
            [n for n in steps if n not in self._backward],
            [n for n in steps if n in self._backward],
        )
        self._early = split.form == "forward" and run.in_loss and bool(self._halves[1])
        self._totals: dict[Node, Node] = {}  # what stands for sums over rows, and rows of products
        self._parts: dict[Node, list[Node]] = {}  # rows of products, piece by piece
        self._partial: dict[Node, Node] = {}  # sums over the rows of the pieces so far
        self._rows_of: dict[tuple[Node, Rows], Node] = {}
        self._sliced_of: dict[tuple[Node, Rows, int], Node] = {}
        self._hoisted: dict[Node, Node] = {}
        pieces = split.pieces if run.in_loss else min(split.pieces, run.enough_pieces)
        count, pieces = run.rows, min(pieces, run.rows)
        size = -(-count // pieces)
        self._bounds = [(start, min(start + size, count)) for start in range(0, count, size)]

    def run(self) -> dict[int, torch.Tensor]:
        """Split; returns the results of the forward that are no longer there, by position."""
        self._let_masks_read_nothing()
        forward, backward = self._halves
        early = self._early
        gradient = self._one_gradient() if early else None
        read = forward if gradient is None else [*forward, *backward]
        emit = Emitter(
            self._graph,
            self._begin(forward, [n for n in self._operands(read) if n not in self._backward]),
            "is_forward",
            early,
        )
        one = None
        if gradient is not None:
            value = gradient.meta["val"]
            kwargs = {"dtype": value.dtype, "device": value.device}
            one = emit.call(gradient, aten.full.default, (list(value.shape), 1.0), kwargs)
            self._hoisted[gradient] = one
        made: list[dict[Node, Node]] = []
        for i in range(len(self._bounds)):
            made.append({})
            self._piece(emit, forward, made[i], i)
            if early:
                self._piece(emit, backward, made[i], i)
        self._finish(emit, forward)
        if early:
            self._finish(emit, backward)
        dropped = self._drop_outputs(emit)
        if gradient is not None:
            later = Emitter(self._graph, self._begin(backward, [gradient]), "is_backward")
            if gradient.meta["val"].dim():  # a product has no more dimensions than the total
                gradient = later.call(gradient, aten.view.default, (gradient, []))
            for node in backward:
                if node in self._totals and node in self._of_gradients:
                    made_early = self._totals[node]
                    self._totals[node] = later.call(node, aten.mul.Tensor, (made_early, gradient))
        elif backward:
            later = Emitter(self._graph, self._begin(backward, self._operands(backward)), "is_backward")
            for i in range(len(self._bounds)):
                self._piece(later, backward, made[i], i)
            self._finish(later, backward)
        for node, total in self._totals.items():
            viewed = fake.storage_key(node.meta["val"])
            casts = [] if total.meta["val"].dtype == node.meta["val"].dtype else _casts(node)
            node.replace_all_uses_with(total, delete_user_cb=lambda user: user not in self._run.steps)
            self._replaced[node] = total
            self._look_at(total, viewed)
            for cast in casts:
                cast.replace_all_uses_with(wide := given(cast)[0])
                self._replaced[cast] = wide
                self._graph.erase_node(cast)
        return dropped

    def _let_masks_read_nothing(self) -> None:
        """Masks of dropout are drawn whole, so that their random numbers are those of the whole."""
        for mask in self._graph.find_nodes(op="call_function", target=DRAW_MASK):
            like = given(mask)[0]
            if like in self._run.steps:
                value = like.meta["val"]
                emit = Emitter(self._graph, mask, mask.meta["partitioner_tag"])
                kwargs = {"dtype": value.dtype, "device": value.device}
                one = emit.call(mask, aten.empty.memory_format, ([1] * value.dim(),), kwargs)
                mask.replace_input_with(like, emit.call(mask, aten.expand.default, (one, list(value.shape))))

    def _look_at(self, total: Node, viewed: int) -> None:
        """Let the views of what a result stands for be views of it."""
        for user in total.users:
            value = user.meta.get("val")
            if isinstance(value, torch.Tensor) and fake.storage_key(value) == viewed:
                user.meta["val"] = called(user.target, user.args, user.kwargs, value)
                self._look_at(user, viewed)

    # ---- where ----------------------------------------------------------------------------------------

    def _operands(self, steps: Sequence[Node]) -> list[Node]:
        """The nodes outside of the run that these operations read."""
        return [n for step in steps for n in step.all_input_nodes if n not in self._run.steps]

    def _begin(self, steps: Sequence[Node], operands: Sequence[Node]) -> Node:
        """The node that pieces come before: what follows all that they read, or the first of them, where what
        is computed of them is read before. Then what they read is computed there."""
        first = min(steps, key=self._place.__getitem__)
        last = max((*operands, first.prev), key=lambda n: self._place.get(n, -1))
        if self._place.get(last, -1) < self._place[first]:
            return first
        readers = [u for s in steps if s in self._ends() for u in s.users if u not in self._run.steps]
        early = any(self._place.get(reader, len(self._place)) <= self._place[last] for reader in readers)
        return first if early else last.next

    def _ends(self) -> set[Node]:
        run = self._run
        return {n for n, s in run.steps.items() if s.kind not in ("rows", "several")} | run.whole

    def _one_gradient(self) -> Node:
        """The number that all gradients of the run are multiples of."""
        _, backward = self._halves
        found = {n for n in self._operands(backward) if n in self._of_gradients}
        while len(found) > 1 or not all(map(_is_one, found)):
            last = max(found, key=self._place.__getitem__)
            before = [n for n in last.all_input_nodes if n in self._of_gradients]
            one = len(before) == 1 and (_is_one(before[0]) or last.target in _VIEWS)
            if not one or not is_linear(last, self._of_gradients):
                raise CaptureError(_NOT_EARLY)
            found = {*found - {last}, *before}
        half = any(t.dtype is torch.float16 for t in tensors_in(n.meta.get("val") for n in self._run.steps))
        (gradient,) = found if found else (None,)
        linear = all(is_linear(node, self._of_gradients) for node in backward)
        if gradient is None or half or not linear:
            raise CaptureError(_NOT_EARLY)
        # The earliest such number is one in loss.backward(): to multiply by that rounds nothing.
        late = _reached(self._graph, {*self._run.steps, *filter(_draws, self._graph.nodes)})
        while late.isdisjoint(gradient.all_input_nodes) and is_linear(gradient, self._of_gradients):
            before = [n for n in gradient.all_input_nodes if n in self._of_gradients]
            if len(before) != 1 or not _is_one(before[0]):
                break
            (gradient,) = before
        return gradient

    # ---- what -----------------------------------------------------------------------------------------

    def _piece(self, emit: Emitter, steps: Sequence[Node], made: dict[Node, Node], number: int) -> None:
        start, end = self._bounds[number]
        for node in steps:
            step = self._run.steps[node]
            operands = {self._replaced.get(n, n): rows for n, rows in step.operands.items()}

            def take(n: Node, operands: Mapping[Node, Rows] = operands) -> Node:
                n = self._replaced.get(n, n)
                if n in made:
                    return made[n]
                rows = operands.get(n)
                return self._outside(emit, n) if rows is None else self._sliced(emit, n, rows, number)

            args = map_arg(step.args(end - start), take)
            kwargs = map_arg(dict(step.kwargs), take)
            if step.kind in ("sum", "mean"):
                self._add(emit, node, step, args, kwargs)
                continue
            part = emit.call(node, step.target, args, kwargs)
            if step.kind == "product" or node in self._run.whole:
                self._parts.setdefault(node, []).append(part)
            if step.kind != "product":
                made[node] = part

    def _outside(self, emit: Emitter, node: Node) -> Node:
        """A value from outside of the run; one computed after the pieces is computed before them too."""
        if node in self._totals:
            return self._totals[node]
        if node in self._hoisted:
            return self._hoisted[node]
        if self._place.get(node, -1) < emit.place(self._place) and node not in self._run.steps:
            return node
        if node in self._run.steps or node.op != "call_function" or operators.uses_generator(node.target):
            raise CaptureError(_ALL_AT_ONCE)
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: self._outside(emit, n))
        self._hoisted[node] = emit.call(node, node.target, args, kwargs)
        return self._hoisted[node]

    def _sliced(self, emit: Emitter, node: Node, rows: Rows, number: int) -> Node:
        key = node, rows, number
        if key not in self._sliced_of:
            source = self._all_rows(emit, node, rows)
            self._sliced_of[key] = emit.call(
                node, aten.slice.Tensor, (source, rows.start, *self._bounds[number])
            )
        return self._sliced_of[key]

    def _all_rows(self, emit: Emitter, node: Node, rows: Rows) -> Node:
        """The rows of an operand that the run computes, in one dimension."""
        key = node, rows
        if key not in self._rows_of:
            source, shape = self._outside(emit, node), shape_of(node)
            for part in self._run.parts[len(rows.parts) :]:
                source = _viewed(emit, node, source, [*shape[: rows.start], *part.sizes, *shape[rows.end :]])
                rows = Rows(rows.start, rows.start + len(part.sizes))
                bounds = rows.start + part.dim, part.begin, part.end
                source = emit.call(node, aten.slice.Tensor, (source, *bounds))
                shape = shape_of(source)
            if rows.end - rows.start != 1:
                source = _viewed(emit, node, source, rows.sizes(shape, self._run.rows))
            self._rows_of[key] = source
        return self._rows_of[key]

    def _with_rows_left_out(self, emit: Emitter, node: Node, whole: Node, rows: Rows) -> Node:
        """Gradients of all rows, of those of slices: zeros are those of the others."""
        for part in reversed(self._run.parts[len(rows.parts) :]):
            before, after = shape_of(whole)[: rows.start], shape_of(whole)[rows.start + 1 :]
            sliced = (*part.sizes[: part.dim], part.end - part.begin, *part.sizes[part.dim + 1 :])
            whole = emit.call(node, aten.view.default, (whole, [*before, *sliced, *after]))
            sizes = [*before, *part.sizes, *after]
            bounds = rows.start + part.dim, part.begin, part.end, 1
            whole = emit.call(node, aten.slice_backward.default, (whole, sizes, *bounds))
            whole = emit.call(node, aten.view.default, (whole, [*before, math.prod(part.sizes), *after]))
        return whole

    def _add(self, emit: Emitter, node: Node, step: Piecewise, args: Any, kwargs: Any) -> None:
        total = self._partial.get(node)
        wide = node.meta["val"].dtype in (torch.float32, torch.float64)
        if total is not None and step.added and wide:
            total = emit.call(node, aten.addmm.default, (total, *args))
        else:
            part = emit.call(node, step.target, args, kwargs)
            if total is not None:
                total = emit.call(node, aten.add.Tensor, (total, part))
            elif part.meta["val"].dtype in (torch.bfloat16, torch.float16):
                total = emit.call(node, aten._to_copy.default, (part,), {"dtype": torch.float32})
            else:
                total = part
        self._partial[node] = total

    def _finish(self, emit: Emitter, steps: Sequence[Node]) -> None:
        """Whole results, of the pieces that are there."""
        for node in steps:
            step, value = self._run.steps[node], node.meta["val"]
            if node in self._parts:
                assert step.rows is not None
                whole = emit.call(node, aten.cat.default, (self._parts.pop(node), step.rows.start))
                whole = self._with_rows_left_out(emit, node, whole, step.rows)
            elif node in self._partial:
                whole = self._partial.pop(node)
                if step.kind == "mean":
                    whole = emit.call(node, aten.div.Scalar, (whole, step.count))
                if whole.meta["val"].dtype != value.dtype and not _casts(node):
                    whole = emit.call(node, aten._to_copy.default, (whole,), {"dtype": value.dtype})
            else:
                continue
            if whole.meta["val"].shape != value.shape:
                whole = emit.call(node, aten.view.default, (whole, list(value.shape)))
            self._totals[node] = whole

    def _drop_outputs(self, emit: Emitter) -> dict[int, torch.Tensor]:
        output = self._graph.output_node()
        results: Any = list(output.args[0])  # type: ignore[arg-type]
        dropped = {}
        for position, node in enumerate(results[: self._forward_outputs]):
            if node in self._run.outputs:
                value = node.meta["val"]
                dropped[position] = value
                kwargs = {"dtype": value.dtype, "device": value.device}
                results[position] = emit.call(node, aten.empty.memory_format, ([0],), kwargs)
        output.args = (tuple(results),)
        return dropped


def _viewed(emit: Emitter, origin: Node, source: Node, sizes: list[int]) -> Node:
    try:
        return emit.call(origin, aten.view.default, (source, sizes))
    except (RuntimeError, ValueError):  # it is no view
        kwargs = {"memory_format": torch.contiguous_format}
        source = emit.call(origin, aten.clone.default, (source,), kwargs)
        return emit.call(origin, aten.view.default, (source, sizes))


def _casts(node: Node) -> list[Node]:
    """The casts to single precision that are all that is made of a result and its views; none where something
    else is made of it."""
    found = list[Node]()
    for user in node.users:
        if user.target is aten._to_copy.default and user.kwargs.get("dtype") is torch.float32:
            found.append(user)
        elif user.target in _VIEWS or user.target is aten.t.default:
            found += (of_view := _casts(user))
            if not of_view:
                return []
        else:
            return []
    return found


def _is_one(node: Node) -> bool:
    """Whether the result is a tensor of one element."""
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and int(value.numel()) == 1


def _draws(node: Node) -> bool:
    return operators.uses_generator(node.target)


def _gradients(graph: FxGraph) -> set[Node]:
    """The gradients that arrive."""
    return {
        n
        for n in graph.find_nodes(op="placeholder")
        if isinstance(n.meta.get("desc"), aot_metadata.TangentAOTInput)
    }


def _reached(graph: FxGraph, begins: Collection[Node]) -> set[Node]:
    """Nodes, and what is computed of them."""
    found = set(begins)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes) and node.op == "call_function":
            found.add(node)
    return found
