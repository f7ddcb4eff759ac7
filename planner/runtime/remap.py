"""A plan's decisions, followed on a graph that is not quite the planned one.

Freezing or thawing a layer changes the backward; another mode of a submodule, or a layer that is left out,
changes the forward as well. Operations of the two graphs are matched by operator and module path. An
operation that the plan re-runs is re-run here at the matching place.
"""

import difflib
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from planner._torch import fake
from planner.costs.host_tensors import made_on_host
from planner.graph.joint_graph import JointGraph, JointOp
from planner.graph.replay.packed import is_mask
from planner.graph.sent import sent_node
from planner.graph.signs import relu_before
from planner.graph.spec import GraphSpec
from planner.planfile.fingerprint import state_digest
from planner.planfile.graph_record import ViewsRecord
from planner.planfile.plan import GraphRecord, PlanRecord

_LONGEST_COMPARISON = 20_000
"""Operations of both graphs, beyond their common ends, that difflib is given; more would take minutes."""


@dataclass(frozen=True)
class Remapped:
    """How a graph follows a plan that was made for another.

    Attributes:
        backward: The operations that its backward runs, by index, in order.
        followed: How many of the forward operations that the plan re-runs are re-run here.
        planned: How many forward operations the plan re-runs.
        packed: The re-run operations whose masks are unpacked from bits, and the backwards of ReLU that read
            signs from bits.
        only_less: Whether the planned graph has all operations of this one, which then cannot take more
            memory at the same sizes.
    """

    backward: list[int]
    followed: int
    planned: int
    only_less: bool
    packed: list[int] = field(default_factory=list)


def remap_schedule(record: GraphRecord, joint: JointGraph) -> Remapped:
    """Follow the decisions of a plan's graph on another graph.

    Layers may differ in their numbers alone: modules are matched without them where that follows more.
    """
    remapped = _remap(record, joint, lambda module: module)
    if remapped.followed == remapped.planned:
        return remapped
    by_kind = _remap(record, joint, lambda module: re.sub(r"\d+", "#", module))
    return by_kind if by_kind.followed > remapped.followed else remapped


def _remap(record: GraphRecord, joint: JointGraph, place: Callable[[str], str]) -> Remapped:
    split, count = joint.forward_length, len(joint.ops)
    known = [(op.name, place(op.module)) for op in record.ops]
    found = [(op.name, place(op.module)) for op in joint.ops]
    forward = _matched(known[: record.forward_length], found[:split])
    backward = _matched(known[record.forward_length :], found[split:])
    packed = {forward[i] for i in record.packed if i in forward and _may_be_kept(record, joint, forward[i])}
    rerun = {forward[i] for i in record.recomputed if i in forward}
    rerun = {i for i in rerun if i in packed or joint.ops[i].recomputable}
    packed &= rerun
    of_backward = {
        backward[i - record.forward_length] for i in record.packed if i - record.forward_length in backward
    }
    packed |= {i + split for i in of_backward if relu_before(joint, joint.ops[i + split]) is not None}
    sequence = _Sequence(joint, rerun, packed)
    for index in record.backward:
        if index >= record.forward_length:
            match = backward.get(index - record.forward_length)
            if match is not None:
                sequence.run_backward_to(split + match)
        elif forward.get(index) in rerun:
            sequence.run_again(forward[index])
    sequence.run_backward_to(count - 1)
    steps = _without_idle(joint, sequence.steps, packed)
    return Remapped(
        backward=steps,
        followed=len({s for s in steps if s < split}),
        planned=len(record.recomputed),
        only_less=(
            len(forward) == split
            and len(backward) == count - split
            and len(rerun) == len(record.recomputed)
            and len(packed) == len(record.packed)
        ),
        packed=sorted(packed.intersection(steps)),
    )


