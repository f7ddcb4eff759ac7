"""A small model, planned once for all tests that show a plan, with the problem that was solved."""

from dataclasses import dataclass
from functools import cache

import pytest

from planner.planning import make_plan
from planner.problem.build import Problem
from planner.user_plan import Plan
from solvers.model.arrays import Schedule
from tests.small import small_gpt


@dataclass(frozen=True)
class Planned:
    plan: Plan
    problem: Problem
    schedule: Schedule


@cache
def planned_gpt() -> Planned:
    """A GPT of four layers at half its memory; what was solved is caught on its way into the plan."""
    import planner

    caught = []
    model, args, kwargs = small_gpt(layers=4)
    with pytest.MonkeyPatch.context() as patch:
        original = make_plan.graph_records

        def catch(captured, problem, solution):  # type: ignore[no-untyped-def]
            caught.append((problem, solution.schedule))
            return original(captured, problem, solution)

        patch.setattr(make_plan, "graph_records", catch)
        plan = planner.plan(model, args=args, kwargs=kwargs, budget="50%", solver="sqrt_n")
    problem, schedule = caught[-1]
    return Planned(plan, problem, schedule)
