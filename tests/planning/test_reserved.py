"""What the allocator of a GPU reserves for a plan, and budgets that hold for it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import planner
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.training_loop import Allocations, TrainingLoop, reservation, run
from planner.costs.devices import find_device
from planner.planfile.budget import Budget
from planner.planning.encodings import Solved
from planner.planning.options import PlanOptions
from planner.planning.prepare import prepare
from planner.planning.prepared import Prepared
from planner.planning.solve import plan_prepared, room_bytes
from planner.planning.solve_many import _monotone, solve_many
from planner.planning.within_budget import within_budget
from planner.problem.allocations import planned_allocations
from planner.progress import no_report
from planner.training_step.step import Step
from planner.user_plan import Plan
from solvers.model.constraints import Constraints
from solvers.model.graph import Graph
from solvers.model.schedule import simulate
from solvers.model.solution import Solution, Status
from tests.graphs import graphs

MIB = 1 << 20


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    """A step of some tens of MiB, for a GPU without a context."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    args, kwargs = (torch.randn(30_000, 64),), {}
    gpu = replace(find_device("V100-32GB"), context_bytes=0, library_bytes=2 * MIB)
    return prepare(
        model,
        Step(args, kwargs, loss=mean_square),
        PlanOptions(optimizer="AdamW", device=gpu, solver="sqrt_n", time_limit=600),
    )


def peak_of(allocations: Allocations) -> int:
    live = most = 0
    for step, block in allocations.order:
        if block == len(allocations.bytes):
            most = max(most, live + int(allocations.workspace[step]))
            continue
        live += int(allocations.bytes[block if block >= 0 else ~block]) * (1 if block >= 0 else -1)
        most = max(most, live)
    return most


@settings(deadline=None, max_examples=60)
@given(graphs(most=14))
def test_the_sequence_of_a_schedule_peaks_where_its_simulation_does(graph: Graph) -> None:
    allocations = planned_allocations(graph, graph.base_schedule)
    assert peak_of(allocations) == simulate(graph, graph.base_schedule).peak_bytes


def test_the_sequence_of_the_unplanned_step_peaks_as_it_does(prepared: Prepared) -> None:
    eager = prepared.problem.eager
    assert peak_of(eager.allocations) == eager.peak_bytes
    assert 0 < eager.allocations.backward_from < len(eager.allocations.workspace)
    assert sum(prepared.footprint.tensors) == prepared.resident.total - prepared.resident.optimizer_bytes


def test_the_loop_allocates_what_the_whole_step_counts(prepared: Prepared) -> None:
    whole = prepared.baseline_whole_step
    loop = prepared.footprint.loop(prepared.problem.eager.allocations)
    found = reservation(loop)
    # Blocks that are a little too large and not split count as allocated: a MiB each at most.
    more = found.allocated_bytes - whole.allocated_bytes - whole.library_bytes
    assert 0 <= more < 0.2 * whole.allocated_bytes
    assert whole.reserved_bytes == found.reserved_bytes >= found.allocated_bytes
    assert whole.expandable_reserved_bytes is not None
    assert whole.expandable_reserved_bytes >= whole.allocated_bytes + whole.library_bytes


def test_the_loop_runs_in_order_and_ends_with_what_stays(prepared: Prepared) -> None:
    allocator = CachingAllocator()
    loop = prepared.footprint.loop(prepared.problem.eager.allocations)
    phases = [moment.phase for moment in run(loop, allocator)]
    order = [phase for i, phase in enumerate(phases) if i == 0 or phases[i - 1] != phase]
    step = ["forward", "backward", "optimizer", "zero_grad"]
    assert order == ["resident", "libraries", "forward", "libraries", *step[1:], *step]
    assert allocator.requested_bytes == prepared.resident.total + 2 * MIB


