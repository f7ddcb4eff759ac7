"""Searches in little time, for tests to which it does not matter which schedule is found."""

from dataclasses import replace

import pytest


def shorten_searches(patch: pytest.MonkeyPatch, *, near: bool = False) -> None:
    """Try fewer variants of schedules, and end a search at the first that is good enough.

    Args:
        patch: What undoes it.
        near: Whether only a schedule near the bound is good enough. Models of tests are so small that few
            are, and searches go on until everything is tried.
    """
    from solvers import sqrt_n
    from solvers.chains import rotor
    from solvers.effort import EFFORTS

    far = {"small_twice_beyond": 0.1, "small_programs_beyond": float("inf")}
    far |= {name.replace("small", "large"): value for name, value in far.items()}
    fast = replace(EFFORTS["fast"], met=5e-3, **far)
    enough = replace(fast, met=0.3, small_twice_beyond=0.3, large_twice_beyond=0.3, parts_beyond=float("inf"))
    patch.setitem(EFFORTS, "fast", replace(fast, parts_work=500) if near else enough)
    patch.setattr(sqrt_n, "FROM_SCRATCH", 100)
    patch.setitem(rotor.improve.__kwdefaults__, "counts", (32, 10))


def plan_by_the_roofline(patch: pytest.MonkeyPatch) -> None:
    """Have plans take no measured seconds where no costs are named: these differ from run to run."""
    from planner.planning import cost_source

    patch.setattr(cost_source, "MOST_TIMED_SECONDS", -1.0)
