"""Solving for many budgets of one step, sharing the work between them."""

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
from planner.planning.solve_for import solve_for
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
    """The best schedules for budgets, with masks as bits and without.

    Args:
        prepared: The step.
        wanted: The budgets.
        constraints: What users insist on, on a graph.
        known: Schedules that were found before.
        time_limit: Wall seconds for all of them.
        progress: Called with what is being done, and how much of it is done.
    """
    graph = prepared.problem.graph
    offer = offered(prepared, constraints(graph))
    share = 1.0 if offer is None else 0.5
    plain = [
        Solved(solution, prepared.problem)
        for solution in _solutions(
            prepared,
            None,
            wanted,
            constraints(graph),
            known,
            time_limit,
            lambda text, fraction: progress(text, share * fraction),
        )
    ]
    rooms = [room_bytes(budget, prepared) for budget in wanted]
    more = [i for i, solved in enumerate(plain) if not keeps_everything(solved)]
    for i in more:
        room = rooms[i]
        offers = offers_to_send(prepared, constraints(graph), room)
        if offers:
            plain[i] = replace(plain[i], bound_covers="schedules that send nothing")
        for sending in offers if room is not None else offers[:1]:  # the first reaches the least peaks
            given, limit = constraints(sending.problem.graph), time_limit / 4 / len(more)
            (answer,) = _solutions(prepared, sending, [wanted[i]], given, (), limit, progress)
            plain[i] = better(plain[i], followed(prepared, sending, answer), room)
        plain[i] = bounded(prepared, plain[i], room) if offers else plain[i]
    if offer is None or not more:
        return _monotone(plain, rooms)
    answers = _solutions(
        prepared,
        offer,
        [wanted[i] for i in more],
        constraints(offer.problem.graph),
        (),
        time_limit / 2,
        lambda text, fraction: progress(text, share + (1.0 - share) * fraction),
    )
    for i, answer in zip(more, answers, strict=True):
        without = replace(plain[i], bound_covers="schedules that pack no masks")
        plain[i] = better(without, followed(prepared, offer, answer), rooms[i])
    return _monotone(plain, rooms)


def _monotone(found: list[Solved], rooms: list[int | None]) -> list[Solved]:
    """With what was found for a smaller budget where that is faster; the least peak that was asked for counts
    as a budget of its own bytes."""
    answers = list(found)
    fastest: Solved | None = None
    bytes_of = [found[i].solution.peak_bytes if room is None else room for i, room in enumerate(rooms)]
    for room, i in sorted((room, i) for i, room in enumerate(bytes_of)):
        if fastest is not None and rooms[i] is not None:
            answers[i] = better(answers[i], replace(fastest, bound_covers=answers[i].bound_covers), room)
            if answers[i].problem is fastest.problem and answers[i].solution is fastest.solution:
                known = replace(fastest.solution, bound_seconds=None, status=Status.FEASIBLE)
                answers[i] = replace(answers[i], solution=known)
        if answers[i].solution.feasible and (
            fastest is None or answers[i].solution.seconds <= fastest.solution.seconds
        ):
            fastest = answers[i]
    return answers


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
    shares = [budget for budget in wanted if budget.max_overhead is not None]
    solved = iter(
        portfolio.sweep(
            graph,
            [room_bytes(budget, prepared) for budget in wanted if budget.max_overhead is None],
            time_limit=max(0.0, end - time.perf_counter())
            * (len(wanted) - len(shares))
            / max(1, len(wanted)),
            progress=progress,
            constraints=constraints,
            known=known,
            effort=effort,
        )
    )
    each = max(0.0, end - time.perf_counter()) / max(1, len(shares))
    solutions = [
        next(solved)
        if budget.max_overhead is None
        else solve_for(
            graph, budget, None, portfolio.NAME, time_limit=each, effort=effort, constraints=constraints
        )
        for budget in wanted
    ]
    left = max(0.0, end - time.perf_counter()) / max(1, len(solutions))

    def solve(room: int, seconds: float) -> Solution:
        return portfolio.solve(graph, room, time_limit=seconds, constraints=constraints, effort=effort)

    total = total_bytes(prepared, offer)
    return [
        reserving_no_more(prepared, solution, budget, solve, total, time_limit=left)
        for solution, budget in zip(solutions, wanted, strict=True)
    ]