def test_a_budget_in_bytes_holds_for_what_is_reserved(prepared: Prepared) -> None:
    free = prepared.baseline_whole_step
    least = plan_prepared(prepared, "min").whole_step
    assert least is not None
    budget = (free.total_bytes + least.total_bytes) // 2
    plan = plan_prepared(prepared, budget)
    whole = plan.whole_step
    assert whole is not None
    assert whole.total_bytes <= budget
    assert whole.allocated_bytes < whole.reserved_bytes < free.reserved_bytes
    with pytest.raises(planner.InfeasibleBudget, match="what the allocator reserves") as error:
        plan_prepared(prepared, least.total_bytes // 2)
    again = plan_prepared(prepared, error.value.minimum_bytes)
    assert again.whole_step is not None
    assert again.whole_step.total_bytes <= error.value.minimum_bytes


def test_a_percentage_bounds_what_is_allocated(prepared: Prepared) -> None:
    plan = plan_prepared(prepared, "70%")
    whole = plan.whole_step
    assert whole is not None
    assert whole.allocated_bytes <= 0.7 * prepared.baseline_whole_step.allocated_bytes
    assert plan.target.budget_bytes is not None
    assert whole.total_bytes <= plan.target.budget_bytes
    shown = Plan.of(plan).summary()
    assert "reserved, expandable segments" in shown
    assert Plan.loads(plan.dumps()).whole_step == whole


def test_a_plan_that_runs_as_written_has_its_own_bytes_for_a_percentage() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))), torch.randn(600, 1024)
    given = {"loss": mean_square, "device": "A100-80GB", "accumulate": True, "backend": "eager"}
    plan = planner.plan(model, (x,), budget="100%", **given)  # type: ignore[arg-type]
    assert plan.as_written
    assert plan.whole_step is not None
    assert plan.target.budget_bytes == plan.whole_step.total_bytes


def test_a_schedule_for_a_percentage_is_no_answer_to_bytes_that_it_does_not_hold(prepared: Prepared) -> None:
    def solved(budget: str) -> Solved:
        (found,) = solve_many(
            prepared,
            [prepared.budget(budget)],
            constraints=lambda graph: Constraints(),
            known=(),
            time_limit=5,
            progress=no_report,
        )
        return found

    def total(found: Solved) -> int:
        return replace(prepared, problem=found.problem).whole_step(found.solution.schedule).total_bytes

    share, least = solved("60%"), solved("min")
    budgets = [prepared.budget(b) for b in (total(least), "60%", total(share) - MIB)]
    rooms = [room_bytes(budget, prepared) for budget in budgets]
    assert share.solution.peak_bytes <= (rooms[2] or 0)
    refused = replace(share, solution=share.solution.infeasible())
    answers = _monotone(prepared, budgets, [least, share, refused], rooms)
    assert answers[:2] == [least, share]
    assert answers[2].solution.feasible
    assert total(answers[2]) == total(least)


def test_on_the_cpu_nothing_is_reserved() -> None:
    step = prepare(
        nn.Linear(8, 8), Step((torch.randn(4, 8),), {}, loss=mean_square), PlanOptions(solver="none")
    )
    plan = Plan.of(plan_prepared(step, "200%"))
    assert plan.whole_step is not None
    assert plan.whole_step.fragmentation_bytes == 0
    assert plan.whole_step.expandable_fragmentation_bytes is None
    assert "reserved" not in plan.summary()


def solution(peak: int, feasible: bool = True) -> Solution:
    status = Status.FEASIBLE if feasible else Status.INFEASIBLE
    return Solution("fake", status, np.array([peak], dtype=np.int64), peak, 1e3 / peak, 0.0)


def searched(
    reserves: dict[int, int], budget: int, fast_from: int = 0, enough_from: int = 10**9
) -> tuple[Solution, list[int]]:
    """Ask for less and less of a solver that reaches some peaks, each of which reserves something."""
    asked = []

    def solve(room: int, seconds: float) -> Solution:
        asked.append(room)
        below = [peak for peak in reserves if peak <= room]
        return solution(max(below)) if below else solution(min(reserves), feasible=False)

    first = solve(budget, 1.0)
    found = within_budget(
        first,
        budget,
        lambda s: reserves[int(s[0])],
        solve,
        time_limit=10,
        too_slow=lambda found: found.peak_bytes < fast_from,
        enough=lambda found: found.peak_bytes >= enough_from,
    )
    return found, asked[1:]


