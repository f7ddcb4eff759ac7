"""verify: what it compares, measures and reports."""

import copy
import random

import numpy as np
import pytest
import torch

import planner
from planner.graph.replay import batch_norm, rng
from planner.runtime.install import installed_plan
from planner.training_step.generators import GeneratorStates
from planner.training_step.python_state import PythonState
from tests.side_by_side import Layers, layers, plan_of
from tests.small import small_gpt, small_resnet


@pytest.mark.heavy
def test_a_right_plan_is_ok_and_everything_is_left_as_it_was() -> None:
    model, args, kwargs = small_resnet()
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
    model(*args).backward()
    gradients = [p.grad for p in model.parameters()]
    values = [g.clone() for g in gradients if g is not None]
    state = copy.deepcopy(model.state_dict())
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    reported: list[tuple[str, float]] = []
    report = planner.verify(
        model, args, kwargs, plan=plan, repeats=2, progress=lambda *stage: reported.append(stage)
    )
    assert report.ok, report.problems
    assert report.exact
    assert [text for text, _ in reported[-2:]] == ["timing pair 1 of 2", "timing pair 2 of 2"]
    assert len(reported) == 9
    assert [share for _, share in reported] == sorted(share for _, share in reported)
    assert len(report.overheads) == 2
    assert min(report.overheads) <= report.overhead <= max(report.overheads)
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    assert report.baseline_measured_dynamic_peak_bytes == plan.baseline.dynamic_peak_bytes
    assert report.seconds > 0
    assert report.baseline_seconds > 0
    assert installed_plan(model) is None
    assert [p.grad for p in model.parameters()] == gradients or all(
        p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)
    )
    for gradient, value in zip((g for g in gradients if g is not None), values, strict=True):
        assert torch.equal(gradient, value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert (np.random.get_state()[1] == generators[2]).all()


@pytest.mark.heavy
def test_a_dropout_mask_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs = small_gpt()
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n", encodings="none")
    assert any("draw_mask" in plan.graphs[0].ops[i].name for i in plan.graphs[0].recomputed)

    def without_replay(state, kind, index, operator, *arguments, **more):  # type: ignore[no-untyped-def]
        return operator(*arguments, **more)

    monkeypatch.setattr(rng, "run_from_state", without_replay)
    report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
    assert not report.ok
    assert not report.gradients_equal
    assert not report.rng_equal
    assert any("differs" in p for p in report.problems)


@pytest.mark.heavy
def test_a_batch_norm_that_updates_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs = small_resnet()
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
    again = batch_norm.without_statistics

    def twice(target, arguments):  # type: ignore[no-untyped-def]
        operator, rest = again(target, arguments)

        def run(*args, **kwargs):  # type: ignore[no-untyped-def]
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer.mul_(1.5)
            return operator(*args, **kwargs)

        return run, rest

    monkeypatch.setattr(batch_norm, "without_statistics", twice)
    report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
    assert not report.buffers_equal
    assert not report.ok
    assert report.gradients_equal


@pytest.mark.heavy
def test_a_peak_over_the_budget_is_found() -> None:
    model, args, kwargs = small_gpt()
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
    claimed = plan.model_copy(
        update={"target": plan.target.model_copy(update={"budget_bytes": plan.predicted.peak_bytes - 1})}
    )
    report = planner.verify(model, args, kwargs, plan=claimed, repeats=0)
    assert not report.ok
    assert "over the budget" in report.problems[0]


@pytest.mark.heavy
def test_a_peak_over_the_prediction_is_found_where_no_budget_bounds_it() -> None:
    model, args, kwargs = small_gpt()
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
    assert planner.verify(model, args, kwargs, plan=plan, repeats=0).ok
    less = int(0.9 * plan.predicted.dynamic_peak_bytes)
    predicted = plan.predicted.model_copy(update={"dynamic_peak_bytes": less})
    report = planner.verify(
        model, args, kwargs, plan=plan.model_copy(update={"predicted": predicted}), repeats=0
    )
    assert len(report.problems) == 1
    assert "over the prediction" in report.problems[0]


@pytest.mark.heavy
def test_there_must_be_a_plan_for_this_mode() -> None:
    model, args, kwargs = small_gpt()
    with pytest.raises(planner.PlanMismatch, match="needs a plan"):
        planner.verify(model, args, kwargs)
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
    with pytest.raises(planner.PlanMismatch, match="train mode"):
        planner.verify(model.eval(), args, kwargs, plan=plan)


@pytest.mark.heavy
def test_the_report_is_plain_data() -> None:
    import json

    model, args, kwargs = small_gpt()
    plan = planner.plan(model, args, kwargs, budget="80%", solver="sqrt_n")
    report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


class Noisy(Layers):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__(2)
        self.torch_generator = torch.Generator().manual_seed(3)
        self.python_generator = random.Random(3)
        self.numpy_generator = np.random.default_rng(3)
        self.older_generator = np.random.RandomState(3)

    def draw(self) -> list[float]:
        drawn = float(torch.rand((), generator=self.torch_generator)), self.python_generator.random()
        return [*drawn, float(self.numpy_generator.random()), float(self.older_generator.rand())]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.draw()) * super().run(x)


