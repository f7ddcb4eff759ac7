"""From a captured step and a budget to a plan, by a solver."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planner.choices import is_recorded
from planner.errors import InfeasibleBudget, PlannerError, warn
from planner.heap import older_objects_set_aside
from planner.module_parts import named_parts
from planner.planfile.budget import Budget, format_bytes
from planner.planfile.plan import PlanRecord, WholeStep
from planner.planning.encodings import (
    Solved,
    better,
    bounded,
    fits,
    followed,
    keeps_everything,
    offered,
    offers_to_send,
    total_bytes,
)
from planner.planning.make_plan import AS_WRITTEN, bound_bytes, make_plan
from planner.planning.prepared import Prepared
from planner.planning.solve_for import TooSlow, solve_for, too_slow
from planner.planning.split import Forms, split_hint
from planner.planning.within_budget import within_budget
from planner.problem.build import Problem
from planner.problem.encodings import PackedProblem
from planner.problem.selection import select
from planner.progress import Progress, no_report, part_of
from solvers import portfolio
from solvers.effort import EFFORTS
from solvers.model.arrays import Schedule
from solvers.model.constraints import Constraints
from solvers.model.graph import Graph
from solvers.model.schedule import simulate
from solvers.model.solution import Solution, Status
from solvers.model.solver import Solve
from solvers.one_budget import first_bound
from solvers.programs.lower_bound import NOT_BOUNDED, Bound, tightened
from solvers.registry import SOLVERS


class SolverError(PlannerError, ValueError):
    """There is no solver of that name."""


@older_objects_set_aside()
def plan_prepared(prepared: Prepared, budget: int | str, *, progress: Progress | None = None) -> PlanRecord:
    """Plan a step that has been captured, with the solver and the selections of its options.

    Raises:
        BudgetError, SelectionError, InfeasibleBudget: As :func:`plan` does.
    """
    report = progress or no_report
    wanted = prepared.budget(budget)
    if prepared.options.split == "none":
        return _planned(prepared, wanted, report)
    return Forms(prepared, _planned, _bound).planned(wanted, room_bytes(wanted, prepared), report)


def swept_in_pieces(
    prepared: Prepared, budgets: Sequence[Budget], points: int, progress: Progress
) -> list[PlanRecord]:
    """Plans for many budgets of a step in pieces; of two the one with the larger budget is never slower.

    Args:
        prepared: The step, in one piece.
        budgets: The budgets; none for so many, evenly spaced from the step that recomputes nothing to the
            least.
        points: How many.
        progress: Called with what is being done, and how much of it is done.

    Raises:
        InfeasibleBudget: No budget can be met.
        CaptureError: There is nothing to split.
    """
    count = len(budgets) or points
    options = replace(prepared.options, time_limit=prepared.options.time_limit / count)
    prepared = replace(prepared, options=options)
    forms, found, refused = Forms(prepared, _planned, _bound), list[PlanRecord](), list[PlannerError]()
    wanted = list(budgets)
    if not wanted:
        found.append(forms.planned(prepared.budget("min"), None, no_report))
        least, graph = found[0].predicted.dynamic_peak_bytes, prepared.problem.graph
        more = simulate(graph, graph.base_schedule).peak_bytes - least
        around = prepared.footprint.around(prepared.resident.total + least)
        steps = [around + more * i // max(points - 1, 1) for i in range(1, points)]
        wanted = [Budget(step, str(step), relative=True) for step in dict.fromkeys(steps)]
    rooms = [room_bytes(budget, prepared) for budget in wanted]
    ascending = sorted(zip(wanted, rooms, strict=True), key=lambda each: each[1] or -1)
    for n, (budget, room) in enumerate(ascending):
        try:
            made = forms.planned(budget, room, part_of(progress, n / count, (n + 1) / count))
        except (InfeasibleBudget, TooSlow) as error:
            refused.append(error)
            continue
        fitting = [plan for plan in found if _is_within(plan, budget, room)]
        best = min([made, *fitting], key=lambda plan: plan.predicted.seconds)
        if best is not made:
            whole = best.whole_step
            assert whole is not None
            bound = {"budget_bytes": bound_bytes(budget, whole)}
            target = made.target.model_copy(update=bound)
            # Its bound is for the smaller budget; more memory may allow a faster schedule.
            unbounded = {"status": Status.FEASIBLE.value, "gap": None, "bound_seconds": None}
            solver = best.solver.model_copy(update=unbounded)
            made = best.model_copy(update={"target": target, "solver": solver})
        found.append(made)
    if not found:
        raise refused[0]
    return found


def _is_within(plan: PlanRecord, budget: Budget, room: int | None) -> bool:
    """Whether a plan for another budget is within this one, which is in bytes."""
    if room is None or plan.predicted.dynamic_peak_bytes > room:
        return False
    whole, most = plan.whole_step, budget.bytes
    return budget.relative or (whole is not None and most is not None and whole.total_bytes <= most)


def _bound(prepared: Prepared, wanted: Budget) -> float:
    """Seconds that no plan of a step undercuts for a budget in bytes, results that are sent left aside."""
    if prepared.options.offload != "none":
        return prepared.problem.graph.base_seconds
    room = room_bytes(wanted, prepared)
    assert room is not None
    offer = offered(prepared, _constraints(prepared, prepared.problem))
    graphs = [prepared.problem.graph] if offer is None else [prepared.problem.graph, offer.problem.graph]
    return min(first_bound(graph, room, prepared.options.time_limit).seconds for graph in graphs)


def _planned(
    prepared: Prepared,
    wanted: Budget,
    report: Progress,
    minimum: bool = True,
    rival: float = math.inf,
) -> PlanRecord:
    """Plan a step in one form; ``rival``: seconds of a plan in another one, which it has to undercut."""
    options, graph = prepared.options, prepared.problem.graph
    report(f"solving ({options.solver})", 0.0)
    room = room_bytes(wanted, prepared)
    constraints = _constraints(prepared, prepared.problem)
    if options.backend == "inductor":
        return _planned_for_inductor(prepared, wanted, room, constraints, report)

    solved = _solved(prepared, wanted, room, constraints, report, minimum, rival)
    if _better_as_written(prepared, solved.solution, wanted, room):
        warn(AS_WRITTEN)
        nothing = replace(
            solved.solution, schedule=graph.base_schedule, status=Status.FEASIBLE, bound_seconds=None
        )
        made = make_plan(prepared, nothing, wanted, as_written=True)
    elif solved.solution.feasible:
        made = make_plan(prepared, solved, wanted)
    else:
        raise infeasible(replace(prepared, problem=solved.problem), solved.solution, wanted)
    report("planned", 1.0)
    return made


def _better_as_written(prepared: Prepared, solution: Solution, wanted: Budget, room: int | None) -> bool:
    """Whether the step without a plan fits a budget that no schedule fits, or takes less than the least.

    The step as captured may take more: what is written in place is a copy there. Where the user insists on
    what is kept or recomputed it is no answer.
    """
    if not _may_run_as_written(prepared):
        return False
    peak_bytes = prepared.problem.eager.peak_bytes
    if wanted.bytes is None or room is None:  # the least of a solver that the user chose is its own
        return peak_bytes < solution.peak_bytes and prepared.options.solver == portfolio.NAME
    if solution.feasible:
        return False
    return (
        peak_bytes <= room if wanted.relative else prepared.reserving_whole_step.total_bytes <= wanted.bytes
    )


def _may_run_as_written(prepared: Prepared) -> bool:
    options = prepared.options
    insisted = options.keep or options.recompute or options.checkpoints or options.split != "none"
    return options.backend == "eager" and not insisted


def _solved(
    prepared: Prepared,
    wanted: Budget,
    room: int | None,
    constraints: Constraints,
    report: Progress,
    minimum: bool = True,
    rival: float = math.inf,
) -> Solved:
    """The fastest schedule, or that of the least peak, with masks packed where that is better.

    With masks to pack there are two problems. The one of the lower bound is solved first; the other is not
    where its bound proves that it has nothing better. Where results may be sent, all of
    :func:`offers_to_send` are.
    """
    options, problem = prepared.options, prepared.problem
    offer = offered(prepared, constraints)
    sending = offers_to_send(prepared, constraints, room)

    def solve(
        graph: Graph,
        constraints: Constraints,
        progress: Progress,
        rival: float,
        room: int | None,
        seconds: float,
    ) -> Solution:
        return solve_for(
            graph,
            wanted,
            room,
            options.solver,
            time_limit=seconds,
            effort=options.effort,
            progress=progress,
            constraints=constraints,
            rival=rival,
            minimum=minimum,
        )

    def undercutting(
        solve: Callable[[float, int | None, float], Solution], total: Callable[[Schedule], int], rival: float
    ) -> Callable[[int | None, float], Solution]:
        """Solves for one room after the other; what fits the budget is the rival of what comes after it."""

        def again(room: int | None, seconds: float) -> Solution:
            nonlocal rival
            solution = solve(rival, room, seconds)
            if wanted.bytes is not None and solution.feasible and total(solution.schedule) <= wanted.bytes:
                rival = min(rival, solution.seconds)
            return solution

        return again

    def without(progress: Progress, rival: float = rival) -> Solved:
        # In as much time as without an offer, or what is found could be worse than that.
        total, limit = total_bytes(prepared), options.time_limit
        again = undercutting(partial(solve, problem.graph, constraints, progress), total, rival)
        solution = again(room, limit)
        solution = reserving_no_more(prepared, solution, wanted, again, total, time_limit=limit, rival=rival)
        solved = Solved(solution, problem)
        if not (offer or sending) or keeps_everything(solved):
            return solved
        return replace(
            solved, bound_covers="schedules that send nothing" if sending else "schedules that pack no masks"
        )

    def packing(
        offer: PackedProblem,
        progress: Progress,
        rival: float = rival,
        room: int | None = room,
        share: float = 0.5,
    ) -> Solved:
        masks = offer.problem.graph
        given = _constraints(prepared, offer.problem)
        total, limit = total_bytes(prepared, offer), share * options.time_limit
        again = undercutting(partial(solve, masks, given, progress), total, rival)
        solution = again(room, limit)
        solution = reserving_no_more(prepared, solution, wanted, again, total, time_limit=limit, rival=rival)
        return followed(prepared, offer, solution)

    if offer is None:
        part = 0.93 / (1 + len(sending))
        solved, least = without(part_of(report, 0.0, part)), room
        for number, more in enumerate(sending, 1):
            if not keeps_everything(solved):
                share = 0.5 if least is None else 0.5 / len(sending)
                reporting = part_of(report, number * part, (number + 1) * part)
                solved = better(solved, packing(more, reporting, room=least, share=share), least)
                least = solved.solution.peak_bytes if room is None else room
        return bounded(prepared, solved, room) if sending else solved

    ways = [_Way(problem.graph, without), _Way(offer.problem.graph, partial(packing, offer))]
    if room is not None and options.solver == portfolio.NAME:
        bounds = [first_bound(way.graph, room, options.time_limit) for way in ways]
        ways = [replace(way, bound=bound) for way, bound in zip(ways, bounds, strict=True)]
        ways.sort(key=lambda way: way.bound.seconds)  # without masks first where both are the same
    first, second = ways
    solved = first.solve(part_of(report, 0.0, 0.46), rival)
    if first.solve is without and keeps_everything(solved):
        return solved
    if room is not None and fits(solved, room):
        settings = EFFORTS[options.effort]
        enough = solved.solution.seconds - settings.other_form * problem.graph.base_seconds
        bound = second.bound
        if bound.seconds < enough:
            bound = tightened(second.graph, room, bound, settings.small_program_seconds / 4)
        if bound.seconds >= enough:
            return solved
        rival = min(rival, solved.solution.seconds)
    return better(solved, second.solve(part_of(report, 0.46, 0.93), rival), room)


@dataclass(frozen=True)
class _Way:
    """One of the problems, how to solve it, where the answer to the other takes so many seconds, and seconds
    that no schedule of it undercuts."""

    graph: Graph
    solve: Callable[[Progress, float], Solved]
    bound: Bound = NOT_BOUNDED


def _planned_for_inductor(
    prepared: Prepared, wanted: Budget, room: int | None, constraints: Constraints, report: Progress
) -> PlanRecord:
    from planner.planning.inductor import solve_for_inductor  # which imports Inductor

    options = prepared.options

    def solve(room: int | None, seconds: float) -> Solution:
        return solve_for(
            prepared.problem.graph,
            wanted,
            room,
            options.solver,
            time_limit=seconds,
            effort=options.effort,
            constraints=constraints,
        )

    answer, nothing = solve_for_inductor(prepared, room, solve, options.time_limit, report)
    if not answer.solution.feasible:
        raise infeasible(prepared, answer.solution, wanted, dynamic_peak_bytes=answer.step.peak_bytes)
    made = make_plan(prepared, answer.solution, wanted, (answer.step, nothing.step))
    report("planned", 1.0)
    return made


def _constraints(prepared: Prepared, problem: Problem) -> Constraints:
    options = prepared.options
    recorded = is_recorded(options.backend, options.backend_options)
    return select(
        problem.graph,
        keep=options.keep,
        recompute=options.recompute,
        checkpoints=options.checkpoints,
        modules=named_parts(prepared.model),
        # A recording cannot go back to the state of the generator that a draw saw.
        also_kept=problem.drawn(prepared.captured) if recorded else (),
    )


def reserving_no_more(
    prepared: Prepared,
    solution: Solution,
    budget: Budget,
    solve: Callable[[int, float], Solution],
    total: Callable[[Schedule], int],
    *,
    time_limit: float,
    rival: float = math.inf,
) -> Solution:
    """A solution whose step holds a budget on a GPU with all that its allocator reserves.

    A share of what the unplanned step allocates, and the least there is, bound what is allocated.

    Args:
        solution: A solver's for what the budget allows to be allocated.
        solve, total: As for :func:`planner.planning.within_budget.within_budget`.
        time_limit: Wall seconds for solving again.
        rival: Seconds of a plan in another form: nothing that takes as long is brought within the budget.
    """
    if budget.bytes is None or budget.relative or prepared.device.kind != "cuda":
        return solution
    return within_budget(
        solution,
        budget.bytes,
        total,
        solve,
        time_limit=time_limit,
        too_slow=lambda solution: solution.seconds >= rival,
    )


def find_solver(name: str) -> Solve:
    """The solver of a name.

    Raises:
        SolverError: If there is none; the message lists them.
    """
    if not isinstance(name, str) or name not in SOLVERS:
        raise SolverError(f"there is no solver {name!r}; expected one of {', '.join(sorted(SOLVERS))}")
    return SOLVERS[name]


def room_bytes(budget: Budget, prepared: Prepared) -> int | None:
    """The bytes that a budget leaves to forward and backward: 0 if the optimizer's step does not fit, None if
    the least possible is asked for."""
    if budget.bytes is None:
        return None
    fits = least_whole_step(prepared).total_bytes <= budget.bytes
    return prepared.footprint.room_bytes(budget.bytes) if fits else 0


def least_whole_step(prepared: Prepared) -> WholeStep:
    """The whole step if forward and backward needed no memory but for the results that they leave."""
    return prepared.footprint.whole_step(0, prepared.problem.final_bytes)


def infeasible(
    prepared: Prepared, solution: Solution, budget: Budget, *, dynamic_peak_bytes: int | None = None
) -> PlannerError:
    """The error about a budget that no schedule was found for, with the one that is nearest to it."""
    if budget.bytes is None:
        return too_slow(budget, solution, prepared.problem.graph)
    whole = prepared.whole_step(solution.schedule)
    if dynamic_peak_bytes is not None:  # of the programs that Inductor makes of the schedule
        whole = prepared.footprint.whole_step(dynamic_peak_bytes, prepared.problem.final_bytes)
    least = f"the least that {solution.solver} reaches"
    unplanned = prepared.reserving_whole_step
    if _may_run_as_written(prepared) and unplanned.total_bytes < whole.total_bytes:
        whole, least = unplanned, "the least, that of the step without a plan,"
    if budget.relative:  # which bounds what is allocated
        whole = whole.model_copy(update={"fragmentation_bytes": 0})
    return InfeasibleBudget(
        f"budget {budget.text} is {format_bytes(budget.bytes)} ({budget.bytes:,} bytes), but {least} "
        f"is {format_bytes(whole.total_bytes)} ({whole.total_bytes:,} bytes), of which "
        f"{_least_possible(whole, prepared)}{split_hint(prepared)}",
        minimum_bytes=whole.total_bytes,
        budget_bytes=budget.bytes,
    )


def _least_possible(whole: WholeStep, prepared: Prepared) -> str:
    resident = f"{format_bytes(prepared.resident.total)} are parameters, buffers, inputs and optimizer state"
    around = whole.total_bytes - whole.allocated_bytes
    if whole.optimizer_step_bytes > whole.forward_backward_bytes:
        resident += ", and it is the optimizer's step that takes most"
    return resident + (
        f", and {format_bytes(around)} are the context, libraries and what the allocator reserves"
        if around
        else ""
    )
