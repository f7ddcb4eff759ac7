"""Solving one step for many budgets, which share the work."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.planfile.budget import Budget
from planner.planning.encodings import (
    Solved,
    better,
    bounded,
    followed,
    keeps_everything,
    offered,
    offers_to_send,
    total_bytes,
)
from planner.planning.prepared import Prepared
from planner.planning.solve import reserving_no_more, room_bytes
from planner.planning.solve_for import TooSlow, solve_for
from planner.problem.encodings import PackedProblem
from planner.progress import Progress
from solvers import portfolio
from solvers.model.arrays import Schedule
from solvers.model.constraints import Constraints
from solvers.model.graph import Graph
from solvers.model.solution import Solution, Status


def solve_many(
    prepared: Prepared,
    wanted: Sequence[Budget],
    *,
    constraints: Callable[[Graph], Constraints],
    known: Sequence[Schedule],
    time_limit: float,
    progress: Progress,
) -> list[Solved]:
    """The best schedule for each budget: with masks as bits or whole, with values sent to the host or not.

    A budget whose schedule drops nothing without these is not solved for again with them.

    Args:
        prepared: The step.
        wanted: The budgets.
        constraints: Given a graph, the user's constraints on it.
        known: Schedules that were found before.
        time_limit: Wall seconds for all budgets without packing and sending. Packing takes up to half of it
            again, and each way of sending up to a quarter.
        progress: Called with a description of the work, and the part of it that is done.
    """
    graph = prepared.problem.graph
    offer = offered(prepared, constraints(graph))
    plain_share = 1.0 if offer is None else 0.5  # of the progress
    plain = [
        Solved(solution, prepared.problem)
        for solution in _solutions(
            prepared,
            None,
            wanted,
            constraints(graph),
            known,
            time_limit,
            lambda text, fraction: progress(text, plain_share * fraction),
        )
    ]
    room_of = [room_bytes(budget, prepared) for budget in wanted]
    dropping = [i for i, solved in enumerate(plain) if not keeps_everything(solved)]
    for i in dropping:
        room = room_of[i]
        offers = offers_to_send(prepared, constraints(graph), room)
        if offers:
            plain[i] = replace(plain[i], bound_covers="schedules that send nothing")
        # A budget without bytes asks for the least peak, which the first problem reaches.
        for sending in offers if room is not None else offers[:1]:
            its_constraints, seconds = constraints(sending.problem.graph), time_limit / 4 / len(dropping)
            (answer,) = _solutions(prepared, sending, [wanted[i]], its_constraints, (), seconds, progress)
            plain[i] = better(plain[i], followed(prepared, sending, answer), room)
        plain[i] = bounded(prepared, plain[i], room) if offers else plain[i]
    if offer is None or not dropping:
        return _monotone(prepared, wanted, plain, room_of)
    answers = _solutions(
        prepared,
        offer,
        [wanted[i] for i in dropping],
        constraints(offer.problem.graph),
        (),
        time_limit / 2,
        lambda text, fraction: progress(text, plain_share + (1.0 - plain_share) * fraction),
    )
    for i, answer in zip(dropping, answers, strict=True):
        without = replace(plain[i], bound_covers="schedules that pack no masks")
        plain[i] = better(without, followed(prepared, offer, answer), room_of[i])
    return _monotone(prepared, wanted, plain, room_of)


def _monotone(
    prepared: Prepared, wanted: Sequence[Budget], found: list[Solved], room_of: list[int | None]
) -> list[Solved]:
    """Replace answers that are slower than the answer for a smaller budget, where that holds theirs.

    A budget without bytes has no room (None). Its answer counts as one for as many bytes as its peak.
    """
    answers = list(found)
    fastest = list[Solved]()  # the answers so far, the fastest and latest first
    bytes_of = [found[i].solution.peak_bytes if room is None else room for i, room in enumerate(room_of)]
    for room, i in sorted((room, i) for i, room in enumerate(bytes_of)):
        known = (solved for solved in fastest if _holds(prepared, wanted[i], solved))
        if room_of[i] is not None and (other := next(known, None)) is not None:
            answers[i] = better(answers[i], replace(other, bound_covers=answers[i].bound_covers), room)
            if answers[i] is not found[i]:
                # Its bound is for the smaller budget; more memory may allow a faster schedule.
                solution = replace(other.solution, bound_seconds=None, status=Status.FEASIBLE)
                answers[i] = replace(answers[i], solution=solution)
        if answers[i].solution.feasible:
            fastest = sorted([answers[i], *fastest], key=lambda solved: solved.solution.seconds)
    return answers


def _holds(prepared: Prepared, budget: Budget, solved: Solved) -> bool:
    """Whether a schedule's whole step holds a budget in bytes with all that a GPU's allocator reserves."""
    if budget.bytes is None or budget.relative or prepared.device.kind != "cuda":
        return True
    step = replace(prepared, problem=solved.problem)
    return step.whole_step(solved.solution.schedule).total_bytes <= budget.bytes


def _solutions(
    prepared: Prepared,
    offer: PackedProblem | None,
    wanted: Sequence[Budget],
    constraints: Constraints,
    known: Sequence[Schedule],
    time_limit: float,
    progress: Progress,
) -> list[Solution]:
    graph = prepared.problem.graph if offer is None else offer.problem.graph
    end, effort = time.perf_counter() + time_limit, prepared.options.effort
    by_overhead = [budget for budget in wanted if budget.max_overhead is not None]
    solved = iter(
        portfolio.sweep(
            graph,
            [room_bytes(budget, prepared) for budget in wanted if budget.max_overhead is None],
            time_limit=max(0.0, end - time.perf_counter())
            * (len(wanted) - len(by_overhead))
            / max(1, len(wanted)),
            progress=progress,
            constraints=constraints,
            known=known,
            effort=effort,
        )
    )
    seconds = max(0.0, end - time.perf_counter()) / max(1, len(by_overhead))

    def fast_enough(budget: Budget) -> Solution:
        try:
            return solve_for(
                graph,
                budget,
                None,
                portfolio.NAME,
                time_limit=seconds,
                effort=effort,
                constraints=constraints,
            )
        except TooSlow as error:
            return error.solution

    solutions = [next(solved) if budget.max_overhead is None else fast_enough(budget) for budget in wanted]
    seconds_left = max(0.0, end - time.perf_counter()) / max(1, len(solutions))

    def solve(room: int, seconds: float) -> Solution:
        return portfolio.solve(graph, room, time_limit=seconds, constraints=constraints, effort=effort)

    total = total_bytes(prepared, offer)
    return [
        reserving_no_more(prepared, solution, budget, solve, total, time_limit=seconds_left)
        for solution, budget in zip(solutions, wanted, strict=True)
    ]