def test_where_the_first_schedule_fits_no_other_is_asked_for() -> None:
    found, asked = searched({90: 99, 50: 60}, 100)
    assert (found.peak_bytes, asked) == (90, [])


def test_what_reserves_too_much_is_planned_for_less() -> None:
    found, asked = searched({1000: 1080, 915: 1010, 900: 990, 500: 600}, 1000)
    assert found.feasible
    assert found.peak_bytes == 900
    assert asked == [920, 905, 960, 980]  # the last two see whether more fits between 915 and 1000


def test_a_solver_that_takes_all_its_time_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine: the second answer is still over by a little, and the least is far below."""
    now, reserves = [0.0], {1000: 1080, 915: 1010, 900: 990, 500: 600}
    monkeypatch.setattr("planner.planning.within_budget.time.perf_counter", lambda: now[0])

    def solve(room: int, seconds: float) -> Solution:
        now[0] += 1.1 * seconds  # with what judging the answer takes
        return solution(max((peak for peak in reserves if peak <= room), default=500))

    found = within_budget(solution(1000), 1000, lambda s: reserves[int(s[0])], solve, time_limit=60)
    assert found.peak_bytes == 900


def test_of_schedules_of_nearly_the_same_time_the_one_that_takes_less_is_chosen() -> None:
    reserves = {10_000: 10_800, 9_100: 9_999, 9_099: 9_500}
    answers = iter([9_100, 9_099])
    found = within_budget(
        solution(10_000),
        10_000,
        lambda schedule: reserves[int(schedule[0])],
        lambda _room, _seconds: solution(next(answers, 10_000)),
        time_limit=10,
    )
    assert found.feasible
    assert found.peak_bytes == 9_099


def test_the_least_is_tried_though_its_peak_is_over_the_allowance() -> None:
    found, _ = searched({1000: 1500, 700: 990}, 1000)
    assert found.feasible
    assert found.peak_bytes == 700


def test_a_bound_is_of_what_the_whole_budget_allows() -> None:
    """What is proven for a smaller allowance says nothing of schedules that reserve less."""
    reserves = {1000: 1080, 900: 990}

    def solve(room: int, _: float) -> Solution:
        found = max(peak for peak in reserves if peak <= room)
        return replace(solution(found), status=Status.OPTIMAL, bound_seconds=1e3 / found)

    found = within_budget(solve(1000, 1.0), 1000, lambda s: reserves[int(s[0])], solve, time_limit=10)
    assert (found.peak_bytes, found.status, found.bound_seconds) == (900, Status.FEASIBLE, 1.0)
    assert within_budget(solve(900, 1.0), 1000, lambda s: 990, solve, time_limit=10).status == Status.OPTIMAL


def test_what_fits_is_looked_for_between_the_least_and_what_does_not() -> None:
    reserves = {1000: 1300, 850: 1100, 800: 990, 720: 1050, 700: 980}
    found, asked = searched(reserves, 1000)
    assert (found.peak_bytes, asked[0]) == (800, 700)
    found, _ = searched({**reserves, 700: 1400}, 1000)
    assert found.feasible
    assert found.peak_bytes == 800
    assert searched(reserves, 1000, enough_from=700)[1] == [700]


def test_where_nothing_fits_the_least_is_said() -> None:
    found, _ = searched({1000: 1500, 700: 1200}, 1000)
    assert not found.feasible
    assert found.peak_bytes == 700


def test_what_is_too_slow_is_not_planned_for_less() -> None:
    reserves = {1000: 1080, 915: 1010, 900: 990, 500: 600}
    found, asked = searched(reserves, 1000, fast_from=950)
    assert (found.peak_bytes, found.feasible, asked) == (915, False, [920])
    assert searched(reserves, 1000, fast_from=1001)[1] == []


def test_a_loop_of_nothing_reserves_nothing() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert reservation(TrainingLoop((), Allocations(none, none, none, none))).reserved_bytes == 0
    assert Budget(1, "1").relative is False
