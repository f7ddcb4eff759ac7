"""Finding what of a joint graph can be computed in pieces: row-wise runs.

A run begins with products of rows and a weight, as of hidden states and the weight of a language model's
head. Everything that is computed of these, forward and backward, is computed row by row, until it ends: in
sums over the rows (the loss, gradients of weights), or in rows that another product with a weight makes (the
gradient of the hidden states). What cannot be computed row by row reads whole results, where these are small:
log probabilities, of a loss that compares sequences. No run that ends in the loss reaches as far as another
product of the forward: then that begins the run. A run that ends in products of the forward is an MLP: it
begins with products whose results are larger than what they read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from planner._torch.joint import aot_metadata
from planner._torch.module_paths import module_of
from planner._torch.operators import uses_generator
from planner.graph.spec import SplitRuns
from planner.graph.split.linear import is_linear
from planner.graph.split.rows import Part, Piecewise, Rows
from planner.graph.split.rules import (
    aten,
    begin,
    computed_for,
    given,
    is_mask,
    piecewise,
    rows_of_product,
    shape_of,
)

_SMALL = 8
"""As many times smaller than a product are rows that may be there as a whole."""


@dataclass(frozen=True)
class Run:
    """A run of operations that are computed row by row, and so in pieces of rows.

    Attributes:
        rows: The number of its rows.
        steps: By operation, in the order of the graph: how it is computed for some rows.
        begins: The matrix products that it begins with.
        parts: The parts of their rows that are computed, if a slice leaves some out.
        whole: Its results that operations outside of it read whole.
        outputs: Its results that the forward returns, without those that are whole.
        in_loss: Whether it ends in the loss; an MLP does not.
    """

    rows: int
    steps: Mapping[Node, Piecewise]
    begins: tuple[Node, ...]
    parts: tuple[Part, ...]
    whole: frozenset[Node]
    outputs: tuple[Node, ...]
    in_loss: bool

    @property
    def modules(self) -> list[str]:
        """The modules that it begins with."""
        return [module_of(node) for node in self.begins]

    @property
    def bytes(self) -> int:
        """Size of the largest of its values."""
        values = (n.meta["val"] for n, step in self.steps.items() if step.kind == "rows")
        return int(max(v.numel() * v.element_size() for v in values))

    @property
    def enough_pieces(self) -> int:
        """The number of pieces in which its values are as small as the rows that it begins with."""
        return max(-(-shape_of(node)[1] // _columns_read(node)) for node in self.begins)


class _NoRunError(Exception):
    """The operations that follow a matrix product are no run."""


def _columns_read(product: Node) -> int:
    return shape_of(given(product)[-1])[0]


def find_runs(joint: GraphModule, forward_outputs: int, what: SplitRuns) -> tuple[list[Run], str]:
    """The runs of a joint graph.

    Args:
        joint: The graph.
        forward_outputs: How many of its outputs belong to the forward.
        what: Which runs.

    Returns:
        The runs, and why the last product of rows begins none, where there is no run.
    """
    graph = _Graph.of(joint, forward_outputs)
    products = [
        (node, rows)
        for node in graph.nodes
        if (rows := rows_of_product(node)) is not None and node not in graph.backward
    ]
    found, why = _runs(graph, products, [], in_loss=True)
    if what == "auto":
        larger = [(n, rows) for n, rows in products if shape_of(n)[1] > _columns_read(n)]
        found += _runs(graph, larger, found, in_loss=False)[0]
    return found, why


@dataclass(frozen=True)
class _Graph:
    """A joint graph: its nodes, those of the backward, what it returns, and which gradients."""

    nodes: Sequence[Node]
    backward: set[Node]
    returned: set[Node]
    gradients: set[Node]

    @staticmethod
    def of(joint: GraphModule, forward_outputs: int) -> "_Graph":
        results = list(joint.graph.output_node().args[0])  # type: ignore[arg-type]
        return _Graph(
            list(joint.graph.nodes),
            aot_metadata.backward_calls(joint.graph),
            {n for n in results[:forward_outputs] if isinstance(n, Node)},
            {n for n in results[forward_outputs:] if isinstance(n, Node)},
        )


def _runs(
    graph: _Graph, products: Sequence[tuple[Node, int]], others: Sequence[Run], *, in_loss: bool
) -> tuple[list[Run], str]:
    """The runs that begin with products and touch no others, and why the last product begins none."""
    found, why = list[Run](), "it has no product of rows and a weight"
    for node, rows in products:
        try:
            run = _run_of(graph, (node,), rows, in_loss=in_loss)
            while (other := _overlapping(found, run)) is not None:
                begins = tuple(n for n in graph.nodes if n in (*other.begins, *run.begins))
                run = _run_of(graph, begins, rows, in_loss=in_loss)
                found.remove(other)
            if _overlapping(others, run) is None:
                found.append(run)
        except _NoRunError as error:
            why = str(error)
    return found, why


def _overlapping(runs: Sequence[Run], run: Run) -> Run | None:
    return next((r for r in runs if not r.steps.keys().isdisjoint(run.steps)), None)


def _run_of(graph: _Graph, begins: tuple[Node, ...], count: int, *, in_loss: bool) -> Run:
    nodes, backward = graph.nodes, graph.backward
    steps = {node: begin(node) for node in begins}
    within, whole, at_once = set(begins), set[Node](), set[Node]()
    rows = {node: step.rows for node, step in steps.items() if step.rows is not None}
    of_slices = _OfSlices()
    for node in nodes:
        if node in steps or node.op != "call_function" or is_mask(node):
            continue
        read = within.intersection(node.all_input_nodes)
        of_all = node not in backward and not at_once.isdisjoint(node.all_input_nodes)
        if not read:
            at_once |= {node} if of_all else set()
            continue
        small = in_loss and all(_is_small(n, begins) for n in read)
        step = None if of_all and small else piecewise(node, rows)
        where = f"{node.target} of {module_of(node) or 'the model'}"
        if step is None and small:
            whole |= read
            at_once |= {node} - backward
            continue
        if step is None:
            raise _NoRunError(f"{where} needs all rows of {_shown(begins)} at once")
        if in_loss and step.kind == "product" and node not in backward:
            raise _NoRunError(f"{where} is another product of the rows of {_shown(begins)}")
        steps[node] = step
        of_slices.add(node, step, [rows[n] for n in read if n in rows])
        if step.kind in ("rows", "several"):
            within.add(node)
            if step.rows is not None:
                rows[node] = step.rows
        else:
            at_once |= {node} - backward
    _take_in(steps, min(n.meta["val"].numel() for n in begins), products=not in_loss)
    whole |= {n for n in within & graph.returned if in_loss and _is_small(n, begins)}
    parts = of_slices.parts([r for step in steps.values() for r in (step.rows, *step.operands.values()) if r])
    if parts is None or any(rows[n].parts != parts for n in whole):
        raise _NoRunError(f"several slices of the rows of {_shown(begins)} are read, or some rows and all")
    outputs = tuple(node for node in steps if node in graph.returned and node in within - whole)
    if (within - whole) & graph.gradients:
        raise _NoRunError(f"the rows of {_shown(begins)} are a gradient that the step leaves")
    ends = [n for n, s in steps.items() if s.kind in (("sum", "mean") if in_loss else ("product",))]
    if not in_loss and (outputs or _reads_its_ends(graph, steps)):
        raise _NoRunError(f"what is computed of the rows of {_shown(begins)} is read with its rows")
    if not any(n not in backward and n.meta["val"].is_floating_point() for n in (*ends, *whole)):
        raise _NoRunError(
            f"no loss is computed of the rows of {_shown(begins)} in the forward (where that is outside of "
            "the module, plan the function that computes it, with planner.step)"
        )
    if not in_loss and backward.isdisjoint(steps):
        raise _NoRunError(f"no gradient is computed of the rows of {_shown(begins)}")
    place = {node: i for i, node in enumerate(nodes)}
    if parts:
        *_, (sizes, dim, first, last) = parts
        count = math.prod(sizes) // sizes[dim] * (last - first)
    ordered = {n: steps[n] for n in sorted(steps, key=place.__getitem__)}
    return Run(count, ordered, begins, parts, frozenset(whole), outputs, in_loss)


class _OfSlices:
    """The parts of a run's rows that slices take. Rows in no slice are not computed, so gradients of all rows
    have to be zeros there."""

    def __init__(self) -> None:
        self._zeros = set[Node]()
        self._ends = dict[Node, tuple[Part, ...]]()
        self._parts: tuple[Part, ...] = ()

    def add(self, node: Node, step: Piecewise, read: Sequence[Rows]) -> None:
        """Add an operation that reads such rows of the run."""
        before = max((rows.parts for rows in read), key=len, default=())
        self._parts = max(self._parts, before, key=len)
        for operand, rows in step.operands.items():
            made = computed_for(operand, rows) if operand.target is aten.slice_backward.default else None
            if made is not None and self._parts in [of.parts for of in made.operands.values()]:
                self._zeros.add(operand)
        zeros = self._zeros.intersection(node.all_input_nodes)
        back = step.rows is not None and len(step.rows.parts) < len(before)
        if (back and (zeros or before == self._parts)) or (zeros and is_linear(node, self._zeros)):
            self._zeros.add(node)
        if step.kind in ("sum", "mean", "product"):
            self._ends[node] = before

    def parts(self, rows: Sequence[Rows]) -> tuple[Part, ...] | None:
        """The slices of which everything is computed; None where other rows are needed too."""
        parts = max((r.parts for r in rows), key=len)
        if any(parts[: len(r.parts)] != r.parts for r in rows):
            return None
        ends = all(of == parts or node in self._zeros for node, of in self._ends.items())
        return parts if ends else None


def _is_small(node: Node, begins: Sequence[Node]) -> bool:
    """Whether rows are so small that all of them may be there at once."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(
        value.numel() * _SMALL <= n.meta["val"].numel() for n in begins
    )


