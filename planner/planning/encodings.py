"""Choosing which masks are kept as bits, and what is kept on the host: the best of the schedules without and
with packing."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from planner.planfile.schema import BoundCovers
from planner.planning.backends import host_budget_bytes
from planner.planning.prepared import Prepared
from planner.problem.build import Problem
from planner.problem.encodings import PackedProblem, Packing, packed
from planner.problem.link import overlapped
from planner.problem.offload import alone_in_size, beside_compute, link_of, within_host_budget
from solvers.model.arrays import Schedule
from solvers.model.constraints import Constraints
from solvers.model.cut_points import articulation_values, forward_uses, pinned_values
from solvers.model.schedule import simulate
from solvers.model.solution import Solution, Status
from solvers.programs.lower_bound import lower_bound, sent_by_bound

_LEAST_SHARE = 0.02
"""The share of the unplanned step's peak that results of ReLU must take together to be offered as signs.
Packing saves no more than what they take: for less the step is not solved a second time."""
_LEAST_MASKS = 1 / 5000
"""The same where there are masks, which cost less to pack. Those of labels, some kilobytes, take less."""

_SHARES = 0.6, 1.0
"""Shares of the time of forward and backward for which the link may be busy, each tried. With all of it, what
cannot be sent or fetched in time makes compute wait; with less, more is recomputed. Either is the better one
somewhere: without 0.6, a GPT of `benchmarks/models.py` on a V100 takes 20.8 % for 35 % of its peak, not 19.0;
without 1.0, BERT-Large takes 3.4 %, not 1.2."""

_SHARES_OF_BOUND = 0.8, 1.0
"""Shares of the link's bytes per second that the lower bound's program may use, each tried, as above: without
0.8, that GPT takes 20.8 %, too; without 1.0, BERT-Large takes 4.9 % for 30 % of its peak, not 3.4."""
_PROGRAM_SECONDS = 2.0
"""Wall seconds for each of these programs. They only select what is offered, so any answer is of use: with
a quarter and four times of it, three of four plans of these models are the same, one takes 1.8 % more."""

_BESIDE = 0.02
"""The share of a transfer's time that counts if the step computes meanwhile: a little, so that of schedules
that take about as long the one that sends less is taken. Without, that GPT takes 20.8 %, not 19.0, for 35 %;
with 0.1 it takes 9.4 %, not 7.3, for half of its peak."""


@dataclass(frozen=True)
class Solved:
    """A solution and the problem that it solves.

    Attributes:
        solution: The solution.
        problem: Its problem, in which the masks that it unpacks are packed.
        bound_covers: Which schedules its lower bound holds for.
    """

    solution: Solution
    problem: Problem
    bound_covers: BoundCovers = "every schedule"


def offered(prepared: Prepared, constraints: Constraints) -> PackedProblem | None:
    """The problem in which every mask may be kept as bits, and the signs of every result of ReLU.

    None where that is not offered: with micro-batches in flight, with checkpoints placed by hand, with
    offload, where masks may be sent instead, and where masks and results are too small. A mask that the user
    wants kept or recomputed is not packed.
    """
    options = prepared.options
    if options.encodings == "none" or options.solver == "manual" or options.in_flight is not None:
        return None
    if options.offload != "none":
        return None
    free = _free(prepared, constraints)
    # Without a mask all that is packed are signs, which have a reader.
    least = _LEAST_SHARE if all(p.reader is not None for p in free) else _LEAST_MASKS
    sizes = (prepared.problem.graph.values[p.value].bytes for p in free)
    if sum(sizes) <= least * prepared.problem.eager.peak_bytes:
        return None
    return packed(prepared.problem, free, if_unpacked=True)


def _free(prepared: Prepared, constraints: Constraints) -> list[Packing]:
    """The packings of values that no constraint of the user keeps or recomputes."""
    pinned = np.zeros(len(prepared.problem.graph.values), dtype=bool)
    for insisted in (constraints.keep, constraints.recompute):
        if insisted is not None:
            pinned |= insisted
    return [p for p in prepared.packings if not pinned[p.value]]


def offers_to_send(
    prepared: Prepared, constraints: Constraints, room: int | None = None
) -> list[PackedProblem]:
    """The problems in which results may be sent to the host; none without ``offload``.

    In the first, all may be sent, at the full time of their transfers: it reaches the least peaks. In the
    second, only cut points may be sent, as the inputs of blocks; the rest is recomputed from them. In the
    others, only as many as the link carries while the step computes, so that compute waits little: those
    that take longest to recompute for their bytes, and those that the programs of the lower bound send, which
    weigh sending against recomputing. A result that may be sent is not recomputed, nor are others of the same
    operation, which stay; where these are large, the first two problems recompute all of them.

    Args:
        prepared, constraints: The step, and what the user wants kept or recomputed.
        room: The bytes that the dynamic peak may have; None for the least, without the bound's programs.
    """
    if prepared.options.offload == "none":
        return []
    graph = prepared.problem.graph
    free = within_host_budget(_free(prepared, constraints), host_budget_bytes(prepared.options))
    alone = alone_in_size(graph, free)
    cut_points = set(articulation_values(graph, pinned_values(graph, forward_uses(graph))))
    connecting = [p for p in alone if p.handed or p.value in cut_points]
    beside = [beside_compute(graph, free, share) for share in _SHARES]
    if room is not None:
        beside += [sent for sent in _sent_by_bounds(prepared, free, room) if sent not in beside]
    ways = [
        _priced(alone, 1.0),
        _priced(connecting, 1.0),
        *(_priced(packings, _BESIDE) for packings in beside),
    ]
    return [packed(prepared.problem, packings, if_unpacked=True) for packings in ways if packings]


def _sent_by_bounds(prepared: Prepared, free: list[Packing], room: int) -> list[list[Packing]]:
    """The results that the lower bound's program sends, for each of `_SHARES_OF_BOUND`."""
    graph, found = prepared.problem.graph, list[list[Packing]]()
    limit = prepared.options.time_limit / 8
    for share in _SHARES_OF_BOUND:
        link = link_of(graph, free, prepared.device, share)
        moment = lower_bound(graph, room, link=link, time_limit=limit, integer_seconds=0.0).moment
        if moment >= 0:
            sent = sent_by_bound(graph, room, moment, link, _PROGRAM_SECONDS)
            found.append([packing for packing in free if packing.value in sent])
    return found


