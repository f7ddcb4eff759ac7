"""``auto_checkpoint`` without example inputs: the first training call plans."""

import copy
import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner import environment
from planner.lazy.cached import made_of, mismatch
from planner.runtime.install import installed_plan
from planner.training_step.step import Step
from planner.verification.measure import measure_peak
from tests.side_by_side import Layers, assert_same, counting_runs, layers, left_by, no_plan_warnings
from tests.small import Classifier, logits_loss

BY: dict[str, Any] = {"budget": "min", "solver": "sqrt_n"}


def _model() -> nn.Module:
    return layers(lambda: Layers(2))[0]


def _batch(size: int = 64, seed: int = 1) -> torch.Tensor:
    return torch.randn(size, 32, generator=torch.Generator().manual_seed(seed))


def _train(model: nn.Module, steps: int = 3) -> list[float]:
    """Steps of varying size, with evaluation before, between and after."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for step in range(steps):
        with torch.no_grad():
            losses.append(model.eval()(_batch()).item())
        model.train()
        loss = model(_batch(64 - 16 * step, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.heavy
def test_the_first_training_call_plans(capsys: pytest.CaptureFixture[str]) -> None:
    model = _model()
    twin = copy.deepcopy(model)
    assert planner.auto_checkpoint(model, **BY) is model
    with torch.no_grad():
        model(_batch())
    assert installed_plan(model) is None
    assert capsys.readouterr().err == ""
    with counting_runs() as runs, no_plan_warnings():
        ours = left_by(model, _train)
    assert runs.backward == 3
    assert_same(ours, left_by(twin, _train))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("planner: Layers planned for min in ")
    assert " KiB -> " in line
    assert line.endswith(" % time")


@pytest.mark.heavy
def test_its_plan_is_the_one_that_inputs_give_and_its_peak_is_the_measured_one() -> None:
    model = _model()
    given = planner.plan(copy.deepcopy(model), _batch(), **BY)
    planner.auto_checkpoint(model, **BY)
    model(_batch()).backward()
    model.zero_grad()
    plan = installed_plan(model)
    assert plan is not None
    assert plan.dumps() == given.dumps()
    x = _batch()
    peak = measure_peak(lambda: model(x).backward(), "cpu").peak_bytes
    assert peak == pytest.approx(plan.predicted.dynamic_peak_bytes, rel=0.005)


@pytest.mark.heavy
def test_autocast_and_the_mode_are_those_of_the_call() -> None:
    model = planner.auto_checkpoint(_model().eval(), training=False, **BY)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(_batch())
    loss.backward()
    plan = installed_plan(model)
    assert plan is not None
    assert (plan.model.autocast, plan.model.training) == (["cpu:bfloat16"], False)


def test_training_in_the_other_mode_is_reported() -> None:
    model = planner.auto_checkpoint(_model().eval(), **BY)
    with pytest.warns(planner.PlanWarning, match=r"call model\.train\(\)|Call model\.train\(\)"):
        model(_batch()).backward()
    assert installed_plan(model) is None


@pytest.mark.heavy
def test_a_loss_outside_is_reported_or_planned(capsys: pytest.CaptureFixture[str]) -> None:
    for options in ({}, {"loss": logits_loss}):
        torch.manual_seed(0)
        model = planner.auto_checkpoint(Classifier(), **BY, **options)
        logits_loss(model(torch.randn(32, 16))).backward()
        line = capsys.readouterr().err
        assert ("the loss is computed outside" in line) == (not options)
        plan = installed_plan(model)
        assert plan is not None
        assert bool(plan.graphs[0].unused_outputs) == bool(options)


@pytest.mark.heavy
def test_nothing_runs_where_the_budget_cannot_be_met() -> None:
    model = planner.auto_checkpoint(_model(), budget="1KiB", solver="sqrt_n")
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(planner.InfeasibleBudget):
            model(_batch())
    assert torch.equal(torch.get_rng_state(), state)
    planner.remove(model)
    model(_batch()).backward()


@pytest.mark.heavy
def test_copies_and_pickles_are_planned_at_their_first_call_and_remove_takes_it_out() -> None:
    model = planner.auto_checkpoint(_model(), **BY)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(_batch()).backward()
        assert installed_plan(twin) is not None
    assert installed_plan(model) is None
    planner.remove(model)
    model(_batch()).backward()
    assert installed_plan(model) is None
    assert not any("planner" in name for name in vars(model))


@pytest.mark.heavy
def test_inside_other_modules_and_torch_compile() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = planner.auto_checkpoint(_model(), **BY)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * 2)

    outer = Outer()
    torch.compile(outer, backend="eager")(_batch()).backward()
    assert installed_plan(outer.inner) is not None
    model = planner.auto_checkpoint(_model(), **BY)
    torch.compile(model, backend="eager")(_batch()).backward()
    assert installed_plan(model) is not None


@pytest.mark.heavy
def test_compiled_code_around_it_is_all_that_a_process_has_compiled() -> None:
    # Dynamo must know of plans before the first of them is made: so in a process of its own.
    program = """
