"""A plan's schedule, simulated again from what the plan file says of its step."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from planner.errors import PlanFileError
from planner.planfile.graph_record import OpRecord
from planner.planfile.plan import PlanRecord
from planner.planfile.step_record import StepRecord
from solvers.model.arrays import Schedule, StepMask
from solvers.model.graph import GLUE_REGION, Graph, GraphError, Op, Phase, Value
from solvers.model.in_flight import InFlight
from solvers.model.indices import BaseOp, Region, RowId, ValueId, base_op, indices, numbered
from solvers.model.schedule import Lifetimes, Timeline, lifetimes, simulate


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan as what it was solved as.

    Attributes:
        plan: The plan.
        step: What it says of its step.
        graph: The solvers' graph.
        schedule: Rows of the graph, in the order in which they run.
        timeline: What the schedule takes.
    """

    plan: PlanRecord
    step: StepRecord
    graph: Graph
    schedule: Schedule
    timeline: Timeline

    @cached_property
    def lives(self) -> Lifetimes:
        """When every value lives."""
        return lifetimes(self.graph, self.schedule)

    def record(self, row: int) -> OpRecord:
        """The operation of a row."""
        base = int(self.graph.base_of[row])
        graph = self.step.graphs[base]
        ops = self.plan.graphs[graph].ops if graph >= 0 else self.step.outside
        return ops[self.step.ops[base]]

    def line(self, row: int) -> str:
        """The line of the model's code that a row comes from, as in net.py:12; empty: not known."""
        line = self.step.line_of[int(self.graph.base_of[row])]
        return self.step.lines[line] if line >= 0 else ""

    @cached_property
    def reruns(self) -> StepMask:
        """Which steps of the schedule run a forward operation again."""
        return self.reruns_of(self.schedule)

    def reruns_of(self, schedule: Schedule) -> StepMask:
        """Which steps of a schedule run a forward operation again."""
        forward = self.graph.forward_length
        again: StepMask = self.graph.base_of[schedule] < forward
        again[:forward] = False
        return again

    @property
    def room_bytes(self) -> int | None:
        """The dynamic peak that the budget leaves to forward and backward; None for the least."""
        budget = self.plan.target.budget_bytes
        return None if budget is None else self.room(budget)

    def room(self, budget_bytes: int) -> int:
        """The dynamic peak that a budget leaves to forward and backward if the allocator loses the same share
        of the allocated bytes as with the stored schedule."""
        whole, resident = self.plan.whole_step, self.plan.resident.total
        if whole is None:
            return max(budget_bytes - resident, 0)
        most = budget_bytes - whole.library_bytes - whole.context_bytes - whole.recorded_bytes
        share = Fraction(whole.fragmentation_bytes, max(whole.allocated_bytes, 1))
        return max(int(most / (1 + share)) - resident, 0)


def simulated(plan: PlanRecord) -> SimulatedPlan:
    """Simulate a plan's schedule again.

    Raises:
        PlanFileError: The plan does not say what its operations read, or does not hold what it says.
    """
    step = plan.step
    if step is None and plan.target.backend == "inductor":
        raise PlanFileError(
            "the plan is one that Inductor runs: what its programs read and make, operation by operation, is "
            "not in the file; plan with backend='eager' to see it"
        )
    if plan.as_written:
        raise PlanFileError("by this plan the module runs as written: there is no schedule to simulate")
    if step is None:
        raise PlanFileError(
            "the plan does not say what its operations read and make: an earlier release wrote it; plan again"
        )
    try:
        graph = _graph(plan, step)
        schedule = _schedule(plan, step, graph)
        timeline = simulate(graph, schedule)
    except (GraphError, OverflowError) as error:  # bytes that 64 bits do not hold
        raise PlanFileError(f"plan: step: {error}") from None
    if timeline.peak_bytes != plan.predicted.dynamic_peak_bytes:
        raise PlanFileError(
            f"plan: the schedule takes {timeline.peak_bytes} bytes by what `step` says, and "
            f"{plan.predicted.dynamic_peak_bytes} by `predicted.dynamic_peak_bytes`: the file was changed by "
            "hand; plan again"
        )
    return SimulatedPlan(plan, step, graph, schedule, timeline)


