"""A true lower bound on the seconds of any schedule within a budget.

Fix one moment t of the backward phase. Whatever a schedule does, at t it holds the values that
nothing recomputes and that are still to be read, and some of the others; what it does not hold and
backward reads later must be re-run after t, with everything that those re-runs read and t does not
hold. The cheapest choice of what to hold is an integer program: hold[v] and rerun[o] in {0, 1},

    hold[v] + rerun[producer(v)] >= 1           for v that base operations read after t,
    hold[v] + rerun[producer(v)] >= rerun[o]    for every v that a re-run of o reads,
    fixed bytes + sum of bytes(v) hold[v] <= budget,

where a value of an earlier graph, whose own backward is still to come, must be held: no other may
re-run it. The optimum bounds every schedule, however often it recomputes, since re-runs after t are counted
once. With hold integral every rerun is integral by itself; without, the linear program gives a weaker
bound in little time. It is solved for several moments, the integer program for the best of them only
and within a time limit: what is proven by then is a bound. An infeasible program proves the budget
infeasible.

In some graphs all operations before t lead to t, and all after it depend on t, as where the loss is
differentiated. Then the order of the other operations does not matter: the bound holds for every order in
which the step can be computed (:func:`holds_for_every_order`).

With a link, values may be on a host at t as well. Such a value was sent after its producer ran, and is
fetched after t, before the first operation that reads it, unless a re-run computes it:

    hold[v] + sent[v] + rerun[producer(v)] >= ...   in both rows above,
    sum of bytes(v) sent[v] <= to_host * (seconds from i to t + before)   of v made from i on, for some i,
    sum of bytes(v) (sent[v] - rerun[producer(v)])
        <= from_host * (seconds from t to j + after + all re-runs)        of v read until j, for some j,

where ``before`` and ``after`` are seconds that the step takes longer before t, and waits after it. Both add
to its time.

Not tight: several moments may together ask for more than each of them alone.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from solvers.milp import Outcome, Program
from solvers.model.arrays import PerStep
from solvers.model.cut_points import ForwardUses, forward_uses
from solvers.model.graph import Graph
from solvers.model.indices import BaseOp, Per, Region, ValueId, Variable, base_op, listed
from solvers.model.schedule import simulate

SECONDS = 1000.0
MOST_VARIABLES = 60_000
"""Larger programs are not solved: they take minutes, and the solver does not look at its time limit."""
MOST_VARIABLES_OF_GRAPHS = 300_000
"""The same where a step is several graphs: each is re-run in its own backward only, so that the program
nearly consists of smaller ones."""
MOST_INTEGER = 15_000
"""Programs of more variables are not solved as integer programs, for the same reason."""
MORE_MOMENTS = 24
"""How many moments are tried for a schedule that is above the bound in the end."""
LINK_ROWS = 40
"""How many moments bound what a link carries until them, and from them on."""
INTEGER_SECONDS = 2.0
"""Wall seconds that the integer program gets."""


CAPTURED_ORDER = base_op(-1)
"""In the place of a moment: the bound is what the step takes when nothing is recomputed."""


@dataclass(frozen=True)
class Bound:
    """``seconds`` that no schedule within the budget undercuts; inf when there is no such schedule.
    ``moment`` is the base operation that proves it, or ``CAPTURED_ORDER``."""

    seconds: float
    moment: BaseOp


NOT_BOUNDED = Bound(0.0, CAPTURED_ORDER)
"""Nothing is proven."""


@dataclass(frozen=True)
class Link:
    """A way to a host.

    Attributes:
        to_host, from_host: Bytes per second, each way.
        bytes: By value, how many of them it takes; 0 where it cannot be sent.
    """

    to_host: float
    from_host: float
    bytes: Per[ValueId, int]


def lower_bound(
    graph: Graph,
    budget: int,
    *,
    moments: int = 4,
    time_limit: float | None = None,
    integer_seconds: float = INTEGER_SECONDS,
    link: Link | None = None,
) -> Bound:
    """The best bound over up to ``moments`` moments, the highest points of the captured order.

    Args:
        graph: The problem.
        budget: Bytes of dynamic peak.
        moments: How many moments to try.
        time_limit: Wall seconds for everything.
        integer_seconds: Wall seconds, of these, for the integer program; 0 leaves it out.
        link: Where results may be sent; the bound then holds for schedules that send them, too.

    Returns:
        A bound that holds for every schedule, however often it recomputes.
    """
    begin = time.perf_counter()

    def left() -> float | None:
        return None if time_limit is None else time_limit - (time.perf_counter() - begin)

    best = Bound(graph.base_seconds, CAPTURED_ORDER)
    profile = simulate(graph, graph.base_schedule).step_bytes
    if not len(profile) or profile.max() <= budget:
        return best
    uses = forward_uses(graph)
    for moment in highest(profile, graph.forward_length, moments):
        remaining = left()
        if remaining is not None and remaining <= 0:
            return best
        seconds = bound_at(graph, uses, budget, moment, remaining, link=link)
        if seconds > best.seconds:
            best = Bound(seconds, moment)
        if np.isinf(seconds):
            return best
    remaining = left()
    most = integer_seconds if remaining is None else min(integer_seconds, remaining)
    return tightened(graph, budget, best, most, uses, link)


def tightened(
    graph: Graph,
    budget: int,
    bound: Bound,
    seconds: float,
    uses: ForwardUses | None = None,
    link: Link | None = None,
) -> Bound:
    """The better of a bound and that of its moment's integer program, solved for ``seconds`` wall seconds."""
    if bound.moment < 0 or seconds <= 0 or np.isinf(bound.seconds):
        return bound
    proven = bound_at(
        graph, uses or forward_uses(graph), budget, bound.moment, seconds, integer=True, link=link
    )
    return Bound(max(bound.seconds, proven), bound.moment)