import torch
import planner
from planner.runtime.install import installed_plan
from tests.side_by_side import Layers

inner = planner.auto_checkpoint(Layers(2), budget="min", solver="sqrt_n")
outer = torch.nn.Sequential(torch.nn.Linear(32, 32), inner)
torch.compile(outer, backend="eager")(torch.randn(64, 32)).backward()
print(installed_plan(inner) is not None)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "True\n"
    assert "Warning" not in run.stderr


@pytest.mark.heavy
def test_verify_plans_nothing_of_its_own() -> None:
    model = planner.auto_checkpoint(_model(), **BY)
    plan = planner.plan(model, _batch(), **BY)
    assert planner.verify(model, _batch(), plan=plan, repeats=0).ok
    assert installed_plan(model) is None
    model(_batch()).backward()
    assert installed_plan(model) is not None


@pytest.mark.heavy
def test_a_plan_is_kept_in_a_file_and_used_where_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"

    def line(size: int = 64, **options: Any) -> str:
        model = planner.auto_checkpoint(_model(), cache=path, **{**BY, **options})
        model(_batch(size)).backward()
        return capsys.readouterr().err

    assert line().endswith(f"; {path}\n")
    written = path.read_bytes()
    assert line(32).startswith(f"planner: Layers trains by {path} for min: ")  # what is smaller runs by it
    assert path.read_bytes() == written
    assert "which was for another step: budget min, now 100%" in line(budget="100%", solver="none")
    path.write_text("{")
    assert "which could not be read: not valid JSON" in line()
    assert json.loads(path.read_text())["created_with"]["options"] == "solver=sqrt_n"


def test_what_a_kept_plan_is_not_for() -> None:
    model, options = _model(), {"solver": "sqrt_n"}
    plan = planner.plan(model, _batch(), **BY)
    plan = plan.model_copy(update={"created_with": {**plan.created_with, **made_of(model, options)}})

    def reason(now: nn.Module = model, size: int = 64, budget: str = "min", **other: Any) -> str:
        outputs = other.pop("outputs", "held")
        step = Step((_batch(size),), outputs=outputs, training=other.pop("training", True))
        return mismatch(plan, now, step, budget, {**options, **other})

    assert [reason(), reason(size=32), reason(budget=" MIN "), reason(optimizer="sgd")] == [""] * 4
    assert reason(size=80) == "args[0] of float32 64x32, now float32 80x32"
    assert reason(budget="80%") == "budget min, now 80%"
    assert reason(outputs="dropped") == "outputs held, now dropped"
    assert reason(training=False) == "training mode True, now False"
    assert reason(accumulate=True) == "accumulate False, now True"
    assert reason(keep=["layers.0"]) == "options solver=sqrt_n, now solver=sqrt_n keep=['layers.0']"
    assert reason(optimizer="adam").startswith("optimizer 0 bytes, and 0 in its step, now ")
    assert reason(Layers(3)) == "of other parameters or buffers"
    assert reason(nn.Linear(2, 2)) == "of a tests.side_by_side.Layers"
    assert reason(Layers(2).requires_grad_(False)).startswith("trainable 8,384 parameters in 8 tensors (")
    with torch.autocast("cpu", torch.bfloat16):
        assert reason() == "autocast [], now ['cpu:bfloat16']"
    assert reason(in_flight=4) == "in_flight None, now 4"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 99)
        assert reason() == f"threads {plan.created_with['threads']}, now 99"
    plan = plan.model_copy(update={"target": plan.target.model_copy(update={"backend": "replay"})})
    assert reason() == ""
    assert reason(backend="graph") == "backend replay, now eager"