def bounded(prepared: Prepared, solved: Solved, room: int | None) -> Solved:
    """An answer that sends results, with a lower bound on the seconds of all schedules, those that send too.

    The bound does not know masks that stay on the device as bits: where there are masks, and where there is
    no bound to replace, the answer is returned as it is.
    """
    if room is None or solved.solution.bound_seconds is None or solved.bound_covers != "every schedule":
        return solved
    graph = prepared.problem.graph
    if any(packing.host_bytes < graph.values[packing.value].bytes for packing in prepared.packings):
        return solved
    link = link_of(graph, prepared.packings, prepared.device)
    proven = lower_bound(graph, room, link=link, time_limit=prepared.options.time_limit / 4).seconds
    seconds = min(proven, solved.solution.seconds)
    return replace(solved, solution=replace(solved.solution, bound_seconds=seconds))


def _priced(packings: Iterable[Packing], price: float) -> list[Packing]:
    """Packings with a share, ``price``, of the seconds of their transfers among their own."""
    return [
        replace(
            p,
            pack_seconds=p.pack_seconds + price * p.send_seconds,
            unpack_seconds=p.unpack_seconds + price * p.fetch_seconds,
        )
        for p in packings
    ]


def followed(prepared: Prepared, offer: PackedProblem, solution: Solution) -> Solved:
    """A solution of an offer, as one of the problem that packs only what it unpacks."""
    problem, schedule = _followed(prepared.problem, prepared.packings, offer, solution.schedule)
    timeline = simulate(problem.graph, schedule)
    solution = replace(solution, schedule=schedule, peak_bytes=timeline.peak_bytes, seconds=timeline.seconds)
    if any(packing.host_bytes for packing in offer.packings):
        # The offer's bound ignores schedules that recompute what it sends: only the base seconds bound all.
        status = Status.FEASIBLE if solution.feasible else solution.status
        bound = None if solution.bound_seconds is None else prepared.problem.graph.base_seconds
        return Solved(replace(solution, bound_seconds=bound, status=status), problem)
    return Solved(solution, problem, "schedules that pack masks")


def total_bytes(prepared: Prepared, offer: PackedProblem | None = None) -> Callable[[Schedule], int]:
    """A function that predicts the bytes of a schedule's whole step, and remembers them.

    Args:
        prepared: The step.
        offer: The offer that the schedules are of; None where they are of the step's problem.
    """
    known: dict[bytes, int] = {}

    def total(schedule: Schedule) -> int:
        key = schedule.tobytes()
        if key not in known:
            problem = prepared.problem
            if offer is not None:
                problem, schedule = _followed(problem, prepared.packings, offer, schedule)
            known[key] = replace(prepared, problem=problem).whole_step(schedule).total_bytes
        return known[key]

    return total


def _followed(
    without: Problem, packings: Iterable[Packing], offer: PackedProblem, schedule: Schedule
) -> tuple[Problem, Schedule]:
    """The problem that packs only what a schedule of an offer unpacks, and that schedule in it."""
    used = {packing.row for packing in offer.unpacked_in(schedule)}
    made = packed(without, [packing for packing in packings if packing.row in used])
    followed = made.follow(offer, schedule)
    if any(packing.host_bytes for packing in made.packings):
        return overlapped(without, made, followed)
    return made.problem if used else without, followed


def keeps_everything(solved: Solved) -> bool:
    """Whether the schedule fits and recomputes nothing, so that none can be better."""
    solution = solved.solution
    return solution.feasible and len(solution.schedule) == solved.problem.graph.base_length


def fits(solved: Solved, room: int | None) -> bool:
    """Whether the schedule is within a budget that leaves ``room`` bytes; None asks for the least peak."""
    return solved.solution.feasible and (room is None or solved.solution.peak_bytes <= room)


def better(first: Solved, second: Solved, room: int | None) -> Solved:
    """The better of two answers to a budget: the one that fits, then the faster one.

    If neither fits, or if the least peak is asked for (``room`` is None), the one of the smaller peak.
    """

    def rank(solved: Solved) -> tuple[bool, float, float]:
        seconds, peak = solved.solution.seconds, solved.solution.peak_bytes
        if room is None or not fits(solved, room):
            return not fits(solved, room), peak, seconds
        return False, seconds, peak

    return min(first, second, key=rank)
