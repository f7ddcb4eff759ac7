"""Distributions in a forward: they look at their parameters' values, until Dynamo is used in a process."""

import subprocess
import sys

import pytest

CODE = """
import torch, planner
class Noise(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return torch.distributions.Normal(y, y.abs() + 1).rsample().square().mean()
prepared = [planner.prepare(Noise(4, 4), torch.randn(4, 4))._prepared for _ in range(2)]
print([p.captured.with_data for p in prepared], [len(p.captured.graphs) for p in prepared])
"""


@pytest.mark.heavy
def test_the_first_plan_of_a_process_is_captured_as_later_ones() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, False] [1, 1]"
