"""Signs of ReLU's results kept as bits: eager's gradients, the predicted peak, and a plan that says so."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner import Plan, PlanWarning
from planner._torch.execution import sign_operators
from planner._torch.execution.sign_operators import MASK_GRADIENT, MASK_GRADIENT_, PACK_SIGNS
from planner.planfile.simulated import simulated

aten = torch.ops.aten
X = torch.randn(64, 32)


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5, 8), (500, 3)], ids=str)
def test_relu_by_its_signs(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sign_operators, "_CHUNK", 64)
    value = torch.randn(shape).to(dtype)
    for special in (float("nan"), -float("nan"), -0.0, float("inf"), -float("inf"), 1e-45):
        value = torch.where(torch.rand(shape) < 0.1, torch.tensor(special, dtype=dtype), value)
    result, gradient = value.relu(), torch.randn(shape).to(dtype)
    gradient = torch.where(torch.rand(shape) < 0.2, torch.tensor(-0.0, dtype=dtype), gradient)
    signs = PACK_SIGNS(result)
    assert signs.untyped_storage().nbytes() == (result.numel() + 7) // 8
    expected = bits(aten.threshold_backward(gradient, result, 0))
    assert torch.equal(bits(MASK_GRADIENT(gradient, signs)), expected)
    written = gradient.clone()
    assert MASK_GRADIENT_(written, signs).data_ptr() == written.data_ptr()
    assert torch.equal(bits(written), expected)


def test_signs_are_packed_and_read_whatever_device_is_the_default() -> None:
    result, gradient = torch.randn(100).relu(), torch.randn(100)
    with torch.device("meta"):
        found = sign_operators.mask_gradient(gradient, sign_operators.pack_signs(result))
    assert torch.equal(found, torch.ops.aten.threshold_backward(gradient, result, 0))


def test_what_lies_otherwise_than_planned() -> None:
    result, gradient = torch.randn(2, 6, 10).relu().unbind()
    expected = aten.threshold_backward(gradient, result, 0)
    columns = gradient.t().contiguous().t()
    assert torch.equal(MASK_GRADIENT(columns, PACK_SIGNS(result)), expected)
    assert torch.equal(MASK_GRADIENT_(columns.clone(), PACK_SIGNS(result)), expected)
    with pytest.warns(PlanWarning, match="kept as bytes"):
        signs = PACK_SIGNS(result.t().contiguous().t())
    assert torch.equal(MASK_GRADIENT(gradient, signs), expected)


class Block(nn.Module):
    """A layer as in transformers: dropout, which is run again, reads what ReLU returns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.dropout(self.widen(x).relu(), 0.2, self.training))


class Mixed(nn.Module):
    """A ReLU that is not computed in place, and one of which the backward reads more than the signs."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.widen, self.narrow = Block(32), nn.Linear(32, 256), nn.Linear(256, 32)
        self.last = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.widen(self.block(x))
        x = self.narrow((wide.relu().tanh() + wide).tanh())
        return self.last(x).relu().sin()


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(32) for _ in range(4))).train()


def squares(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def planned(model: nn.Module, x: torch.Tensor = X, **options: Any) -> Plan:
    return planner.plan(model, (x,), **{"budget": "min", "solver": "sqrt_n", "loss": squares, **options})


def signs(plan: Plan) -> int:
    packed = [graph.ops[i].name for graph in plan.graphs for i in graph.packed]
    return packed.count("aten.threshold_backward.default")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(blocks())


def same_gradients(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> bool:
    found = []
    for each in (model, plain):
        torch.manual_seed(5)
        each.zero_grad(set_to_none=True)
        squares(each(x)).backward()
        found.append([*(p.grad for p in each.parameters()), torch.get_rng_state()])
    return all(a is b is None or torch.equal(a, b) for a, b in zip(*found, strict=True))


def verified(model: nn.Module, plan: Plan) -> None:
    report = planner.verify(model, (X,), plan=plan, loss=squares)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


def test_bits_and_bytes_are_as_promised(plan: Plan) -> None:
    assert signs(plan) == 4
    verified(blocks(), plan)
    # Dropout is run again from ReLU's result, which is run again for that alone.
    assert plan.recomputed_operations > 0
    without = planned(blocks(), encodings="none")
    assert signs(without) == 0
    assert plan.predicted.peak_bytes < without.predicted.peak_bytes
    assert plan.no_recompute == without.no_recompute


@pytest.mark.heavy
def test_half_precision_and_what_is_not_in_place() -> None:
    model = blocks().bfloat16()
    half = planner.plan(model, (X.bfloat16(),), budget="min", solver="sqrt_n", loss=squares)
    assert signs(half) > 0
    report = planner.verify(model, (X.bfloat16(),), plan=half, loss=squares)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == half.predicted.dynamic_peak_bytes
    torch.manual_seed(0)
    mixed = Mixed().train()
    plan = planned(mixed)
    assert signs(plan) == 2
    verified(mixed, plan)


def test_the_plan_file_says_whose_signs_are_kept(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert simulated(loaded).timeline.peak_bytes == plan.predicted.dynamic_peak_bytes
    assert simulated(loaded).timeline.seconds == pytest.approx(plan.predicted.seconds)
    assert "the signs of 4 results of ReLU" in plan.summary()
    record = json.loads(plan.dumps())
    wrong = record["graphs"][0]["packed"][-1] + 1
    record["graphs"][0]["packed"][-1] = wrong
    with pytest.raises(planner.PlanFileError, match=f"operation {wrong} is not a forward operation, nor the"):
        Plan.loads(json.dumps(record))


def test_another_batch(plan: Plan) -> None:
    model, plain = blocks(), blocks()
    plan.apply(model)
    assert same_gradients(model, plain, X)
    assert same_gradients(model, plain, torch.randn(17, 32))


@pytest.mark.heavy
def test_a_frozen_layer(plan: Plan) -> None:
    model, plain = blocks(), blocks()
    plan.apply(model)
    for each in (model, plain):
        for parameter in each[0].parameters():  # type: ignore[index]
            parameter.requires_grad_(False)
    with pytest.warns(PlanWarning, match="of the 4 operations that the plan re-runs"):
        assert same_gradients(model, plain, X)


@pytest.mark.heavy
def test_what_users_insist_on_is_not_packed() -> None:
    for insisted in ({"recompute": ["aten.relu", "aten.addmm"]}, {"keep": ["aten.relu", "aten.addmm"]}):
        assert signs(planned(blocks(), **insisted)) == 0
