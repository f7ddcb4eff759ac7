"""Inputs, buffers and biases that change between forward and backward."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import planner
from planner.cli.commands import app
from planner.errors import InputsChanged
from planner.planning.options import options_of
from planner.user_plan import Plan
from solvers.registry import SOLVERS

pytestmark = pytest.mark.heavy

Tensor = torch.Tensor


def squares(y: Tensor) -> Tensor:
    return y.square().mean()


class Reads(nn.Module):
    """Autograd saves neither the input, nor one of the buffers, nor the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(16))
        self.register_buffer("shift", torch.randn(16))
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = (x * 2 + self.shift).tanh()
        y = (y + self.bias).sigmoid()
        y = self.last(F.gelu(self.first(y)))
        return (y + x).sin().exp()


class ReadsViews(nn.Module):
    """Looks at its inputs from many sides; random numbers, statistics and a graph break on top."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last, self.gain = nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Parameter(torch.randn(16))
        self.register_buffer("scale", torch.randn(16).expand(4, 16))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first, second = x.t().split(16)
        y = (first.t() * self.scale[0]).sin() + second.t().cos()
        y = F.dropout(x[:, 16:], 0.5) * self.gain + self.norm(x[:, :16]).tanh() * y.exp()
        torch._dynamo.graph_break()
        y = y.masked_fill(mask[:, ::2], 0.0).sin()
        return (self.last(y).sin() + y).tanh()


def build() -> tuple[Reads, Tensor]:
    torch.manual_seed(0)
    return Reads(), torch.randn(32, 16)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    model, x = build()
    return {
        inputs: planner.plan(
            model,
            (x,),
            loss=squares,
            budget="min",
            inputs=inputs,  # type: ignore[arg-type]
            recompute=["aten.mul", "aten.add", "aten.tanh", "aten.sigmoid"],  # back to the inputs
        )
        for inputs in ("unchanged", "overwritten")
    }


@torch.no_grad()
def copied_over(model: Reads, x: Tensor) -> None:
    x.copy_(torch.ones_like(x))


def written_in_numpy(model: Reads, x: Tensor) -> None:
    x.numpy()[:] = 7


@torch.no_grad()
def buffer(model: Reads, x: Tensor) -> None:
    model.shift.mul_(3)


@torch.no_grad()
def bias(model: Reads, x: Tensor) -> None:
    model.bias.mul_(3)


def bias_in_numpy(model: Reads, x: Tensor) -> None:
    model.bias.detach().numpy()[:] = 7


def other_weight(model: Reads, x: Tensor) -> None:
    model.first.weight.data = model.first.weight.data * 2


def other_bias(model: Reads, x: Tensor) -> None:
    model.bias.data = model.bias.data * 2


def nothing(model: Reads, x: Tensor) -> None:
    pass


Change = Callable[[Reads, Tensor], None]
CHANGES = [nothing, copied_over, buffer, bias, written_in_numpy, bias_in_numpy, other_weight, other_bias]


def gradients(model: Reads, x: Tensor, change: Change) -> list[Tensor]:
    loss = squares(model(x))
    change(model, x)
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_overwritten_is_not_read_again(change: Change, plans: dict[str, Plan]) -> None:
    (model, x), (plain, x_plain) = build(), build()
    plans["overwritten"].apply(model)
    found, expected = gradients(model, x, change), gradients(plain, x_plain, change)
    assert len(found) == 5
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("change", [nothing, other_weight, other_bias])
def test_tensors_that_are_given_other_memory_are_no_change(change: Change, plans: dict[str, Plan]) -> None:
    (model, x), (plain, x_plain) = build(), build()
    plans["unchanged"].apply(model)
    assert all(map(torch.equal, gradients(model, x, change), gradients(plain, x_plain, change)))


@pytest.mark.parametrize(("change", "name"), [(copied_over, r"args\[0\]"), (buffer, "shift"), (bias, "bias")])
def test_the_error_names_what_changed_the_plan_and_the_remedy(
    change: Change, name: str, plans: dict[str, Plan]
) -> None:
    model, x = build()
    plans["unchanged"].apply(model)
    with pytest.raises(InputsChanged, match=rf"^{name} \(.*plan for .*Reads \(budget min\).*'overwritten'"):
        gradients(model, x, change)
    with pytest.raises(RuntimeError):  # as PyTorch's own
        gradients(model, x, change)


def test_copies_are_predicted_to_the_byte(plans: dict[str, Plan]) -> None:
    model, x = build()
    plan = plans["overwritten"]
    assert plan.predicted.dynamic_peak_bytes > plans["unchanged"].predicted.dynamic_peak_bytes
    report = planner.verify(model, (x,), plan=plan, loss=squares)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


@pytest.mark.graphs
def test_views_random_numbers_statistics_and_parts() -> None:
    torch.manual_seed(0)
    model, args = ReadsViews(), (torch.randn(4, 32), torch.rand(4, 32) > 0.5)
    plain = copy.deepcopy(model)
    names = ["aten.native_dropout", "aten.masked_fill", "aten.exp", "aten.add", "aten.cos", "aten.sin"]
    plan = planner.plan(model, args, loss=squares, budget="min", inputs="overwritten", recompute=names)
    again = {g.ops[i].name for g in plan.graphs for i in g.recomputed}
    # `exp` is written into what `masked_fill` or `add` made, and runs again with that.
    assert again >= {f"{name}.default" for name in ("planner.draw_mask", "aten.cos")}
    report = planner.verify(model, args, plan=plan, loss=squares)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    plan.apply(model)
    found = []
    for m in (model, plain):
        torch.manual_seed(1)
        x, mask = (a.clone() for a in args)
        loss = squares(m(x, mask))
        x.numpy()[:], mask.numpy()[:] = 7, True
        loss.backward()
        found.append([p.grad for p in m.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_every_solver_counts_copies(solver: str) -> None:
    model, x = build()
    options: dict[str, Any] = {"checkpoints": ["first"]} if solver == "manual" else {}
    plan = planner.plan(
        model, (x,), loss=squares, budget="min", solver=solver, inputs="overwritten", **options
    )
    plan.apply(model)
    plain, x_plain = build()
    assert all(
        map(
            torch.equal,
            gradients(model, x, written_in_numpy),
            gradients(plain, x_plain, written_in_numpy),
        )
    )


def test_files_and_copies_of_a_plan_remember(plans: dict[str, Plan], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plans["overwritten"].save(path)
    for plan in (Plan.load(path), pickle.loads(pickle.dumps(plans["overwritten"]))):
        assert options_of(plan).inputs == plan.target.inputs == "overwritten"
    assert options_of(plans["overwritten"]).loss is squares


def test_another_shape_is_planned_with_copies_too(plans: dict[str, Plan]) -> None:
    (model, _), (plain, _) = build(), build()
    plans["overwritten"].apply(model, on_new_shape="replan")
    for size in (16, 48):
        x = torch.randn(size, 16)
        found, expected = (gradients(m, x.clone(), written_in_numpy) for m in (model, plain))
        assert all(map(torch.equal, found, expected))


def test_anything_else_is_refused() -> None:
    model, x = build()
    with pytest.raises(ValueError, match="inputs='copied': expected 'unchanged' or 'overwritten'"):
        planner.plan(model, (x,), loss=squares, budget="min", inputs="copied")  # type: ignore[arg-type]


def test_the_command_line_passes_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builders = tmp_path / "builders_of_inputs.py"
    builders.write_text(
        "import torch\n"
        "def build():\n    return torch.nn.Linear(1, 1), (torch.zeros(1, 1),)\n"
        "def build_batches():\n    return torch.nn.Linear(1, 1), lambda batch: (torch.zeros(batch, 1),)\n"
    )
    given: list[str] = []

    def refuse(*_: Any, inputs: str, **__: Any) -> None:
        given.append(inputs)
        raise planner.CaptureError("enough")

    for name in ("plan", "sweep", "max_batch"):
        monkeypatch.setattr(planner, name, refuse)
    for command in (
        ["plan", f"{builders}:build", "--budget", "min"],
        ["sweep", f"{builders}:build"],
        ["max-batch", f"{builders}:build_batches", "--budget", "1GiB"],
    ):
        for option in ([], ["--inputs", "overwritten"]):
            assert CliRunner().invoke(app, [*command, *option]).exit_code == 2
    assert given == ["unchanged", "overwritten"] * 3