class _Sequence:
    """The backward sequence while it grows. Each operation comes after the re-runs that it needs.

    Args:
        joint: The graph.
        rerun: The forward operations to re-run.
        packed: The re-runs that unpack a mask, and the backwards of ReLU that read bits: they need no re-run.
    """

    def __init__(self, joint: JointGraph, rerun: set[int], packed: set[int]) -> None:
        self.steps: list[int] = []
        self._packed = packed
        self._ops, self._at = joint.ops, joint.forward_length
        self._done: set[int] = set()
        first = joint.ops[: joint.forward_length]
        again = [op for op in first if op.index in rerun]
        self._producer = {s: op.index for op in again for s in (*op.allocates, *op.allocates_again)}

    def run_backward_to(self, last: int) -> None:
        """Append the backward operations up to ``last``, with the re-runs that they still need."""
        while self._at <= last:
            for missing in self._needs(self._at):
                self.run_again(missing)
            self.steps.append(self._at)
            self._at += 1

    def run_again(self, index: int) -> None:
        """Append a re-run, after the re-runs that it still needs."""
        pending = [(index, False)]
        while pending:
            op, ready = pending.pop()
            if ready:
                self.steps.append(op)
                self._done.add(op)
            elif op == index or op not in self._done:
                pending.append((op, True))
                pending += [(p, False) for p in reversed(self._needs(op))]

    def _needs(self, index: int) -> list[int]:
        if index in self._packed:
            return []
        made = {self._producer[s] for s in _read(self._ops[index]) if s in self._producer}
        return sorted(made - self._done)


def _without_idle(joint: JointGraph, steps: Sequence[int], packed: set[int]) -> list[int]:
    """Leave out re-runs whose results are not used."""
    wanted: set[int] = {s for n in joint.outputs[1] if isinstance(n, Node) for s in joint.storages_of(n)}
    kept: list[int] = []
    for index in reversed(steps):
        op = joint.ops[index]
        if not op.backward:
            if wanted.isdisjoint(op.allocates_again):
                continue
            wanted.difference_update(op.allocates_again)
        wanted.update(() if index in packed else _read(op))
        kept.append(index)
    return kept[::-1]


def _read(op: JointOp) -> set[int]:
    """The storages of other operations that an operation reads when it runs in the backward."""
    read = {s for o in (op, *op.writers) for s in o.reads}
    return read.difference(op.allocates)


def _matched(known: Sequence[Hashable], found: Sequence[Hashable]) -> dict[int, int]:
    """Positions in the first sequence -> positions of equal elements, in the same order, in the second."""
    shortest = min(len(known), len(found))
    start = next((i for i in range(shortest) if known[i] != found[i]), shortest)
    end = next((i for i in range(shortest - start) if known[-1 - i] != found[-1 - i]), shortest - start)
    pairs = {i: i for i in range(start)}
    pairs.update({len(known) - 1 - i: len(found) - 1 - i for i in range(end)})
    left, right = known[start : len(known) - end], found[start : len(found) - end]
    if left and right and len(left) + len(right) <= _LONGEST_COMPARISON:
        matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
        for block in matcher.get_matching_blocks():
            pairs.update({start + block.a + i: start + block.b + i for i in range(block.size)})
    return pairs


def views_of(plan: PlanRecord, structure: str, number: int) -> ViewsRecord | None:
    """The plan's record of a graph that only returns views, given how many of its structure came before."""
    alike = (views for views in plan.views if views.structure == structure)
    return next((v for v in alike if v.occurrence == number % max(v.occurrences, 1)), None)


def left_out(plan: PlanRecord, structure: str, number: int, inputs: Sequence[Any]) -> bool:
    """Whether the planned step does not differentiate a graph, although it does others of its structure."""
    occurrences = max((graph.occurrences for graph in plan.graphs if graph.structure == structure), default=0)
    among = number < occurrences and views_of(plan, structure, number) is None
    return among and not any(map(fake.is_size, inputs))


def spec_of(
    plan: PlanRecord,
    record: GraphRecord | None,
    structure: str,
    number: int,
    graph: GraphModule,
    inputs: Sequence[Any],
) -> GraphSpec:
    """The specification that a graph is traced by.

    Args:
        plan: The plan.
        record: The plan's record of the graph; None if there is none.
        structure: The structure of the graph.
        number: How many graphs of its structure have been captured before.
        graph: The graph.
        inputs: Its example inputs.
    """
    if record is not None:
        return among_sizes(GraphSpec.of(record), graph, inputs)
    if (views := views_of(plan, structure, number)) is not None:
        return among_sizes(GraphSpec(tuple(views.unused_outputs)), graph, inputs)
    if plan.coverage != "one-graph" and any(g.per_use_inputs for g in plan.graphs):
        return GraphSpec.per_use(len(inputs))
    return GraphSpec()


