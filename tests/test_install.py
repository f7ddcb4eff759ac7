import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner import PlanWarning
from planner.runtime.install import PlannedCall, installed_plan
from planner.user_plan import Plan
from planner.verification.measure import measure_peak
from tests.side_by_side import layers
from tests.small import (
    both_loss,
    classifier,
    graph_break_model,
    layers_with_graph_breaks,
    logits_loss,
    small_gpt,
)


def _planned(builder=small_gpt, budget="min", **options) -> tuple[nn.Module, tuple, Plan]:  # type: ignore[no-untyped-def]
    model, args, kwargs = builder()
    plan = planner.plan(model, args, kwargs, budget=budget, solver="sqrt_n", **options)
    return plan.apply(model), args, plan


def _gradients(model: nn.Module, args: tuple, seed: int = 1) -> list[torch.Tensor | None]:  # type: ignore[type-arg]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    model(*args).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def _assert_equal(left: list[torch.Tensor | None], right: list[torch.Tensor | None]) -> None:
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b)


@pytest.mark.heavy
def test_it_is_the_same_object_with_the_same_state() -> None:
    model, args, kwargs = small_gpt()
    keys, kind = list(model.state_dict()), type(model)
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
    planned = plan.apply(model)
    assert planned is model
    assert type(planned) is kind
    assert list(planned.state_dict()) == keys
    assert installed_plan(model) is plan


@pytest.mark.heavy
def test_the_plan_is_really_run() -> None:
    model, args, kwargs = small_gpt()
    expected = _gradients(model, args)
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
    assert plan.graphs[0].recomputed
    plan.apply(model)
    _gradients(model, args)
    model.zero_grad(set_to_none=True)
    peak = measure_peak(lambda: _gradients_only(model, args), "cpu").peak_bytes
    assert peak == plan.predicted.dynamic_peak_bytes < plan.no_recompute.dynamic_peak_bytes
    _assert_equal(_gradients(model, args), expected)


def _gradients_only(model: nn.Module, args: tuple) -> torch.Tensor:  # type: ignore[type-arg]
    loss: torch.Tensor = model(*args)
    loss.backward()
    return loss


@pytest.mark.heavy
def test_remove_undoes_apply() -> None:
    model, _, _ = _planned()
    assert planner.remove(model) is model
    assert installed_plan(model) is None
    assert model._compiled_call_impl is None
    assert planner.remove(model) is model  # nothing to remove is no error


@pytest.mark.heavy
def test_a_compiled_call_of_the_users_comes_back() -> None:
    model, args, kwargs = small_gpt()
    plan = planner.plan(model, args, kwargs, budget="80%", solver="sqrt_n")
    model.compile(backend="eager")
    theirs = model._compiled_call_impl
    plan.apply(model)
    plan.apply(model)  # twice does not nest
    assert isinstance(model._compiled_call_impl, PlannedCall)
    assert planner.remove(model)._compiled_call_impl is theirs


@pytest.mark.heavy
def test_eval_no_grad_and_inference_mode_run_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, _ = _planned()
    compiled: list[int] = []
    monkeypatch.setattr(model._compiled_call_impl, "_forward", lambda *_: compiled.append(1))
    with torch.no_grad():
        assert isinstance(model(*args), torch.Tensor)
    with torch.inference_mode():
        assert isinstance(model(*args), torch.Tensor)
    model.eval()
    assert model(*args).requires_grad
    assert not compiled
    model.train()
    model(*args)
    assert compiled


@pytest.mark.heavy
def test_copies_and_pickles_train_by_the_plan() -> None:
    model, args, plan = _planned(layers)
    expected = _gradients(model, args)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stored, weights_only=False),
        copy.deepcopy(copy.deepcopy(nn.Sequential(model)))[0],
    ):
        assert installed_plan(other) == plan
        _assert_equal(_gradients(other, args), expected)
        other.zero_grad(set_to_none=True)
        peak = measure_peak(lambda other=other: _gradients_only(other, args), "cpu").peak_bytes
        assert peak == plan.predicted.dynamic_peak_bytes
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        planner.remove(other)
        assert installed_plan(other) is None
        assert vars(other).keys() == vars(planner.remove(copy.deepcopy(model))).keys()
    assert installed_plan(model) is plan
    _assert_equal(_gradients(model, args), expected)


@pytest.mark.heavy
def test_copies_of_what_is_not_planned_are_not_either() -> None:
    model, args, plan = _planned(layers)
    shallow = copy.copy(model)
    assert installed_plan(shallow) is None
    assert installed_plan(copy.deepcopy(shallow)) is None
    planner.remove(model)
    assert planner.verify(model, args, plan=plan, repeats=0).ok
    assert installed_plan(copy.deepcopy(model)) is None
    assert installed_plan(pickle.loads(pickle.dumps(model))) is None