def at_more_moments(graph: Graph, budget: int, bound: Bound, seconds: float) -> Bound:
    """The best of a bound and those of more moments, solved for ``seconds`` wall seconds.

    The highest moment need not prove the most: a lower one may need more re-runs at once.
    """
    if bound.moment < 0 or np.isinf(bound.seconds):
        return bound
    end, uses = time.perf_counter() + seconds, forward_uses(graph)
    profile = simulate(graph, graph.base_schedule).step_bytes
    best = bound
    for moment in highest(profile, graph.forward_length, MORE_MOMENTS):
        if (left := end - time.perf_counter()) <= 0:
            return best
        if moment != bound.moment and (proven := bound_at(graph, uses, budget, moment, left)) > best.seconds:
            best = Bound(proven, moment)
    if best.moment == bound.moment:
        return best
    return tightened(graph, budget, best, end - time.perf_counter(), uses)


def holds_for_every_order(graph: Graph, moment: BaseOp) -> bool:
    """Whether the bound of base operation ``moment`` is true in every order of the operations.

    It is where, by the values that they read, every earlier operation must come before it and every later one
    after it.
    """
    wanted = set(graph.ops[moment].inputs)
    for op in reversed(graph.ops[:moment]):
        if wanted.isdisjoint(op.outputs):
            return False
        wanted.update(op.inputs)
    made = set(graph.ops[moment].outputs)
    for op in graph.ops[moment + 1 : graph.base_length]:
        if made.isdisjoint(op.inputs):
            return False
        made.update(op.outputs)
    return True


