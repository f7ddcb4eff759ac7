"""Random generators are left alone from the first import on, in a process that did nothing else yet."""

import subprocess
import sys

import pytest

PROGRAM = """
import random

import numpy
import torch
from torch import nn

model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)), torch.randn(4, 8)
random.seed(0)

def states():
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()

before = states()
{use}
assert states() == before
"""
USES = {
    "a plan, shown and run": (
        "import planner\n"
        "plan = planner.plan(model, (x,), budget='min')\n"
        "str(plan)\n"
        "plan.apply(model)(x).sum().backward()"
    ),
    "auto_checkpoint": (
        "import planner\nplanner.auto_checkpoint(model, budget='min')\nmodel(x).sum().backward()"
    ),
    "the lazy step": (
        "import planner\n"
        "step = planner.step(lambda model, x: model(x).sum(), budget='min')\n"
        "step(model, x).backward()"
    ),
}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "use", [pytest.param(use, marks=pytest.mark.heavy) if i else use for i, use in enumerate(USES)]
)
def test_a_fresh_process_draws_what_it_draws_without_a_plan(use: str) -> None:
    program = PROGRAM.format(use=USES[use])
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