@pytest.mark.heavy
def test_a_model_is_unpickled_even_if_its_plan_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, _ = _planned(layers)
    expected = _gradients(model, args)
    text = pickle.dumps(model)
    monkeypatch.setattr("planner.planfile.plan.SCHEMA_VERSION", 10**6)
    with pytest.warns(PlanWarning, match="schema_version"):
        other = pickle.loads(text)
    assert installed_plan(other) is None
    _assert_equal(_gradients(other, args), expected)


@pytest.mark.heavy
def test_planning_what_is_planned_gives_the_same_plan() -> None:
    model, args, plan = _planned(layers)
    again = planner.plan(model, args, budget="min", solver="sqrt_n")
    assert again.graphs == plan.graphs
    assert again.baseline.dynamic_peak_bytes == plan.baseline.dynamic_peak_bytes


@pytest.mark.heavy
def test_hooks_on_the_outside_run() -> None:
    model, args, _ = _planned()
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.register_forward_hook(lambda *_: seen.append("after"))
    model(*args).backward()
    assert seen == ["before", "after"]


@pytest.mark.heavy
def test_another_batch_size_runs_the_same_plan() -> None:
    model, args, plan = _planned()
    smaller, larger = small_gpt(2)[1], small_gpt(8)[1]
    reference, _, _ = small_gpt()
    _assert_equal(_gradients(model, args), _gradients(reference, args))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        _assert_equal(_gradients(model, smaller), _gradients(reference, smaller))
    model.zero_grad(set_to_none=True)
    few = measure_peak(lambda: _gradients_only(model, smaller), "cpu").peak_bytes
    assert few < plan.predicted.dynamic_peak_bytes
    with pytest.warns(PlanWarning, match="larger than those that were planned"):
        _assert_equal(_gradients(model, larger), _gradients(reference, larger))
    _assert_equal(_gradients(model, args), _gradients(reference, args))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: nn.Linear(2, 2), "is for a tests.zoo.GPT, this is a torch.nn.modules.linear.Linear"),
        (
            lambda: type(small_gpt()[0])(words=60, width=32, heads=2, layers=4, context=32),
            "parameters or buffers",
        ),
        (lambda: "a model", "nn.Module, not to str"),
    ],
)
def test_another_model_is_refused_and_left_alone(other, words: str) -> None:  # type: ignore[no-untyped-def]
    model, args, kwargs = small_gpt()
    plan = planner.plan(model, args, kwargs, budget="80%", solver="sqrt_n")
    wrong = other()
    with pytest.raises(planner.PlanMismatch, match=words):
        plan.apply(wrong)
    assert not isinstance(wrong, nn.Module) or wrong._compiled_call_impl is None


@pytest.mark.heavy
def test_a_plan_applies_to_another_instance_and_from_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model, args, plan = _planned()
    plan.save(tmp_path / "plan.json")
    loaded = planner.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    other, _, _ = small_gpt()
    loaded.apply(other)
    _assert_equal(_gradients(other, args), _gradients(model, args))