def among_sizes(spec: GraphSpec, graph: GraphModule, inputs: Sequence[Any]) -> GraphSpec:
    """A specification with its positions as they are in a graph that may have symbolic sizes among its inputs
    and outputs; the plan's positions do not count these."""
    outputs: Sequence[Any] = graph.graph.output_node().args[0]  # type: ignore[assignment]
    values = [o.meta.get("example_value") if isinstance(o, Node) else o for o in outputs]
    placeholders = graph.graph.find_nodes(op="placeholder")
    # A graph that is compiled for one shape gets numbers in place of its symbolic sizes.
    taken = [n.meta.get("example_value", x) for n, x in zip(placeholders, inputs, strict=True)]
    if not any(map(fake.is_size, (*taken, *values))):
        return spec
    of_input, of_output = _positions(taken), _positions(values)
    return GraphSpec(
        tuple(of_output(i) for i in spec.unused_outputs),
        frozenset(of_input(i) for i in spec.per_use_inputs),
        {of_output(i): layout for i, layout in spec.tangent_layouts.items()},
        spec.split,
        frozenset(of_input(i) for i in spec.handed_inputs),
    )


def _positions(values: Sequence[Any]) -> Callable[[int], int]:
    places = [i for i, value in enumerate(values) if not fake.is_size(value)]
    # A position beyond the end stays beyond it.
    return lambda index: places[index] if index < len(places) else len(values) + index


def same_operations(record: GraphRecord, joint: JointGraph) -> bool:
    """Whether a graph has the operations of a plan's graph."""
    return len(joint.ops) == len(record.ops) and all(
        op.name == known.name and op.backward == (known.phase == "backward")
        for op, known in zip(joint.ops, record.ops, strict=True)
    )


def matches(record: GraphRecord, joint: JointGraph) -> bool:
    """Whether a graph has the operations of a plan's graph, and may re-run those that the plan re-runs."""
    return (
        same_operations(record, joint)
        and reruns_what_may_run(record, joint)
        and all(
            _may_be_kept(record, joint, index) or relu_before(joint, joint.ops[index]) is not None
            for index in record.packed
        )
    )


def reruns_what_may_run(record: GraphRecord, joint: JointGraph) -> bool:
    """Whether a graph's operations that a plan re-runs, and does not unpack or fetch, may run again."""
    return all(joint.ops[index].recomputable for index in set(record.recomputed).difference(record.packed))


def _may_be_kept(record: GraphRecord, joint: JointGraph, index: int) -> bool:
    """Whether what an operation makes can be kept as bits, or on the host if the plan keeps results there."""
    op = joint.ops[index]
    return is_mask(op.node) or (bool(record.completed) and sent_node(joint, op) is not None)


def total_bytes(joint: JointGraph) -> int:
    """Bytes that all operations of a graph allocate on the device, together."""
    return sum(joint.storage_bytes[s] for op in joint.ops for s in _on_its_device(op))


def _on_its_device(op: JointOp) -> Sequence[int]:
    on_host = made_on_host(op.node.target)
    if len(on_host) != len(op.allocates):
        return op.allocates
    return [s for s, host in zip(op.allocates, on_host, strict=True) if not host]


def planned_bytes(record: GraphRecord) -> int:
    """The :func:`total_bytes` of a graph when the plan was made."""
    return sum(op.bytes for op in record.ops)


def fits_whole(plan: PlanRecord, record: GraphRecord, joint: JointGraph, *, other_shapes: bool) -> bool:
    """Whether all results of the step's operations together fit the planned peak: then any schedule does.

    Args:
        plan: The plan.
        record: The graph as planned.
        joint: The graph as it is now.
        other_shapes: Whether inputs have other shapes; the other graphs then count as nothing.
    """
    rest = sum(planned_bytes(g) * len(g.executions) for g in plan.graphs) - planned_bytes(record)
    return total_bytes(joint) + (0 if other_shapes else rest) <= plan.predicted.dynamic_peak_bytes


def grown(record: GraphRecord, joint: JointGraph) -> bool:
    """Whether the operations of a graph allocate more than when the plan was made."""
    return total_bytes(joint) > planned_bytes(record)


_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def why_grown(plan: PlanRecord, model: torch.nn.Module | None) -> str:
    """Why a plan's graphs allocate more at the planned shapes, as far as the model tells."""
    with fake.without_modes():
        if model is None or state_digest(model) == plan.model.state_digest:
            return "something else in the model sets sizes"
        then = next((t for t in _FLOATING if state_digest(model, t) == plan.model.state_digest), None)
    if then is None:
        return (
            "its parameters or buffers have other names, shapes or dtypes than when it was planned. Plan it "
            "again"
        )
    now = " and ".join(sorted({_name(p.dtype) for p in model.parameters() if p.is_floating_point()}))
    return (
        f"its parameters are {now}, and were {_name(then)} when it was planned. Convert the model before it "
        "is planned"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
