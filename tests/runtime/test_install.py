"""Modules with a plan: applied, removed, copied, pickled, and called in ways that were not planned."""

import copy
import gc
import io
import pickle
import warnings

import pytest
import torch
import torch.nn as nn

import planner
from planner import PlanWarning
from planner._torch import modules
from planner.choices import Encodings
from planner.runtime.install import PlannedCall, installed_plan
from planner.verification.measure import measure_peak
from tests.installed import apply_plan, assert_equal, gpt, gradients_of, plan_for
from tests.side_by_side import Layers, counting_runs, layers, no_plan_warnings
from tests.small import (
    both_loss,
    classifier,
    graph_break_model,
    layers_with_graph_breaks,
    logits_loss,
)

pytestmark = pytest.mark.heavy


def test_it_is_the_same_object_with_the_same_state() -> None:
    model, plan = gpt()[0], plan_for()
    keys, kind = list(model.state_dict()), type(model)
    planned = plan.apply(model)
    assert planned is model
    assert type(planned) is kind
    assert list(planned.state_dict()) == keys
    assert installed_plan(model) is plan


@pytest.mark.parametrize("encodings", ["auto", "none"])  # masks of dropout are kept as bits, or drawn again
def test_the_plan_is_really_run(encodings: Encodings) -> None:
    model, args, kwargs = gpt()
    expected = gradients_of(model, args)
    drew_until = torch.get_rng_state()
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n", encodings=encodings)
    graph = plan.graphs[0]
    drawn = [i for i in graph.recomputed if graph.ops[i].name == "planner.draw_mask.default"]
    assert drawn
    assert set(drawn) == set(graph.packed) if encodings == "auto" else not graph.packed
    plan.apply(model)
    gradients_of(model, args)
    model.zero_grad(set_to_none=True)
    peak = measure_peak(lambda: _gradients_only(model, args), "cpu").peak_bytes
    assert peak == plan.predicted.dynamic_peak_bytes < plan.no_recompute.dynamic_peak_bytes
    assert_equal(gradients_of(model, args), expected)
    assert torch.equal(torch.get_rng_state(), drew_until)


def _gradients_only(model: nn.Module, args: tuple) -> torch.Tensor:  # type: ignore[type-arg]
    loss: torch.Tensor = model(*args)
    loss.backward()
    return loss


def test_remove_undoes_apply() -> None:
    model, _, _ = apply_plan()
    assert planner.remove(model) is model
    assert installed_plan(model) is None
    assert model._compiled_call_impl is None
    assert planner.remove(model) is model  # nothing to remove is no error


def _fails(_call: PlannedCall) -> None:
    raise planner.PlannerError("no file can be made there")


@pytest.mark.graphs
def test_a_plan_that_cannot_be_put_in_leaves_the_one_before_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, _ = layers(lambda: Layers(1))
    plan = planner.plan(model, args, budget="200%", solver="none", backend="graph", regions=["layers.*"])
    plan.apply(model)
    model(*args).backward()
    regions = [modules.installed_call(part) for part in model.layers]
    assert None not in regions
    monkeypatch.setattr(PlannedCall, "_set_up", _fails)
    with pytest.raises(planner.PlannerError, match="no file"):
        plan.apply(model)
    assert installed_plan(model) is plan
    assert [modules.installed_call(part) for part in model.layers] == regions


@pytest.mark.graphs
def test_a_plan_that_cannot_be_put_in_was_replaced_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, _ = layers(lambda: Layers(1))
    plan = planner.plan(model, args, budget="200%", solver="none", backend="graph")
    model.compile(backend="eager")
    monkeypatch.setattr(PlannedCall, "_set_up", _fails)
    with warnings.catch_warnings(record=True) as caught:
        with pytest.raises(planner.PlannerError, match="no file") as raised:
            plan.apply(model)
        raised.value.__traceback__ = None
        del raised
        gc.collect()
    assert not [w for w in caught if w.category is PlanWarning]


def test_a_compiled_call_of_the_users_comes_back() -> None:
    model, plan = gpt()[0], plan_for()
    model.compile(backend="eager")
    theirs = model._compiled_call_impl
    plan.apply(model)
    plan.apply(model)  # twice does not nest
    assert isinstance(model._compiled_call_impl, PlannedCall)
    assert planner.remove(model)._compiled_call_impl is theirs


def test_eval_no_grad_and_inference_mode_run_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, _ = apply_plan()
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


def test_copies_and_pickles_train_by_the_plan() -> None:
    model, args, plan = apply_plan(layers)
    expected = gradients_of(model, args)
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
        assert_equal(gradients_of(other, args), expected)
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
    assert_equal(gradients_of(model, args), expected)


@pytest.mark.parametrize("lazily", [pytest.param(False, marks=pytest.mark.heavy), True])
def test_shallow_copies_train_by_the_plan(lazily: bool) -> None:
    model, args, _ = layers()
    expected = gradients_of(model, args)
    if lazily:
        planner.auto_checkpoint(model, budget="min", solver="sqrt_n")
    else:
        plan_for(layers).apply(model)
    other = copy.copy(model)
    with counting_runs() as runs, no_plan_warnings():
        for each in (other, model, copy.copy(other), copy.deepcopy(other)):
            assert_equal(gradients_of(each, args), expected)
            assert installed_plan(each) is not None
    assert runs.backward == 4
    planner.remove(model)
    assert installed_plan(other) is not None


def test_shallow_copies_of_graphs_train_by_the_plan() -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)))
    planner.plan(model, args=(torch.ones(4, 8),), budget="150%", loss=torch.sum).apply(model)
    assert installed_plan(copy.copy(model)) is not None