def _reads_its_ends(graph: _Graph, steps: Mapping[Node, Piecewise]) -> bool:
    """Whether in one half of the step a run reads what is computed of its own sums or products there."""
    for half in (steps.keys() - graph.backward, steps.keys() & graph.backward):
        reached = {n for n in half if steps[n].kind not in ("rows", "several")}
        for node in graph.nodes:
            if not reached.isdisjoint(node.all_input_nodes):
                if node in half:
                    return True
                reached.add(node)
    return False


def _take_in(steps: dict[Node, Piecewise], many: int, *, products: bool) -> None:
    """Let a run compute what nothing but the run reads, and of which it reads rows: what has as many elements
    as its products, and gradients, which begin as the loss's one gradient for every row.

    Args:
        steps: The run.
        many: How many elements its smallest first product has.
        products: Whether it may compute products too, as of an MLP's gradient and a weight.
    """
    tried = set[Node]()
    while True:
        found = {n: rows for step in steps.values() for n, rows in step.operands.items()}
        waiting = [n for n in found if n not in steps and n not in tried and steps.keys() >= n.users.keys()]
        if not waiting:
            return
        for node in waiting:
            tried.add(node)
            large = node.meta["val"].numel() >= many or node.meta.get("partitioner_tag") == "is_backward"
            product = node.target is aten.mm.default and not products
            if node.op == "call_function" and large and not product and not uses_generator(node.target):
                made = computed_for(node, found[node])
                if made is not None:
                    steps[node] = made


def _shown(begins: tuple[Node, ...]) -> str:
    return ", ".join(module_of(n) or str(n.target) for n in begins)
