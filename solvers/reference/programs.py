"""The integer programs of ``ilp`` and ``exact`` as named PuLP models: their specification, in code.

The solvers write the same programs as arrays, which takes a hundredth of the time
(:mod:`solvers.programs.single_recompute`, :mod:`solvers.programs.exact_ilp`); tests hold those against these.
Every variable and constraint has a name, so that ``print(model.problem)`` reads as the program of a graph.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import pulp

from solvers.model.constraints import NO_CONSTRAINTS, Constraints
from solvers.model.cut_points import ForwardUses, last_forward_use
from solvers.model.graph import Graph
from solvers.model.indices import BaseOp, Per, SlotId, ValueId, indices, listed, numbered
from solvers.programs.exact_ilp import find_slots
from solvers.programs.single_recompute import Stages, fixed_bytes


@dataclass(frozen=True)
class Reference:
    """A model.

    Attributes:
        problem: The program.
        keep: Of ``ilp``: for each free value whether it is kept.
        run: Of ``exact``: for each slot whether it runs.
    """

    problem: pulp.LpProblem
    keep: dict[ValueId, pulp.LpVariable]
    run: Per[SlotId, pulp.LpVariable]

    def least_seconds(self, time_limit: float = 60.0) -> float | None:
        """The optimum in seconds; None where nothing fits.

        Raises:
            RuntimeError: It was not found within so many wall seconds.
        """
        self.problem.solve(pulp.HiGHS(msg=False, timeLimit=time_limit, gapRel=0.0, threads=1))
        if self.problem.sol_status == pulp.LpSolutionInfeasible:
            return None
        if self.problem.sol_status != pulp.LpSolutionOptimal:
            raise RuntimeError(f"no optimum after {time_limit:g} s: {pulp.LpStatus[self.problem.status]}")
        return float(pulp.value(self.problem.objective) or 0.0)


def single_recompute_model(
    graph: Graph, uses: ForwardUses, stages: Stages, moments: Iterable[BaseOp], budget: int
) -> Reference:
    """The program of :mod:`solvers.programs.ilp`: keep each free value, or re-run its operation once.

    Args:
        graph: The problem.
        uses: Where its values are used.
        stages: Which values are free, and when operations may be re-run.
        moments: The base operations at which memory is counted.
        budget: Bytes.
    """
    problem = pulp.LpProblem("single_recompute", pulp.LpMinimize)
    free = [v for v in graph.value_ids if stages.free[v]]
    producer, direct = listed(BaseOp, graph.producer), listed(BaseOp, stages.direct)
    operations = [o for o, times in numbered(BaseOp, stages.times) if times]

    keep = {v: pulp.LpVariable(f"keep_{v}", cat=pulp.LpBinary) for v in free}
    rerun = {  # operation o has been re-run by time t
        (o, t): pulp.LpVariable(f"rerun_{o}_by_{t}", 0, 1) for o in operations for t in stages.times[o]
    }

    problem += (
        pulp.lpSum(float(graph.seconds[graph.rerun(o)]) * rerun[o, stages.times[o][-1]] for o in operations),
        "seconds_of_reruns",
    )

    for o in operations:
        for earlier, later in zip(stages.times[o], stages.times[o][1:], strict=False):
            problem += rerun[o, earlier] <= rerun[o, later], f"once_rerun_{o}_stays_rerun_at_{later}"

    for v in free:
        o, first_use = producer[v], direct[v]
        if first_use >= 0:
            problem += rerun[o, first_use] + keep[v] >= 1, f"backward_reads_{v}"
        for reader in stages.readers[v]:
            same_segment = stages.segment[reader] == stages.segment[o]
            if same_segment:
                for t in stages.times[reader]:
                    problem += rerun[o, t] + keep[v] >= rerun[reader, t], f"rerun_{reader}_reads_{v}_at_{t}"
            elif stages.times[reader]:
                last = stages.times[reader][-1]
                problem += keep[v] >= rerun[reader, last], f"later_segment_{reader}_reads_{v}"

    fixed = fixed_bytes(graph, uses, stages.free, stages.end)
    last_use = last_forward_use(graph)
    size = {v: graph.values[v].bytes for v in free}
    for t in moments:
        kept = [v for v in free if last_use[v] < t <= stages.end[v]]
        again = [
            (v, max(s for s in stages.times[producer[v]] if s <= t))
            for v in free
            if any(s <= t for s in stages.times[producer[v]]) and t <= uses.last_backward[v]
        ]
        live = pulp.lpSum(size[v] * keep[v] for v in kept)
        live += pulp.lpSum(size[v] * rerun[producer[v], s] for v, s in again)
        problem += float(fixed[t]) + live <= budget, f"bytes_at_{t}"
    return Reference(problem, keep, [])


def exact_model(graph: Graph, budget: int, constraints: Constraints = NO_CONSTRAINTS) -> Reference:
    """The program of :mod:`solvers.programs.exact_ilp`: re-run anything before any backward operation.

    Args:
        graph: The problem, of a few forward operations.
        budget: Bytes.
        constraints: Values that are always kept or always recomputed.
    """
    problem = pulp.LpProblem("checkmate", pulp.LpMinimize)
    slots = find_slots(graph)
    count = indices(SlotId, len(slots))
    first_slot = {slot.row: j for j, slot in numbered(SlotId, slots) if not slot.optional}
    producer = listed(BaseOp, graph.producer)
    inputs, outputs = graph.walk_table.inputs, graph.walk_table.outputs

    run = [
        pulp.LpVariable(f"run_{slot.row}_in_{j}", 0 if slot.optional else 1, 1, pulp.LpInteger)
        for j, slot in enumerate(slots)
    ]
    alive: dict[tuple[ValueId, SlotId], pulp.LpVariable] = {}

    problem += pulp.lpSum(float(graph.seconds[slots[j].row]) * run[j] for j in count), "seconds"

    for v, value in numbered(ValueId, graph.values):
        if producer[v] < 0:
            continue
        made = first_slot[producer[v]]
        held = made if value.held_until is None else max(made, first_slot[value.held_until])
        touching = [j for j in count if j >= made and v in (*inputs[slots[j].row], *outputs[slots[j].row])]
        needed = [j for j in touching if j >= graph.forward_length and not slots[j].optional]
        last = max(touching[-1], held)
        kept_until = made - 1
        if constraints.keep is not None and constraints.keep[v]:
            kept_until = needed[0] if needed else last
        gone_from = None
        if constraints.recompute is not None and constraints.recompute[v] and graph.recompute_row[v] >= 0:
            region = graph.walk_table.recompute_region[v]
            reruns = (j for j in count if slots[j].optional and graph.ops[slots[j].row].region == region)
            gone_from = next(reruns, None)
        for j in indices(SlotId, last + 1, made):
            certain = j == made or j <= held or j <= kept_until
            alive[v, j] = pulp.LpVariable(f"alive_{v}_in_{j}", 1 if certain and not value.on_demand else 0, 1)
            makes, reads = v in outputs[slots[j].row], v in inputs[slots[j].row]
            if j > made:
                again = makes and not (constraints.keep is not None and constraints.keep[v])
                source = (0 if j == gone_from else alive[v, SlotId(j - 1)]) + (run[j] if again else 0)
                problem += alive[v, j] <= source, f"{v}_in_{j}_was_there_or_is_made"
            if reads or (makes and not (value.on_demand and j == made)):
                problem += alive[v, j] >= run[j], f"{v}_is_there_in_{j}"

    in_slot: list[list[ValueId]] = [[] for _ in count]
    for v, j in alive:
        in_slot[j].append(v)
    for j in count:
        live = pulp.lpSum(graph.values[v].bytes * alive[v, j] for v in in_slot[j])
        problem += live + int(graph.workspace_bytes[slots[j].row]) * run[j] <= budget, f"bytes_in_{j}"
    return Reference(problem, {}, run)