def test_optimizers_that_keep_as_much_and_take_another_step_are_told_apart() -> None:
    model = Layers(1)
    momentum = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    kept = [made_of(model, {"optimizer": o})["optimizer"] for o in (momentum, "RMSprop", "Rprop", momentum)]
    assert len({text.partition(",")[0] for text in kept[:2]}) == 1
    assert kept[0] == kept[3] != kept[1]


def test_modules_of_alike_parameters_that_compute_something_else_are_told_apart() -> None:
    def module(*parts: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), *parts)

    def code(model: nn.Module) -> str:
        return made_of(model, {})["module code"]

    frozen = module(nn.Dropout(0.1))
    frozen[1].eval()
    models = [module(nn.GELU()), module(nn.Tanh()), module(nn.Dropout(0.1)), module(nn.Dropout(0.2)), frozen]
    models += [nn.Sequential(nn.Conv2d(2, 2, 3, stride=n)) for n in (1, 2)]
    assert len({*map(code, models)}) == len(models)
    assert code(module(nn.GELU())) == code(models[0]) == code(module(nn.GELU()).eval())
    written = ["return x * 2", "return x * 3", "return x * 2"]
    kinds = [{"forward": _function(f"def forward(self, x):\n    {line}")} for line in written]
    found = [code(module(type("Part", (nn.Module,), kind)())) for kind in kinds]
    assert found[0] == found[2] != found[1]


def _function(text: str) -> Any:
    scope: dict[str, Any] = {"__name__": __name__}
    exec(text, scope)
    return scope["forward"]


@dataclass
class _Config:
    depth: int = 2
    mode: str = "fast"


