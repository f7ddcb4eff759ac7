"""A process that did nothing else yet: random generators are left alone from the first import on, and the
garbage collector goes through nothing while the planner is imported."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc
import random
import sys

import numpy
import torch
from torch import nn


class WhileCollecting:
    # finds no module, and notes which are imported while the garbage collector is on

    found = []

    def find_spec(self, name, path=None, target=None):
        if gc.isenabled() and name.startswith(("planner.", "solvers.")):
            self.found.append(name)

import planner
sys.meta_path.insert(0, WhileCollecting())
model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)), torch.randn(4, 8)
random.seed(0)

def states():
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()

before = states()
{use}
assert states() == before
assert "planner.runtime.install" in sys.modules
assert not WhileCollecting.found, WhileCollecting.found
"""
USES = {
    "a plan, shown and run": (
        "plan = planner.plan(model, (x,), budget='min')\nstr(plan)\nplan.apply(model)(x).sum().backward()"
    ),
    "the lazy step": (
        "step = planner.step(lambda model, x: model(x).sum(), budget='min')\nstep(model, x).backward()"
    ),
}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "use", [pytest.param(use, marks=pytest.mark.heavy) if i else use for i, use in enumerate(USES)]
)
def test_a_fresh_process_draws_what_it_draws_without_a_plan(use: str) -> None:
    program = PROGRAM.format(use=USES[use])
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
