"""What Inductor fuses in the programs of a plan, and what it computes before a call of a library."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.fx.experimental.proxy_tensor import make_fx

import planner
from planner._torch import fake
from planner._torch.inductor.fusion_names import Fusion
from planner.lowering.inductor import InductorLowering
from planner.planning.inductor import FUSIONS, emitted_model
from planner.runtime.shapes.schedule_at import schedule_at

Function = Callable[..., list[torch.Tensor]]
aten: Any = torch.ops.aten


def kernels(function: Function, fusion: Fusion = "earlier") -> list[str]:
    """What the program of a backward calls, kernels and libraries, in order."""
    mode = fake.fake_mode_with_sizes()
    with mode:
        inputs = [torch.empty(*shape) for shape in ((64, 256), (64, 32), (32, 256))]
    program, _, _ = InductorLowering({}, fusion).emitted(make_fx(function)(*inputs), "backward")
    _, _, body = program.source.partition("def call(")
    return re.findall(r"^ +(cpp_fused|extern_kernels\.\w+)", body, re.MULTILINE)


def gradients(x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Those of a layer, a product of an activation that runs again before its own gradient is read."""
    gradient = g @ weight
    again = aten.gelu.default(x)
    of_weight = g.t() @ again
    return [of_weight, aten.gelu_backward.default(gradient, x) @ weight.t()]


def test_an_activation_that_runs_again_is_computed_with_its_gradient() -> None:
    assert kernels(gradients) == ["extern_kernels.mm", "cpp_fused", "extern_kernels.mm", "extern_kernels.mm"]
    assert kernels(gradients, "in-order").count("cpp_fused") == 2


def test_what_comes_earlier_only_with_more_memory_does_so_where_the_plan_has_room() -> None:
    def function(x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        of_weight = g.t() @ aten.gelu.default(x)
        return [of_weight, (g @ weight) @ weight.t(), aten.tanh.default(x)]

    assert kernels(function, "anywhere").count("cpp_fused") == 1
    assert kernels(function, "earlier").count("cpp_fused") == 2


def test_a_gradient_that_takes_memory_of_its_own_stays_where_it_is() -> None:
    def function(x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        gradient = g @ weight
        of_weight = g.t() @ aten.gelu.default(x)
        late = gradient.t() @ gradient  # reads what the gradient of the activation would be written to
        return [of_weight, late, aten.gelu_backward.default(gradient, x) @ weight.t()]

    found = kernels(function)
    assert found.count("cpp_fused") == 2
    assert found.index("cpp_fused") < len(found) - 2 - found[::-1].index("cpp_fused")


def test_a_kernel_that_reads_what_is_made_later_stays_where_it_is() -> None:
    def function(x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        of_weight = g.t() @ aten.gelu.default(x)
        gradient = g @ weight
        return [of_weight, aten.gelu_backward.default(gradient, x) @ weight.t()]

    assert kernels(function) == [
        "cpp_fused", "extern_kernels.mm", "extern_kernels.mm", "cpp_fused", "extern_kernels.mm",
    ]  # fmt: skip


class Feeds(nn.Module):
    """Blocks of a feed-forward net."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(16, 64) for _ in range(blocks))
        self.back = nn.ModuleList(nn.Linear(64, 16) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for wide, back in zip(self.wide, self.back, strict=True):
            x = x + back(nn.functional.gelu(wide(x)))
        return x.square().mean()


@pytest.mark.heavy
def test_a_plan_takes_the_fastest_fusion_that_fits_its_budget(tmp_path: Path) -> None:
    torch.manual_seed(0)
    step = planner.prepare(Feeds().train(), torch.randn(128, 16), backend="inductor")
    plans = {budget: step.plan(budget) for budget in ("100%", "60%", "min")}
    assert plans["100%"].fusion == "anywhere"
    prepared = step._prepared
    for budget, plan in plans.items():
        prepared_again, schedule = schedule_at(plan, prepared)
        sequences = prepared_again.problem.backward_sequences(prepared.captured, schedule)
        peaks = {f: emitted_model(prepared, f).step(sequences).peak_bytes for f in FUSIONS}
        assert peaks[plan.fusion] == plan.predicted.dynamic_peak_bytes
        allowed = plan.target.budget_bytes
        if allowed is None:
            assert peaks[plan.fusion] == min(peaks.values())
        else:
            assert plan.predicted.peak_bytes <= allowed
            room = allowed - plan.resident.total
            faster = FUSIONS[: FUSIONS.index(plan.fusion)]
            assert all(peaks[fusion] > room for fusion in faster), budget
        plan.save(tmp_path / "plan.json")
        assert planner.Plan.load(tmp_path / "plan.json").fusion == plan.fusion


def test_a_plan_of_before_runs_in_order() -> None:
    torch.manual_seed(0)
    plan = planner.plan(Feeds(blocks=1).train(), torch.randn(8, 16), budget="100%", backend="inductor")
    record = json.loads(plan.model_dump_json())
    del record["fusion"]
    assert planner.Plan.model_validate(record).fusion == "in-order"


@pytest.mark.heavy
@pytest.mark.parametrize("budget", ["60%", "min"])
def test_what_runs_is_fused_as_planned(budget: str) -> None:
    torch.manual_seed(0)
    model, x = Feeds().train(), torch.randn(128, 16)
    plan = planner.plan(model, x, budget=budget, backend="inductor")
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)  # other programs than planned are told
        report = planner.verify(model, x, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
    torch.compiler.reset()