class _Set(nn.Module):
    """A module whose attributes are settings that its forward reads."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        vars(self).update(settings)


class _Run:
    """What differs from run to run, as a trainer does."""

    def __init__(self) -> None:
        self.tensor, self.at, self.me = torch.zeros(1), id(self), self


def _code(model: nn.Module) -> str:
    return made_of(model, {})["module code"]


def test_modules_with_other_settings_are_told_apart() -> None:
    def layer(**settings: Any) -> nn.Module:
        return nn.TransformerEncoderLayer(4, 2, 8, **settings)

    layers = [layer(), layer(activation="gelu"), layer(norm_first=True)]
    layers += [_Set(depth=2), _Set(depth=3), _Set(config=_Config()), _Set(config=_Config(3))]
    layers += [_Set(act=torch.relu), _Set(act=torch.tanh), _Set(act=len), _Set(act=lambda x: x + 1)]
    layers += [_Set(sizes=[3, {"a": (4, 5)}]), _Set(sizes=[3, {"a": (4, 6)}]), _Set(dtype=torch.half)]
    assert len({*map(_code, layers)}) == len(layers)
    assert _code(layer()) == _code(layers[0])
    assert _code(_Set(config=_Config())) == _code(layers[5])
    assert _code(_Set(run=_Run(), to="runs/1")) == _code(_Set(run=_Run(), to="runs/2"))


def test_code_that_a_forward_calls_by_name_or_behind_a_decorator_is_told_apart() -> None:
    def module(text: str) -> nn.Module:
        return type("Part", (nn.Module,), {"__module__": __name__, "forward": _function(text)})()

    calls = "def half(x):\n    return x / {0}\ndef forward(self, x):\n    return half(x)"
    names = "DEPTH = {0}\ndef forward(self, x):\n    return x * DEPTH"
    wrapped = (
        "import functools\ndef forward(self, x):\n    return x * {0}\n"
        "inner = forward\n@functools.wraps(inner)\ndef forward(self, *args):\n    return inner(self, *args)"
    )
    within = "def make(n):\n    return lambda self, x: x * n\nforward = make({0})"
    for text in (calls, names, wrapped, within):
        first, second, again = (_code(module(text.format(n))) for n in (2, 3, 2))
        assert first == again != second


def test_other_arguments_and_other_frozen_parameters_of_the_same_size_are_told_apart() -> None:
    def arguments(*args: Any, **kwargs: Any) -> str:
        return made_of(Layers(1), {}, Step(args, kwargs))["arguments"]

    x = torch.ones(2)
    assert arguments(x) == "none"
    assert arguments(x, depth=3, mode="a", keep=None) == "depth=3 mode='a' keep=None"
    given = [(1,), (2,), ("a",), (True,), ((2, 3),), ((2, 4),), (_Config(),), (_Config(3),), ({"n": 1},)]
    assert len({arguments(*args) for args in given}) == len(given)
    batch = ["a cat"], {"x": x, "id": 3}, ("a", "b"), [3, 4]
    assert arguments(*batch) == "none"
    frozen = [Layers(2), Layers(2)]
    for model, part in zip(frozen, (0, 1), strict=True):
        model.layers[part].requires_grad_(False)
    assert len({made_of(model, {})["trainable"] for model in frozen}) == 2


def test_all_of_the_options_that_are_given_counts() -> None:
    model = Layers(1)
    names = [f"layers.{number}" for number in range(40)]
    first, second, again = (
        made_of(model, {"keep": keep})["options"] for keep in (names, [*names[:39], "layers.50"], [*names])
    )
    assert first == again != second
    assert len(first) <= 256
    losses = [lambda x: x.sum(), lambda x: x.mean(), lambda x: sum(y.sum() for y in x), lambda x: x.sum()]
    found = [made_of(model, {"loss": loss})["options"] for loss in losses]
    assert len(set(found)) == 3
    assert found[0] == found[3]
    around = [lambda x, of=loss: of(x) * 2 for loss in losses]
    within = [partial(loss) for loss in losses]
    for held in (around, within, [_called(loss) for loss in losses]):
        found = [made_of(model, {"loss": loss})["options"] for loss in held]
        assert len(set(found)) == 3
        assert found[0] == found[3]
    by_name = [_with_default(loss) for loss in losses]
    assert len({made_of(model, {"loss": loss})["options"] for loss in by_name}) == 3
    weighted, anew, other = (partial(losses[0], weight=torch.randn(n)) for n in (2, 2, 3))
    found = [made_of(model, {"loss": loss})["options"] for loss in (weighted, anew, other)]
    assert found[0] == found[1] != found[2]


def _with_default(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def called(x: Any, *, of: Callable[[Any], Any] = loss) -> Any:
        return later if x is None else of(x)

    if not callable(loss):
        later = loss  # what a function names may not be there yet
    return called


def _called(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def called(x: Any) -> Any:
        return loss(x) if x is not None else called(x)

    return called


@pytest.mark.heavy
def test_a_kept_plan_serves_example_inputs_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    for _ in range(2):
        model = planner.auto_checkpoint(_model(), _batch(), cache=path, **BY)
        assert installed_plan(model) is not None
    assert installed_plan(model) == planner.Plan.load(path)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, planner.BudgetError, "needs a budget"),
        ({"budget": "eight"}, planner.BudgetError, "eight"),
        (
            {"budget": "min", "solvre": 1},
            TypeError,
            "argument .solvre.: did you mean solver",
        ),
        ({"budget": "min", "outputs": "lost"}, ValueError, "outputs='lost'"),
        ({"budget": "min", "cache": "/nowhere/plan.json"}, planner.PlanFileError, "no directory"),
        ({"budget": "min", "on_new_shape": "ask"}, ValueError, "on_new_shape"),
    ],
)
def test_wrong_options_are_errors_at_once(options: Any, error: type[Exception], text: str) -> None:
    model = Layers()
    with pytest.raises(error, match=text):
        planner.auto_checkpoint(model, **options)
    assert model._compiled_call_impl is None


@pytest.mark.heavy
def test_plans_are_turned_off_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planner.plan(_model(), _batch(), **BY)
    monkeypatch.setattr(environment, "_reported", set())
    monkeypatch.setenv("PLANNER", "0")
    lazily = planner.auto_checkpoint(_model(), **BY)
    given = planner.auto_checkpoint(_model(), _batch(), **BY)
    applied = plan.apply(_model())
    for model in (lazily, given, applied):
        model(_batch()).backward()
        assert installed_plan(model) is None
    assert capsys.readouterr().err.count("plans are off") == 1
    assert planner.verify(applied, _batch(), plan=plan, repeats=0).ok
    monkeypatch.setenv("PLANNER", "maybe")
    with pytest.raises(ValueError, match="PLANNER is 'maybe': expected 0"):
        plan.apply(applied)


@pytest.mark.heavy
def test_the_environment_sets_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_BUDGET", "100%")
    for options in ({}, {"budget": "min"}):
        model = planner.auto_checkpoint(_model(), solver="sqrt_n", **options)
        model(_batch()).backward()
        plan = installed_plan(model)
        assert plan is not None
        assert plan.target.budget_text == "100%"
    monkeypatch.setenv("PLANNER_BUDGET", "plenty")
    with pytest.raises(planner.BudgetError, match=r"the environment variable PLANNER_BUDGET: .*'plenty'"):
        planner.auto_checkpoint(_model(), budget="min")


def test_no_other_variables_are_read() -> None:
    """Variables of other libraries that change what is true are PyTorch's and cuDNN's; ours are these two."""
    root = Path(planner.__file__).parent
    readers = {p.name for p in root.rglob("*.py") if "os.environ" in p.read_text()}
    others = {
        "attention.py",
        "arena.py",
        "allocator_events.py",
        "hindrances.py",
        "measurement_cache.py",
        "cudnn_workspace.py",
    }
    assert readers == {"environment.py", *others}


@pytest.mark.heavy
def test_gradients_that_are_there_already_are_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    model = planner.auto_checkpoint(_model(), **BY)
    with no_plan_warnings():
        for seed in range(3):
            model(_batch(seed=seed)).backward()
    plan = installed_plan(model)
    assert plan is not None
    assert plan.resident.gradient_bytes == sum(p.nbytes for p in model.parameters())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("planned again, as gradients are there already when a step begins")


@pytest.mark.heavy
def test_a_frozen_call_with_gradients_there_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """As a generator does while a discriminator trains, whose batches may be larger."""
    model = planner.auto_checkpoint(_model(), **BY)
    with no_plan_warnings():
        model(_batch()).backward()
        model.requires_grad_(False)
        for size in (64, 96):
            assert not model(_batch(size)).requires_grad
        model.requires_grad_(True)
        model.zero_grad()
        model(_batch()).backward()
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.heavy
def test_gradients_that_an_applied_plan_is_not_for_are_reported() -> None:
    for accumulate in (False, True):
        model = _model()
        planner.plan(model, _batch(), accumulate=accumulate, **BY).apply(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                model(_batch()).backward()
        messages = [str(w.message) for w in caught if w.category is planner.PlanWarning]
        assert len(messages) == (not accumulate)
        assert all("gradients of 32.8 KiB were there already" in text for text in messages)


def test_gradients_that_its_plan_is_not_for_are_reported() -> None:
    model = planner.auto_checkpoint(_model(), accumulate=False, **BY)
    model(_batch()).backward()
    with pytest.warns(planner.PlanWarning, match=r"gradients of 32\.8 KiB were there already"):
        model(_batch()).backward()


def test_parameters_that_are_computed_are_named_with_what_plans_them() -> None:
    model = planner.auto_checkpoint(_model(), **BY)
    weights = {name: 2 * p for name, p in model.named_parameters()}
    with pytest.raises(planner.CaptureError, match=r"layers\.0\.0\.weight is not the.*planner\.step"):
        torch.func.functional_call(model, weights, (_batch(),))


@pytest.mark.heavy
def test_parametrizations_that_are_cached_around_the_call() -> None:
    def build() -> nn.Module:
        model, _, _ = layers(lambda: Layers(2))
        nn.utils.parametrizations.weight_norm(model.layers[0][0])
        return model

    def loop(model: nn.Module) -> list[torch.Tensor]:
        losses = []
        for _ in range(2):
            with nn.utils.parametrize.cached():
                losses.append(model(_batch()))
                assert nn.utils.parametrize._cache
            losses[-1].backward()
        return losses

    model = planner.auto_checkpoint(build(), **BY)
    with no_plan_warnings():
        ours = left_by(model, loop)
    assert installed_plan(model) is not None
    assert_same(ours, left_by(build(), loop))