def _graph(plan: PlanRecord, step: StepRecord) -> Graph:
    held = dict(zip(step.held, map(base_op, step.held_until), strict=True))
    on_demand, fixed = set(step.on_demand), set(step.fixed)
    values = tuple(
        Value(size, held_until=held.get(i), on_demand=i in on_demand)
        for i, size in enumerate(step.value_bytes)
    )
    every = indices(ValueId, len(values))
    reads = _ragged(step.read_counts, [ValueId(v) for v in step.reads])
    makes = _ragged(step.made_counts, every)
    replay = {op: RowId(len(step.graphs) + i) for i, op in enumerate(step.replays)}
    ops = []
    regions: dict[tuple[int, int], Region] = {}
    for i, (graph, execution, op) in enumerate(step.places()):
        record = plan.graphs[graph].ops[op] if graph >= 0 else step.outside[op]
        forward = i < step.forward_length
        ops.append(
            Op(
                reads[i],
                makes[i],
                seconds=record.seconds,
                workspace_bytes=step.workspace_bytes[i],
                phase=Phase.FORWARD if forward else Phase.BACKWARD,
                recomputable=forward and i not in fixed,
                region=GLUE_REGION
                if graph < 0
                else regions.setdefault((graph, execution), Region(len(regions))),
                replay=replay.get(i),
                name=record.name,
                module=record.module,
            )
        )
    replay_reads = _ragged(step.replay_read_counts, [ValueId(v) for v in step.replay_reads])
    replay_makes = _ragged(step.replay_made_counts, [ValueId(v) for v in step.replay_makes])
    for i, base in enumerate(step.replays):
        first = ops[base]
        ops.append(
            Op(
                replay_reads[i],
                replay_makes[i],
                seconds=step.replay_seconds[i] if step.replay_seconds else first.seconds,
                workspace_bytes=step.replay_workspace_bytes[i],
                phase=first.phase,
                recomputable=first.recomputable,
                region=first.region,
                name=first.name,
                module=first.module,
            )
        )
    count = plan.target.in_flight
    sent = tuple(map(ValueId, step.sent))
    in_flight = None if count is None else InFlight(count, step.left_bytes, tuple(step.added_up), sent)
    return Graph(tuple(ops), values, base_length=len(step.graphs), in_flight=in_flight)


def _schedule(plan: PlanRecord, step: StepRecord, graph: Graph) -> Schedule:
    """The operations in order, with those that each graph's backward runs again where it says."""
    before: dict[tuple[int, int, int], list[int]] = {}
    for index, record in enumerate(plan.graphs):
        forward = record.forward_length
        for execution, program in enumerate(record.by_execution):
            waiting: list[int] = []
            for op in program.backward:
                if op < forward:
                    waiting.append(op)
                elif waiting:
                    before[index, execution, op] = waiting
                    waiting = []
    row_of: dict[tuple[int, int, int], BaseOp] = {}
    rows: list[RowId] = []
    for row, place in numbered(BaseOp, step.places()):
        row_of.setdefault(place, row)
        for op in before.pop(place, ()):
            if (*place[:2], op) not in row_of:
                raise GraphError(f"operation {op} of graph {place[0]} is re-run and is not among the step's")
            rows.append(graph.rerun(row_of[*place[:2], op]))
        rows.append(row)
    return np.array(rows, dtype=np.int64)


def _ragged(counts: Sequence[int], flat: Sequence[ValueId]) -> list[tuple[ValueId, ...]]:
    found, start = [], 0
    for count in counts:
        found.append(tuple(flat[start : start + count]))
        start += count
    return found
