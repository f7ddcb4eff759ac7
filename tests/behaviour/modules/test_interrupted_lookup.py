"""What Dynamo was looking up when it was interrupted is no tensor that the step keeps."""

import torch
import torch.nn as nn
from torch._dynamo import guards

import planner
from tests.side_by_side import no_plan_warnings


def test_it_is_forgotten_without_a_warning() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)

    def loss(output: torch.Tensor) -> torch.Tensor:
        guards._get_closure_vars()["tmp"] = output.detach()  # as a line that did not come to its end does
        return output.square().mean()

    with no_plan_warnings():
        planner.plan(model, (x,), loss=loss, budget="100%", solver="none")
    assert "tmp" not in guards._get_closure_vars()
