"""Searches in little time, for tests to which it does not matter which schedule is found."""

from dataclasses import replace

import pytest


def shorten_searches(patch: pytest.MonkeyPatch) -> None:
    """Try fewer variants of schedules, and end a search at one that is good enough."""
    from solvers import sqrt_n
    from solvers.chains import rotor
    from solvers.effort import EFFORTS

    fast = replace(EFFORTS["fast"], met=5e-3, small_twice_beyond=0.1, small_programs_beyond=float("inf"))
    patch.setitem(EFFORTS, "fast", replace(fast, parts_work=500))
    patch.setattr(sqrt_n, "FROM_SCRATCH", 100)
    patch.setitem(rotor.improve.__kwdefaults__, "counts", (32, 10))
