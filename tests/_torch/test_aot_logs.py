"""Code of graphs is written, and settings are recommended, only where somebody reads it."""

import pytest
import torch
import torch.nn as nn
from torch._dynamo.variables import tensor as tensor_variables

import planner
from planner._torch.joint.graph_modules import graph_module


def test_code_is_written_when_it_is_asked_for() -> None:
    made = graph_module(nn.Module(), torch.fx.symbolic_trace(nn.Tanh()).graph)
    assert "_code" not in vars(made)
    assert "tanh" in made.code
    assert torch.equal(made(torch.ones(2)), torch.ones(2).tanh())


class AsksForANumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * x.abs().sum().item()


@pytest.mark.parametrize("ours", [True, False])
def test_no_setting_of_dynamo_is_recommended_for_plans(
    monkeypatch: pytest.MonkeyPatch, *, ours: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(tensor_variables.log, "warning", lambda text, *_: said.append(text))
    tensor_variables.TensorVariable._warn_capture_scalar_outputs.cache_clear()
    model, x = AsksForANumber(), torch.randn(2, 4)
    if ours:
        planner.plan(model, (x,), loss=torch.sum, budget="min").apply(model)
    else:
        model.compile(backend="eager")
    model(x).sum().backward()
    assert any("capture_scalar_outputs" in text for text in said) is not ours