@pytest.mark.heavy
def test_generators_of_the_models_own_stand_where_they_stood() -> None:
    model, args, kwargs = layers(Noisy)
    assert isinstance(model, Noisy)
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
    report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert model.draw() == Noisy().draw()
    own = PythonState([model]).generators
    states = [GeneratorStates.now([generator]) for generator in own]
    assert len(states) == 4
    drawn = model.draw()
    for generator, then in zip(own, states, strict=True):
        assert not GeneratorStates.now([generator]).same_as(then)
        then.restore()
    assert model.draw() == drawn


@pytest.mark.heavy
def test_state_that_the_forward_replaces_or_caches_is_put_back() -> None:
    class Keeping(Layers):
        def __init__(self) -> None:
            super().__init__(2)
            self.register_buffer("average", torch.zeros(32))
            self.calls, self.cache = 0, {}

        def run(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            if len(x) not in self.cache:
                self.cache[len(x)] = torch.linspace(0, 1, len(x)).unsqueeze(1)
            for layer in self.layers:
                x = x + layer(x) * (self.average + 1) * self.cache[len(x)]
                self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
            return x / self.calls

    model, args, kwargs = layers(Keeping)
    average = model.average
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
    report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    assert model.average is average
    assert (model.calls, model.cache) == (0, {})
    assert not average.any()


class SeedsItself(Layers):
    """Draws from the operating system, so that no two steps are the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.seed()
        return super().forward(x)


@pytest.mark.heavy
def test_steps_that_are_never_the_same_are_distinguished_from_a_wrong_plan() -> None:
    model, args, _ = layers(SeedsItself)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert not report.ok
    assert any("so does that of a second step" in problem for problem in report.problems)


class Observed(Layers):
    """Gives a buffer a size in its first forward, as observers of quantisation do."""

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("seen", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.resize_(32).copy_(x.abs().amax(0))
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.heavy
def test_a_buffer_that_gets_its_size_in_the_forward_is_put_back() -> None:
    model, args, _ = layers(Observed)
    report = planner.verify(model, args, plan=plan_of(model, args), repeats=0)
    assert report.ok, report.problems
    assert model.get_buffer("seen").shape == (0,)


class Attends(torch.nn.Module):
    """Its blocks are of PyTorch's own class, whose code PyTorch captures only where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x.square().mean()


@pytest.mark.heavy
def test_regions_run_by_their_plan_in_each_of_its_steps() -> None:
    model, args, _ = layers(Attends)
    plan = plan_of(model, (args[0].view(4, 16, 32),), regions="auto", recompute=["aten.*"])
    report = planner.verify(model, (args[0].view(4, 16, 32),), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


@pytest.mark.parametrize("there", [False, True])
def test_a_plan_for_gradients_that_are_there_is_measured_with_them(there: bool) -> None:
    model, args, _ = layers(Layers)
    if there:
        model(*args).backward()
    plan = plan_of(model, args, regions="auto", accumulate=None if there else True)
    assert plan.resident.gradient_bytes > 0
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    assert report.baseline_measured_dynamic_peak_bytes == plan.baseline.dynamic_peak_bytes


class _AddsToItsBatch(torch.nn.Linear):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["hidden"] = super().forward(batch["x"]).tanh()
        return batch["hidden"].square().mean()


class _DifferentiatesItsInput(torch.nn.Linear):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(batch["x"].requires_grad_()).tanh().square().mean()


@pytest.mark.parametrize("kind", [_AddsToItsBatch, _DifferentiatesItsInput])
def test_each_step_has_inputs_that_none_has_changed(
    kind: type[torch.nn.Module], recwarn: pytest.WarningsRecorder
) -> None:
    """As in training; another step's would not be those of the plan, which warns."""
    model, batch = kind(8, 8), {"x": torch.randn(4, 8)}
    plan = planner.plan(model, (batch,), budget="min")
    assert planner.verify(model, (batch,), plan=plan, repeats=0).ok
    assert not [str(warning.message) for warning in recwarn]
    assert list(batch) == ["x"]
    assert not batch["x"].requires_grad
