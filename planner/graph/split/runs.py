"""Finding what of a joint graph can be computed in pieces: row-wise runs that end in the loss.

A run begins with products of rows and a weight, as of hidden states and the weight of a language model's
head. Everything that is computed of these, forward and backward, is computed row by row, until it ends: in
sums over the rows (the loss, gradients of weights), or in rows that another product with a weight makes (the
gradient of the hidden states). No run reaches as far as another product of the forward: then that begins the
run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from planner._torch.joint import aot_metadata
from planner._torch.module_paths import module_of
from planner._torch.operators import uses_generator
from planner.graph.split.rules import Known, Piecewise, begin, computed_for, piecewise, product_of_rows


@dataclass(frozen=True)
class Run:
    """What is computed in pieces.

    Attributes:
        rows: How many rows it has.
        steps: How each of its operations is computed for some rows, in the order of the graph.
        begins: The products that it begins with.
        outputs: The results of its rows that the forward returns.
    """

    rows: int
    steps: Mapping[Node, Piecewise]
    begins: tuple[Node, ...]
    outputs: tuple[Node, ...]

    @property
    def modules(self) -> list[str]:
        """The modules that it begins with."""
        return [module_of(node) for node in self.begins]

    @property
    def bytes(self) -> int:
        """Size of the largest of its values."""
        values = (n.meta["val"] for n, step in self.steps.items() if step.kind == "rows")
        return int(max(v.numel() * v.element_size() for v in values))


class _NoRunError(Exception):
    """What begins with a product is no run."""


def find_runs(joint: GraphModule, forward_outputs: int) -> tuple[list[Run], str]:
    """The runs of a joint graph that end in the loss.

    Args:
        joint: The graph.
        forward_outputs: How many of its outputs belong to the forward.

    Returns:
        The runs, and why the last product of rows begins none, where there is no run.
    """
    nodes = list(joint.graph.nodes)
    backward = aot_metadata.backward_calls(joint.graph)
    results = list(joint.graph.output_node().args[0])  # type: ignore[arg-type]
    returned = {n for n in results[:forward_outputs] if isinstance(n, Node)}
    gradients = {n for n in results[forward_outputs:] if isinstance(n, Node)}
    found, why = list[Run](), "it has no product of rows and a weight"
    for node in nodes:
        known = product_of_rows(node)
        if known is None or node in backward:
            continue
        try:
            run = _run_of(nodes, (node,), known.size, backward, returned, gradients)
            while (other := _overlapping(found, run)) is not None:
                begins = tuple(n for n in nodes if n in (*other.begins, *run.begins))
                run = _run_of(nodes, begins, known.size, backward, returned, gradients)
                found.remove(other)
            found.append(run)
        except _NoRunError as error:
            why = str(error)
    return found, why


def _overlapping(runs: Sequence[Run], run: Run) -> Run | None:
    return next((r for r in runs if not r.steps.keys().isdisjoint(run.steps)), None)


def _run_of(
    nodes: Sequence[Node],
    begins: tuple[Node, ...],
    count: int,
    backward: set[Node],
    returned: set[Node],
    gradients: set[Node],
) -> Run:
    steps = {node: begin(node) for node in begins}
    within = set(begins)
    rows = {node: step.rows for node, step in steps.items() if step.rows is not None}
    known = Known(count, rows)
    for node in nodes:
        if node in steps or node.op != "call_function" or within.isdisjoint(node.all_input_nodes):
            continue
        step = piecewise(node, known)
        where = f"{node.target} of {module_of(node) or 'the model'}"
        if step is None:
            raise _NoRunError(f"{where} needs all rows of {_shown(begins)} at once")
        if step.kind == "product" and node not in backward:
            raise _NoRunError(f"{where} is another product of the rows of {_shown(begins)}")
        steps[node] = step
        if step.kind in ("rows", "several"):
            within.add(node)
            if step.rows is not None:
                rows[node] = step.rows
    _take_in(steps, min(n.meta["val"].numel() for n in begins))
    outputs = tuple(node for node in steps if node in returned and node in within)
    if within & gradients:
        raise _NoRunError(f"the rows of {_shown(begins)} are a gradient that the step leaves")
    sums = [n for n, s in steps.items() if s.kind in ("sum", "mean")]
    if not any(n not in backward and n.meta["val"].is_floating_point() for n in sums):
        raise _NoRunError(
            f"no loss is computed of the rows of {_shown(begins)} in the forward (where that is outside of "
            "the module, plan the function that computes it, with planner.step)"
        )
    if not any(node in backward for node in steps):
        raise _NoRunError(f"no gradient is computed of the rows of {_shown(begins)}")
    place = {node: i for i, node in enumerate(nodes)}
    return Run(count, {n: steps[n] for n in sorted(steps, key=place.__getitem__)}, begins, outputs)


def _take_in(steps: dict[Node, Piecewise], many: int) -> None:
    """Let a run compute what nothing but the run reads, and of which it reads rows: what has as many elements
    as its products, and gradients, which begin as the loss's one gradient for every row.

    Args:
        steps: The run.
        many: How many elements its smallest first product has.
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
            if node.op == "call_function" and large and not uses_generator(node.target):
                made = computed_for(node, found[node])
                if made is not None:
                    steps[node] = made


def _shown(begins: tuple[Node, ...]) -> str:
    return ", ".join(module_of(n) or str(n.target) for n in begins)