def highest(profile: PerStep, forward_length: int, count: int) -> list[BaseOp]:
    """The highest backward moments of the captured order's profile, whose steps are the base operations;
    apart from each other."""
    backward = np.arange(forward_length, len(profile))
    apart = max(1, len(backward) // (4 * count))
    chosen: list[BaseOp] = []
    for moment in listed(BaseOp, backward[np.argsort(-profile[backward], kind="stable")]):
        if all(abs(moment - other) >= apart for other in chosen):
            chosen.append(moment)
            if len(chosen) == count:
                break
    return chosen


def bound_at(
    graph: Graph,
    uses: ForwardUses,
    budget: int,
    moment: BaseOp,
    time_limit: float | None,
    *,
    integer: bool = False,
    link: Link | None = None,
) -> float:
    """The bound that one moment proves, in seconds of the whole step."""
    program, _ = _program_at(graph, uses, budget, moment, integer, link)
    if program is None:
        return graph.base_seconds
    answer = program.solve(relax=not integer, time_limit=time_limit, absolute_gap=1e-5)
    if answer.outcome is Outcome.INFEASIBLE:
        return float("inf")
    if not np.isfinite(answer.bound):
        return graph.base_seconds
    return graph.base_seconds + max(0.0, answer.bound * (1 - 1e-7) / _scale(graph))


def sent_by_bound(graph: Graph, budget: int, moment: BaseOp, link: Link, seconds: float) -> set[ValueId]:
    """The values that a link has carried by a moment, in a nearly optimal point of the bound's program.

    Args:
        graph, budget, moment, link: As for the program.
        seconds: Wall seconds for finding the point.
    """
    program, sent = _program_at(graph, forward_uses(graph), budget, moment, True, link)
    values = None if program is None else program.solve(time_limit=seconds, absolute_gap=SECONDS / 500).values
    return set() if values is None else {v for v, number in sent.items() if values[number] > 0.5}


def _scale(graph: Graph) -> float:
    return SECONDS / max(graph.base_seconds, 1e-30)


def _program_at(
    graph: Graph, uses: ForwardUses, budget: int, moment: BaseOp, integer: bool, link: Link | None
) -> tuple[Program | None, dict[ValueId, Variable]]:
    """The program of a moment, None where it is too large, and its variables for values that are sent."""
    op = graph.ops[moment]
    held = np.zeros(len(graph.values), dtype=bool)
    held[list(op.inputs)] = True
    values, until = graph.held_table
    held[values[(graph.producer[values] <= moment) & (until >= moment)]] = True
    computed = (graph.producer >= 0) & (graph.producer < moment)
    later = computed & (uses.last_any > moment)
    sendable = np.array([0] * len(graph.values) if link is None else link.bytes)
    fixed_values = held | (later & (graph.recompute_row < 0) & (sendable == 0))
    fixed = int(graph.bytes[fixed_values].sum()) + int(graph.workspace_bytes[moment])
    fixed += sum(int(graph.bytes[v]) for v in op.outputs if not held[v] and not graph.on_demand[v])
    program = Program()
    scale = _scale(graph)
    unit = max(1.0, budget / 1e4)
    # Lists, which are read one by one in a fraction of the time that arrays take.
    table, seconds, is_later = graph.walk_table, graph.seconds.tolist(), later.tolist()
    sizes = (graph.bytes / unit).tolist()
    may = [any(table.recompute_row[v] >= 0 for v in table.outputs[i]) for i in graph.forward_ops]
    rerun = [
        program.variable(seconds[graph.rerun(i)] * scale, high=1.0 if may[i] else 0.0)
        for i in graph.forward_ops
    ]
    in_time = _InTime.after(graph, moment)
    producer = listed(BaseOp, graph.producer)
    hold: dict[ValueId, Variable] = {}
    sent: dict[ValueId, Variable] = {}
    memory: dict[Variable, float] = {}
    decided = computed & ~fixed_values & (graph.producer < graph.forward_length)
    for v in listed(ValueId, np.flatnonzero(decided)):
        hold[v] = program.variable(integer=integer)
        memory[hold[v]] = sizes[v]
        if sendable[v]:
            sent[v] = program.variable(integer=integer)
        if is_later[v]:
            terms = {hold[v]: 1.0} | ({sent[v]: 1.0} if v in sent else {})
            if in_time.for_base_operations(v):
                terms[rerun[producer[v]]] = 1.0
            program.row(terms, low=1.0)
    for i in graph.forward_ops:
        if not may[i]:
            continue
        for v in table.inputs[graph.rerun(i)]:
            if v in hold:
                terms = {hold[v]: 1.0, rerun[i]: -1.0} | ({sent[v]: 1.0} if v in sent else {})
                if in_time.for_reruns_of(table.region[i], v):
                    terms[rerun[producer[v]]] = 1.0
                program.row(terms, low=0.0)
    program.row(memory, high=(budget - fixed) / unit)
    if link is not None and sent:
        _link_rows(program, graph, moment, link, sent, rerun, scale)
    most = MOST_VARIABLES if len(in_time.begins) <= 1 else MOST_VARIABLES_OF_GRAPHS
    small_enough = len(program.cost) <= (MOST_INTEGER if integer else most)
    return program if small_enough else None, sent


def _link_rows(
    program: Program,
    graph: Graph,
    moment: BaseOp,
    link: Link,
    sent: dict[ValueId, Variable],
    rerun: list[Variable],
    scale: float,
) -> None:
    """Add a link's transfers before a moment and after it; seconds are multiplied by ``scale``."""
    ends = np.cumsum(graph.seconds[: graph.base_length]) * scale
    longer_before, longer_after = (program.variable(1.0, high=np.inf) for _ in range(2))
    last = graph.base_length
    first_read = {v: min((r for r in graph.consumers[v] if r > moment), default=last) for v in sent}
    every = max(1, len(sent) // LINK_ROWS)
    terms = {longer_before: -1.0}
    for number, v in enumerate(sorted(sent, key=lambda v: -graph.producer[v]), 1):
        terms[sent[v]] = link.bytes[v] / link.to_host * scale
        if number % every == 0 or number == len(sent):
            begin = ends[moment] - graph.seconds[moment] * scale
            program.row(terms, high=float(begin - ends[graph.producer[v]]))
    terms = {longer_after: -1.0}
    terms |= {rerun[i]: -graph.seconds[graph.rerun(i)] * scale for i in graph.forward_ops}
    for number, v in enumerate(sorted(sent, key=lambda v: first_read[v]), 1):
        seconds, again = link.bytes[v] / link.from_host * scale, rerun[graph.producer[v]]
        terms[sent[v]] = seconds
        terms[again] -= seconds
        if number % every == 0 or number == len(sent):
            program.row(terms, high=float(ends[first_read[v] - 1] - ends[moment]))


@dataclass(frozen=True)
class _InTime:
    """Where a re-run can come before what reads it: a graph is re-run in its own backward only.

    Attributes:
        begins: The first backward operation of each graph.
        ends: The last one.
        first_read: By value, the first base operation after the moment that reads it.
        region: By value, the graph that can compute it again; None where none can.
    """

    begins: Mapping[Region, BaseOp]
    ends: Mapping[Region, BaseOp]
    first_read: Per[ValueId, int]
    region: Per[ValueId, Region | None]

    @staticmethod
    def after(graph: Graph, moment: BaseOp) -> "_InTime":
        table = graph.walk_table
        begins, ends = dict[Region, BaseOp](), dict[Region, BaseOp]()
        first_read = [graph.base_length] * len(graph.values)
        for i in graph.backward_ops:
            begins.setdefault(table.region[i], i)
            ends[table.region[i]] = i
            if i > moment:
                for v in table.inputs[i]:
                    first_read[v] = min(first_read[v], i)
        return _InTime(begins, ends, cast("Per[ValueId, int]", first_read), table.recompute_region)

    def for_base_operations(self, value: ValueId) -> bool:
        region = self.region[value]
        return region is not None and region in self.begins and self.begins[region] <= self.first_read[value]

    def for_reruns_of(self, reader: Region, value: ValueId) -> bool:
        region = self.region[value]
        if region is None or region not in self.begins:
            return False
        return region == reader or (reader in self.ends and self.begins[region] < self.ends[reader])
