"""Options that are documented one by one, drawn together: a right plan that is measured as predicted, or an
error of the planner's."""

import math
from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import planner
from planner.errors import PlannerError
from tests.side_by_side import Layers, layers


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1))
                for _ in range(3)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).mean()
        return loss


class Named(Layers):
    """Returns its logits and its loss."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = self.run(x)
        return {"logits": logits, "loss": logits.square().mean()}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x.square().mean()


class Breaks(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
            torch._dynamo.graph_break()
        return x.square().mean()


_MODELS: dict[Any, tuple[int, ...]] = {
    Layers: (64, 32),
    Convolutions: (4, 4, 12, 12),
    Named: (64, 32),
    Attention: (4, 16, 32),
    Breaks: (64, 32),
}

_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "solver": st.sampled_from(
            ["auto", "sqrt_n", "chain", "lower_sets", "checkpoint_all", "none", "manual"]
        ),
        "time_limit": st.sampled_from([0, 1, 5]),
        "recompute": st.sampled_from([["aten.native_dropout"], ["layers.0"], ["aten.*"]]),
        "keep": st.sampled_from([["layers.1"], "aten.addmm"]),
        "checkpoints": st.sampled_from([["layers.*"], ["layers.0"]]),
        "inputs": st.sampled_from(["overwritten", "unchanged"]),
        "outputs": st.sampled_from(["held", "dropped"]),
        "optimizer": st.sampled_from(["adamw", torch.optim.SGD]),
        "accumulate": st.booleans(),
        "regions": st.sampled_from(["auto", ["layers.*"]]),
        "encodings": st.sampled_from(["none", "auto"]),
        "training": st.booleans(),
        "device": st.sampled_from(["cpu", "H100"]),
        "parallel": st.sampled_from([None, None, "ddp:2", "fsdp2:4"]),
    },
)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(list(_MODELS)), st.sampled_from(["60%", "80%", "min", "min@33%", "1GiB"]), _OPTIONS)
def test_options_together(kind: Any, budget: str, options: dict[str, Any]) -> None:
    model, _, _ = layers(kind)
    shape = _MODELS[kind]
    x = torch.arange(math.prod(shape)).remainder(17).sub(8).div(8).view(shape)
    try:
        plan = planner.plan(model, (x,), budget=budget, costs="roofline", **options)
    except PlannerError:
        return
    here = options.get("device") != "H100" and options.get("parallel") is None
    if here and plan.target.budget_bytes is not None:
        assert plan.predicted.peak_bytes <= plan.target.budget_bytes
    if here:
        report = planner.verify(model.train(options.get("training", True)), (x,), plan=plan, repeats=0)
        assert report.ok, report.problems
        assert report.exact
        assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
