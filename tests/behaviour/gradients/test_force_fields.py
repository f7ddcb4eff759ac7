"""Force fields train as without a plan: by a plan, or without one and with a word."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.runtime.install import installed_plan
from planner.verification.measure import measure_peak
from tests.force_fields import (
    Data,
    LikeMace,
    LikeMaceWithStress,
    LikeNequip,
    LikePainn,
    LikeSchnetpack,
    LikeTorchmdNet,
    batch,
    loss,
)
from tests.side_by_side import assert_same, counting_runs, no_plan_warnings

Step = Callable[[nn.Module, Data], Tensor]
Build = Callable[[], nn.Module]


def _loss_of(model: nn.Module, data: Data) -> Tensor:
    return loss(model(data))


def _left(model: nn.Module, step: Step, batches: Callable[[int], Data] = batch) -> dict[str, Any]:
    """What three steps leave, each with a batch of its own."""
    left: dict[str, Any] = {}
    for seed in range(3):
        data = batches(seed)
        model.zero_grad()
        found = step(model, data)
        found.backward()
        left[f"{seed}.loss"] = found.detach()
        left |= {f"{seed}.{n}": p.grad for n, p in model.named_parameters()}
        left |= {f"{seed}.input {n}": (t.grad, t.requires_grad)[not t.requires_grad] for n, t in data.items()}
    return left


def _two(build: Build) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = build()
    return model, copy.deepcopy(model)


@contextmanager
def _one_warning(text: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    told = [str(w.message) for w in caught if issubclass(w.category, planner.PlanWarning)]
    assert len(told) == 1, told
    assert text in told[0]
    assert "without the plan" in told[0]


def _trains_unplanned(build: Build, batches: Callable[[int], Data] = batch) -> None:
    model, twin = _two(build)
    planner.auto_checkpoint(model, **_LEAST, loss=loss)
    with _one_warning("takes gradients of its own results"):
        ours = _left(model, _loss_of, batches)
    assert_same(ours, _left(twin, _loss_of, batches))


_LEAST: Any = {"budget": "min", "solver": "sqrt_n"}
_PLANNED = [LikeNequip, LikePainn, LikeTorchmdNet]
_UNPLANNED = [LikeSchnetpack]


def test_forces_of_positions_that_a_helper_prepares_are_not_zero() -> None:
    model, twin = _two(LikeMace)
    planner.auto_checkpoint(model, **_LEAST, loss=loss)
    with no_plan_warnings():
        ours = _left(model, _loss_of)
    plan = installed_plan(model)
    assert plan is not None
    assert plan.target.backend == "replay"
    assert plan.recomputed_operations
    assert_same(ours, _left(twin, _loss_of))


@pytest.mark.graphs
def test_graphs_do_not_follow_forces_of_positions_that_a_helper_prepares() -> None:
    _trains_unplanned(LikeMace)


@pytest.mark.graphs
@pytest.mark.heavy
@pytest.mark.parametrize("build", _PLANNED)
def test_force_fields_train_by_a_plan(build: Build) -> None:
    model, twin = _two(build)
    plan = planner.plan(model, args=(batch(0),), loss=loss, **_LEAST)
    assert plan.coverage == "one-graph"
    report = planner.verify(model, (batch(0),), plan=plan, loss=loss, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    theirs = _left(twin, _loss_of)
    plan.apply(model)
    ways: list[tuple[nn.Module, Step]] = [(model, _loss_of)]
    if build is LikePainn:
        lazy, stepped = copy.deepcopy(twin), copy.deepcopy(twin)
        planner.auto_checkpoint(lazy, **_LEAST, loss=loss)
        ways += [(lazy, _loss_of), (stepped, planner.step(_loss_of, **_LEAST))]
    for trained, step in ways:
        with counting_runs() as runs, no_plan_warnings():
            ours = _left(trained, step)
        assert runs.backward in (3, 6)  # a function's step has its loss in a graph of its own
        assert_same(ours, theirs)


@pytest.mark.heavy
@pytest.mark.graphs
@pytest.mark.parametrize("build", _UNPLANNED)
def test_force_fields_that_cannot_be_planned_train_without_a_plan(build: Build) -> None:
    model, twin = _two(build)
    with pytest.raises(planner.CaptureError, match=r"takes gradients of its own results.*Change the lines"):
        planner.plan(model, args=(batch(0),), loss=loss, **_LEAST)
    _trains_unplanned(build)
    step = planner.step(_loss_of, **_LEAST)
    with _one_warning("takes gradients of its own results"):
        ours = _left(model, step)
    assert_same(ours, _left(twin, _loss_of))


@pytest.mark.parametrize(
    "build",
    [LikeMaceWithStress, *(pytest.param(b, marks=pytest.mark.heavy) for b in (LikeMace, LikeSchnetpack))],
)
def test_force_fields_that_are_no_graph_are_planned_by_replays(build: Build) -> None:
    model, twin = _two(build)
    with no_plan_warnings():
        plan = planner.plan(model, args=(batch(0),), loss=loss, backend="replay", costs="roofline", **_LEAST)
        report = planner.verify(model, (batch(0),), plan=plan, loss=loss, repeats=0)
        assert report.ok, report.problems
        assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
        assert plan.predicted.dynamic_peak_bytes < 0.8 * plan.baseline.dynamic_peak_bytes
        plan.apply(model)
        ours = _left(model, _loss_of)
    assert_same(ours, _left(twin, _loss_of))


@pytest.mark.heavy
def test_the_product_that_a_replayed_forward_differentiates_is_told_of() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            product = self.linear(x).add(1.5).prod(1).sum()
            return torch.autograd.grad(product, x, create_graph=True)[0].square().mean()

    with pytest.warns(planner.PlanWarning, match="gradients of torch.prod"):
        planner.plan(Products(), (torch.randn(4, 8),), backend="replay", costs="roofline", **_LEAST)


@pytest.mark.graphs
@pytest.mark.heavy
def test_a_number_that_data_decide_between_energy_and_forces_is_named() -> None:
    with pytest.raises(
        planner.CaptureError, match=r'int\(inputs\["molecules"\]\[-1\]\) \+ 1.*Change the lines'
    ):
        planner.plan(LikeSchnetpack(), args=(batch(0),), loss=loss, **_LEAST)


@pytest.mark.heavy
def test_the_gradient_of_an_input_that_the_forward_makes_require_one_is_predicted() -> None:
    torch.manual_seed(0)
    model, step = LikeNequip(), planner.step(_loss_of, **_LEAST)
    with no_plan_warnings():
        _left(model, step)
    model.zero_grad()
    data = batch(4)
    measured = measure_peak(lambda: step(model, data).backward(), "cpu")
    assert data["positions"].grad is not None
    assert step.plan is not None
    assert measured.peak_bytes == step.plan.predicted.dynamic_peak_bytes
    assert step.plan.resident.input_bytes == sum(t.nbytes for t in data.values())


@pytest.mark.graphs
@pytest.mark.heavy
def test_inputs_that_required_gradients_when_the_plan_was_made() -> None:
    def requiring(seed: int) -> Data:
        data = batch(seed)
        data["positions"].requires_grad_()
        return data

    model, twin = _two(LikeMace)
    planner.plan(model, args=(requiring(0),), loss=loss, **_LEAST).apply(model)
    with counting_runs() as runs, no_plan_warnings():
        ours = _left(model, _loss_of, requiring)
    assert runs.backward == 3
    assert_same(ours, _left(twin, _loss_of, requiring))
    with _one_warning("takes gradients of its own results"):
        ours = _left(model, _loss_of)
    assert_same(ours, _left(twin, _loss_of))


# ---- where a forward lets its inputs require gradients, and where it differentiates ----------------------


class _Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 1))

    def energy(self, vectors: Tensor) -> Tensor:
        energy: Tensor = self.net(vectors).sum()
        return energy


def _between(positions: Tensor) -> Tensor:
    return positions[::2] - positions[1::2]


def _slope(energy: Tensor, by: Tensor, **options: Any) -> Tensor:
    found = torch.autograd.grad([energy], [by], **{"create_graph": True, "allow_unused": True, **options})[0]
    return torch.zeros_like(by) if found is None else found


def _results(energy: Tensor, forces: Tensor) -> Data:
    return {"energy": energy[None], "forces": forces}


class _Prepare(nn.Module):
    def forward(self, data: Data) -> Tensor:
        data["positions"].requires_grad_()
        return _between(data["positions"])


class _Slope(nn.Module):
    def forward(self, energy: Tensor, positions: Tensor) -> Tensor:
        return _slope(energy, positions)


class BehindABreak(_Field):
    def __init__(self) -> None:
        super().__init__()
        self.slope = _Slope()

    def forward(self, data: Data) -> Data:
        positions = data["positions"].requires_grad_()
        energy = self.energy(_between(positions))
        torch._dynamo.graph_break()
        return _results(energy, self.slope(energy, positions))


class InPart(_Field):
    """One way leads through another graph, one does not."""

    def forward(self, data: Data) -> Data:
        vectors = _Prepare()(data)
        energy = self.energy(vectors) + self.energy(data["positions"].sin())
        return _results(energy, _slope(energy, data["positions"]))


class ConstantInPart(_Field):
    """What is computed before the positions require a gradient is a constant."""

    def forward(self, data: Data) -> Data:
        constant = _between(data["positions"])
        energy = self.energy(_Prepare()(data) * constant)
        return _results(energy, _slope(energy, data["positions"]))


class OnlyOnce(_Field):
    def forward(self, data: Data) -> Data:
        energy = self.energy(_Prepare()(data))
        return _results(energy, _slope(energy, data["positions"], create_graph=False, retain_graph=True))


class Backward(_Field):
    def forward(self, data: Data) -> Data:
        energy, positions = self.energy(_Prepare()(data)), data["positions"]
        energy.backward(inputs=[positions], create_graph=True)
        slope, positions.grad = positions.grad, None
        assert slope is not None
        return _results(energy, slope)


_SHAPES = [
    BehindABreak,
    InPart,
    ConstantInPart,
    OnlyOnce,
    Backward,
]


@pytest.mark.graphs
@pytest.mark.heavy
@pytest.mark.parametrize("build", _SHAPES)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_that_lead_through_several_graphs_are_those_of_eager(build: Build) -> None:
    _trains_unplanned(build)


class DataDecide(_Field):
    """Takes the way through the helper where data say so."""

    def forward(self, data: Data) -> Data:
        if data["prepared"].item():
            vectors = _Prepare()(data)
        else:
            vectors = _between(data["positions"].requires_grad_())
        energy = self.energy(vectors)
        return _results(energy, _slope(energy, data["positions"]))


@pytest.mark.graphs
@pytest.mark.heavy
def test_a_path_that_the_plan_has_not_seen_takes_no_gradient_for_none() -> None:
    def some(seed: int, prepared: bool = True) -> Data:
        return {"positions": batch(seed)["positions"], "prepared": torch.tensor(prepared)}

    model, twin = _two(DataDecide)
    planner.plan(model, args=(some(0, prepared=False),), loss=loss, **_LEAST).apply(model)
    with pytest.warns(planner.PlanWarning, match="took a path that the plan has not seen"):
        ours = _left(model, _loss_of, some)
    theirs = _left(twin, _loss_of, some)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value)


class _Unused(nn.Module):
    """One of the weights that are adapted has no influence."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Parameter(torch.ones(3, 1)), nn.Parameter(torch.ones(3, 1))

    def forward(self, data: Data) -> Data:
        weights, x = [self.used, self.idle], data["positions"]
        energy = (x @ self.used).tanh().sum()
        found = torch.autograd.grad(energy, weights, create_graph=True, allow_unused=True)
        used, idle = (w if g is None else w - 0.1 * g for w, g in zip(weights, found, strict=True))
        return _results((x @ used).square().mean(), x @ idle)


@pytest.mark.heavy
def test_a_gradient_by_a_weight_that_is_not_used_is_none_in_a_plan_too() -> None:
    model, twin = _two(_Unused)
    plan = planner.plan(model, args=(batch(0),), loss=loss, **_LEAST)
    assert plan.coverage == "one-graph"
    plan.apply(model)
    with counting_runs() as runs, no_plan_warnings():
        ours = _left(model, _loss_of)
    assert runs.backward == 3
    assert_same(ours, _left(twin, _loss_of))