def _clone(model: nn.Module) -> nn.Module:
    """A copy of ``__dict__`` with parameters of its own, as ``DataParallel`` and other libraries make it."""
    clone: nn.Module = model._replicate_for_data_parallel()  # type: ignore[operator]
    clone._parameters = {
        n: None if p is None else nn.Parameter(p.detach() + 1) for n, p in model._parameters.items()
    }
    clone._modules = {n: None if m is None else _clone(m) for n, m in model._modules.items()}
    return clone


@pytest.mark.parametrize(("regions", "ran"), [(None, True), ("auto", False)])
def test_clones_run_their_own_weights(ran: bool, regions: str | None) -> None:
    model, args, _ = layers()
    expected = gradients_of(_clone(copy.deepcopy(model)), args)
    planner.plan(model, args, budget="min", solver="sqrt_n", regions=regions).apply(model)
    if ran:
        gradients_of(model, args)
    clone = _clone(model)
    with pytest.warns(PlanWarning, match=r"runs as it is, without the plan.*DistributedDataParallel"):
        found = gradients_of(clone, args)
    assert_equal(found, expected)
    with no_plan_warnings():
        model(*args).backward()


def test_copies_of_what_is_not_planned_are_not_either() -> None:
    model, args, plan = apply_plan(layers)
    planner.remove(model)
    assert installed_plan(copy.copy(model)) is None
    assert planner.verify(model, args, plan=plan, repeats=0).ok
    assert installed_plan(copy.deepcopy(model)) is None
    assert installed_plan(pickle.loads(pickle.dumps(model))) is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("planner.planfile.plan.SCHEMA_VERSION", 10**6, "schema_version"),
        (
            "planner.runtime.install.graphs_are_off",
            lambda: "graphs are for another PyTorch",
            "another PyTorch",
        ),
    ],
)
def test_a_model_is_unpickled_even_if_its_plan_cannot_be_used(
    name: str, value: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args, _ = apply_plan(layers)
    expected = gradients_of(model, args)
    text = pickle.dumps(model)
    monkeypatch.setattr(name, value)
    with pytest.warns(PlanWarning, match=said):
        other = pickle.loads(text)
    assert installed_plan(other) is None
    assert_equal(gradients_of(other, args), expected)


def test_planning_what_is_planned_gives_the_same_plan() -> None:
    model, args, plan = apply_plan(layers)
    again = planner.plan(model, args, budget="min", solver="sqrt_n")
    assert again.graphs == plan.graphs
    assert again.baseline.dynamic_peak_bytes == plan.baseline.dynamic_peak_bytes


def test_hooks_on_the_outside_run() -> None:
    model, args, _ = apply_plan()
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.register_forward_hook(lambda *_: seen.append("after"))
    model(*args).backward()
    assert seen == ["before", "after"]


def test_another_batch_size_runs_the_same_plan() -> None:
    model, args, plan = apply_plan()
    smaller, larger = gpt(2)[1], gpt(8)[1]
    reference, _, _ = gpt()
    assert_equal(gradients_of(model, args), gradients_of(reference, args))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        assert_equal(gradients_of(model, smaller), gradients_of(reference, smaller))
    model.zero_grad(set_to_none=True)
    few = measure_peak(lambda: _gradients_only(model, smaller), "cpu").peak_bytes
    assert few < plan.predicted.dynamic_peak_bytes
    with pytest.warns(PlanWarning, match="larger than those that were planned"):
        assert_equal(gradients_of(model, larger), gradients_of(reference, larger))
    assert_equal(gradients_of(model, args), gradients_of(reference, args))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: nn.Linear(2, 2), "is for a tests.zoo.GPT, this is a torch.nn.modules.linear.Linear"),
        (
            lambda: type(gpt()[0])(words=60, width=32, heads=2, layers=2, context=32),
            "parameters or buffers",
        ),
        (lambda: "a model", "nn.Module, not to str"),
    ],
)
def test_another_model_is_refused_and_left_alone(other, words: str) -> None:  # type: ignore[no-untyped-def]
    plan = plan_for()
    wrong = other()
    with pytest.raises(planner.PlanMismatch, match=words):
        plan.apply(wrong)
    assert not isinstance(wrong, nn.Module) or wrong._compiled_call_impl is None


def test_a_plan_applies_to_another_instance_and_from_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model, args, plan = apply_plan()
    plan.save(tmp_path / "plan.json")
    loaded = planner.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    other, _, _ = gpt()
    loaded.apply(other)
    assert_equal(gradients_of(other, args), gradients_of(model, args))


def test_a_plan_made_in_another_process_applies(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import subprocess
    import sys

    code = (
        "import planner; from tests.installed import gpt; m, a, k = gpt();"
        f"planner.plan(m, a, k, budget='min', solver='sqrt_n').save({str(tmp_path / 'plan.json')!r});"
        "import sys; assert 'torch._inductor.compile_fx' not in sys.modules"  # which takes a second
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    model, args, kwargs = gpt()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        report = planner.verify(
            model, args, kwargs, plan=planner.Plan.load(tmp_path / "plan.json"), repeats=0
        )
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


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
    gradients_of(model, args)
    model.deep = False
    with pytest.warns(PlanWarning, match="has not seen"):
        found = gradients_of(model, args)
    assert found[2] is None
    assert_equal(found, gradients_of(planner.remove(model), args))


@pytest.mark.graphs
def test_two_graphs_run_by_their_plans() -> None:
    model, args, plan = apply_plan(graph_break_model)
    assert plan.coverage == "several-graphs"
    report = planner.verify(model, args, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


@pytest.mark.graphs
def test_layers_of_the_same_code_with_a_graph_break_in_each() -> None:
    model, args, kwargs = layers_with_graph_breaks()
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
    assert plan.coverage == "several-graphs"
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


@pytest.mark.graphs
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