@pytest.mark.heavy
def test_a_plan_made_in_another_process_applies(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import subprocess
    import sys

    code = (
        "import planner; from tests.small import small_gpt; m, a, k = small_gpt();"
        f"planner.plan(m, a, k, budget='min', solver='sqrt_n').save({str(tmp_path / 'plan.json')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    model, args, kwargs = small_gpt()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        report = planner.verify(
            model, args, kwargs, plan=planner.Plan.load(tmp_path / "plan.json"), repeats=0
        )
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


@pytest.mark.heavy
def test_unused_outputs_leave_no_gradient_as_in_eager() -> None:
    model, args, kwargs = classifier()
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n", loss=logits_loss)
    assert plan.graphs[0].unused_outputs == [1]
    plan.apply(model)
    output = model(*args)
    assert output["extra"].requires_grad
    logits_loss(output).backward()
    assert model.extra.weight.grad is None
    assert model.head.weight.grad is not None
    assert planner.verify(model, args, kwargs, loss=logits_loss, repeats=0).ok


def test_a_gradient_where_the_plan_expects_none_is_an_error_not_a_zero() -> None:
    model, args, kwargs = classifier()
    planner.plan(model, args, kwargs, budget="min", solver="sqrt_n", loss=logits_loss).apply(model)
    with pytest.raises(planner.PlanMismatch, match="loss="):
        both_loss(model(*args)).backward()


def test_a_path_that_was_not_planned_is_right_and_said() -> None:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.deep = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers if self.deep else self.layers[:1]:
                x = torch.tanh(layer(x))
            return x.sum()

    torch.manual_seed(0)
    model, args = Switch(), (torch.randn(4, 8),)
    planner.auto_checkpoint(model, args, budget="min", solver="sqrt_n")
    _gradients(model, args)
    model.deep = False
    with pytest.warns(PlanWarning, match="has not seen"):
        found = _gradients(model, args)
    assert found[2] is None
    _assert_equal(found, _gradients(planner.remove(model), args))


@pytest.mark.heavy
def test_two_graphs_run_by_their_plans() -> None:
    model, args, plan = _planned(graph_break_model)
    assert plan.coverage == "several-graphs"
    report = planner.verify(model, args, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


@pytest.mark.heavy
def test_layers_of_the_same_code_with_a_graph_break_in_each() -> None:
    model, args, kwargs = layers_with_graph_breaks()
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
    assert plan.coverage == "several-graphs"
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


@pytest.mark.heavy
def test_a_graph_without_anything_to_differentiate_is_no_surprise() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = (x.sign() + 1.0).cumsum(-1) > 3.0
            torch._dynamo.graph_break()
            for layer in self.layers:
                x = torch.tanh(layer(x)) * mask
            return x.sum()

    torch.manual_seed(0)
    model, args = Masked(), (torch.randn(8, 16),)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    assert plan.coverage == "one-graph"
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems


@pytest.mark.heavy
def test_a_module_called_twice_in_one_step() -> None:
    model, args, kwargs = small_gpt()
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
    twin = copy.deepcopy(model)
    plan.apply(model)
    other = small_gpt(4)[1][::-1]
    for network in (model, twin):
        torch.manual_seed(2)
        (network(*args) + network(*other)).backward()
    _assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.heavy
def test_gradients_that_are_there_count_as_resident() -> None:
    model, args, kwargs = small_gpt()
    model(*args).backward()
    plan = planner.plan(model, args, kwargs, budget="500%", solver="none")
    assert plan.resident.gradient_bytes == sum(p.nbytes for p in model.parameters())


def test_retain_graph_and_gradients_of_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 8))
    x = torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(1)
    model(x).square().sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad, None
    planner.auto_checkpoint(model, (x,), budget="min", solver="sqrt_n", loss=lambda y: y.square().sum())
    torch.manual_seed(1)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    assert torch.equal(x.grad, expected)
    loss.backward()
    assert torch.equal(x.grad, 2 * expected)


@pytest.mark.heavy
def test_frozen_and_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(30, 16)
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.layers[0].requires_grad_(False)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.words(words)
            for layer in self.layers:
                x = F.gelu(layer(x))
            return F.cross_entropy((x @ self.words.weight.T).flatten(0, 1), words.flatten())

    torch.manual_seed(0)
    model, args = Tied(), (torch.randint(0, 30, (4, 8)),)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert model.layers[0].weight.grad is None


@pytest.mark.heavy
def test_autocast_is_honoured_in_recomputation() -> None:
    model, args, kwargs = small_gpt()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
        report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
    assert plan.graphs[0].recomputed
    assert report.ok, report.problems
    assert plan.model.autocast == ["cpu:bfloat16"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.1, 0.039, 0.5])
@pytest.mark.heavy
def test_dropout_rounds_as_in_eager(probability: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(probability), nn.Tanh()) for _ in range(3)]
    model, args = nn.Sequential(*layers).to(dtype), (torch.randn(32, 16, dtype=dtype),)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems


@pytest.mark.heavy
def test_a_plan_that_was_tampered_with_cannot_change_results() -> None:
    torch.manual_seed(0)
    norm = torch.nn.utils.parametrizations.spectral_norm
    model, args = nn.Sequential(norm(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 4)), (torch.randn(8, 16),)
    plan = planner.plan(model, args, budget="500%", solver="none")
    graph = plan.graphs[0]
    power_iteration = next(i for i, op in enumerate(graph.ops) if "mv" in op.name)
    changed = graph.model_copy(update={"backward": [power_iteration, *graph.backward]})
    tampered = plan.model_copy(update={"graphs": [changed]})
    with pytest.warns(PlanWarning, match="without recomputation"):
        report = planner.verify(model, args, plan=tampered, repeats=0)
    assert report.ok, report.problems


@pytest.mark.heavy
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_interpolation_is_computed_as_in_eager(mode: str) -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
                up = F.interpolate(x, scale_factor=2, mode=mode)
                x = F.avg_pool2d(up, 2) + x
            return x

    torch.manual_seed(0)
    model, args = Up(), (torch.randn(2, 4, 12, 12),)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    assert [op for op in plan.graphs[0].ops if "upsample" in op.name]
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems


@pytest.mark.heavy
def test_buffers_that_the_forward_updates_are_not_read_again() -> None:
    torch.manual_seed(0)
    norm = torch.nn.utils.parametrizations.spectral_norm
    layers = [nn.Sequential(norm(nn.Linear(32, 32)), nn.Tanh()) for _ in range(4)]
    model, args = nn.Sequential(*layers), (torch.randn(64, 32),)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    joint_reads = [op.name for op in plan.graphs[0].ops if "mv" in op.name]
    assert joint_reads, "the power iteration was captured"
