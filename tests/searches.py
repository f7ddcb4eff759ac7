"""Searches in little time, for tests to which it does not matter which schedule is found."""

from dataclasses import replace

import pytest


def shorten_searches(patch: pytest.MonkeyPatch) -> None:
    """Try fewer variants of schedules, and end a search at the first that is good enough."""
    from solvers import sqrt_n
    from solvers.chains import rotor
    from solvers.effort import EFFORTS

    fast = EFFORTS["fast"]
    # Distances are of the step's seconds: models of tests are so small that few schedules are nearer.
    enough = replace(fast, met=0.3, small_twice_beyond=0.3, small_programs_beyond=float("inf"))
    patch.setitem(EFFORTS, "fast", replace(enough, parts_beyond=float("inf")))
    patch.setattr(sqrt_n, "FROM_SCRATCH", 100)
    patch.setitem(rotor.improve.__kwdefaults__, "counts", (32, 10))


def plan_by_the_roofline(patch: pytest.MonkeyPatch) -> None:
    """Have plans take no measured seconds where no costs are named: these differ from run to run."""
    from planner.planning import cost_source

    patch.setattr(cost_source, "MOST_TIMED_SECONDS", -1.0)
