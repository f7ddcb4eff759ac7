"""``planner.step``: a function that trains, with its loss, several calls and several models."""

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner.lazy.cached import made_of
from planner.lazy.step import PlannedStep, StepError, _loss_of
from planner.verification.measure import measure_peak
from tests.side_by_side import assert_same, counting_runs, left_by, no_plan_warnings

BY: dict[str, Any] = {"budget": "min", "solver": "sqrt_n"}


def _net(width: int = 16, out: int = 8) -> nn.Module:
    layers = [nn.Linear(16, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, out)]
    return nn.Sequential(*layers).train()


def contrast(model: nn.Module, batch: dict[str, torch.Tensor], temperature: float = 0.5) -> Any:
    """Two calls of the model, a loss that needs both."""
    first, second = (F.normalize(model(batch[k]), dim=-1) for k in ("a", "b"))
    logits = first @ second.T / temperature
    return {"loss": F.cross_entropy(logits, torch.arange(len(logits))), "logits": logits.detach()}


def distil(models: dict[str, nn.Module], x: torch.Tensor, *, head: nn.Module) -> torch.Tensor:
    """A student that trains, a teacher that does not, and a head."""
    with torch.no_grad():
        wanted = models["teacher"](x)
    with torch.autocast("cpu", torch.bfloat16):
        found = models["student"](x)
    return F.mse_loss(found.float(), wanted) + head(found.float()).square().mean()


def _pairs(size: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(size, 16, generator=generator) for k in ("a", "b")}


def _loop(call: Callable[..., Any]) -> Callable[[Any], Any]:
    def loop(models: Any) -> list[float]:
        losses = []
        for i, size in enumerate((32, 16, 24)):
            for model in models:
                model.zero_grad()
            result = call(models, size, i)
            loss = result["loss"] if isinstance(result, dict) else result
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                call(models, 4, i)  # evaluation between
        return losses

    return loop


@pytest.mark.heavy
def test_two_calls_of_a_model_and_a_loss_outside(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    models = [_net(64)]
    twins = copy.deepcopy(models)
    planned: PlannedStep = planner.step(budget="min", solver="sqrt_n")(contrast)
    assert planned.plan is None
    with counting_runs() as runs, no_plan_warnings():
        ours = left_by(models, _loop(lambda m, size, i: planned(m[0], _pairs(size, i), temperature=0.3)))
    assert runs.backward == 3
    assert_same(ours, left_by(twins, _loop(lambda m, size, i: contrast(m[0], _pairs(size, i), 0.3))))
    assert "planner: contrast planned for min in " in capsys.readouterr().err
    models[0].zero_grad()
    batch = _pairs(32, 0)

    def run() -> object:
        result = planned(models[0], batch, temperature=0.3)
        result["loss"].backward()
        return result

    peak = measure_peak(run, "cpu").peak_bytes
    assert planned.plan is not None
    assert planned.plan.recomputed_operations
    assert peak == planned.plan.predicted.dynamic_peak_bytes


@pytest.mark.heavy
def test_several_models_one_of_which_does_not_train() -> None:
    torch.manual_seed(0)
    models = [_net(32), _net(64).eval().requires_grad_(False), nn.Linear(8, 4)]
    twins = copy.deepcopy(models)

    def call(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda m, size, i: function(
            {"student": m[0], "teacher": m[1]}, _pairs(size, i)["a"], head=m[2]
        )

    planned = planner.step(distil, **BY)
    with no_plan_warnings():
        ours = left_by(models, _loop(call(planned)))
    assert_same(ours, left_by(twins, _loop(call(distil))))
    for model in models:
        model.zero_grad()
    x = _pairs(32, 0)["a"]
    peak = measure_peak(
        lambda: planned({"student": models[0], "teacher": models[1]}, x, head=models[2]).backward(), "cpu"
    ).peak_bytes
    assert planned.plan is not None
    assert peak == pytest.approx(planned.plan.predicted.dynamic_peak_bytes, rel=0.005)


def test_models_in_other_places_are_another_step() -> None:
    torch.manual_seed(0)
    first, second, x = *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)), _pairs(8, 0)["a"]

    def differ(models: dict[str, nn.Module], x: torch.Tensor) -> torch.Tensor:
        return (models["ours"](x) - 2 * models["theirs"](x)).square().mean()

    def begins(model: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model[0](x).square().mean()
        return found

    for function, places in (
        (differ, ({"ours": first, "theirs": second}, {"theirs": first, "ours": second})),
        (begins, (first, [first])),
    ):
        planned = planner.step(function, budget="1GiB", backend="replay")
        for models in places:
            assert torch.equal(planned(models, x), function(models, x))


LEFT_BEHIND = torch.ones(3, requires_grad=True)


def test_an_attribute_is_no_variable_of_its_name() -> None:
    """As of ``model(batch).loss`` where the loop has left a ``loss``; what a part of it names is one."""
    planner.step(lambda net, batch: net(batch).LEFT_BEHIND, **BY)
    with pytest.raises(StepError, match="from an enclosing scope"):
        planner.step(lambda net, batch: max(net(batch), key=lambda y: (y * LEFT_BEHIND).sum()), **BY)


class _Pair(NamedTuple):
    student: nn.Module
    head: nn.Module


def test_models_arrive_as_they_are_passed() -> None:
    arrived: list[Any] = []

    def train_step(models: Any, x: torch.Tensor) -> torch.Tensor:
        arrived.append(models)
        return models[1](models[0](x)).sum()

    pair, planned = [nn.Linear(4, 4), nn.Linear(4, 1)], planner.step(train_step, **BY, costs="roofline")
    for models in (pair, _Pair(*pair)):
        arrived.clear()
        planned(models, torch.ones(2, 4))
        assert arrived
        assert all(type(found) is type(models) and found == models for found in arrived)


def test_what_is_no_step_is_refused() -> None:
    model, weight = _net(), nn.Parameter(torch.ones(3))

    def closes(batch: torch.Tensor) -> Any:
        return model(batch).sum()

    def closes_over_a_weight(net: nn.Module, batch: torch.Tensor) -> Any:
        return net(batch).sum() * weight.sum()

    def runs_backward(net: nn.Module, batch: torch.Tensor) -> Any:
        loss = net(batch).sum()
        loss.backward()
        return loss

    wrong: Any
    for wrong, text in (
        (closes, "closes uses a Sequential from an enclosing scope"),
        (closes_over_a_weight, "a tensor that requires a gradient from an enclosing scope"),
        (runs_backward, r"runs_backward calls backward\(\): return the loss"),
        (model, r"write planner\.auto_checkpoint\(model"),
        (3, "not a int"),
    ):
        with pytest.raises(StepError, match=text):
            planner.step(wrong, **BY)
    with pytest.raises(StepError, match="takes no loss="):
        planner.step(contrast, loss=lambda x: x, **BY)
    planned = planner.step(contrast, **BY)
    with pytest.raises(StepError, match="none of the arguments"):
        planned(_pairs(4, 0))
    with pytest.raises(StepError, match="inside an argument"):
        planned(model, {"a": model, "b": 1})
    with pytest.raises(planner.PlanMismatch, match="DataParallel"):
        planned(nn.DataParallel(model), _pairs(4, 0))


@pytest.mark.heavy
def test_what_returns_no_loss_is_refused() -> None:
    model = _net()
    planned = planner.step(lambda net, x: net(x), **BY)
    with pytest.raises(StepError, match=r"returned a tensor of shape \(4, 8\), expected a scalar loss"):
        planned(model, torch.randn(4, 16))


@pytest.mark.heavy
def test_a_batch_that_is_skipped_runs_as_it_is_and_the_next_is_planned() -> None:
    def skips(model: nn.Module, x: torch.Tensor, skip: bool) -> torch.Tensor | None:
        return None if skip else model(x).square().mean()

    models, twins = ([_net()], [_net()])
    twins[0].load_state_dict(models[0].state_dict())
    planned = planner.step(skips, **BY)

    def loop(step: Callable[..., Any]) -> Callable[[Any], Any]:
        def run(models: Any) -> list[float]:
            losses = []
            for i in range(5):
                losses.append(step(models[0], _pairs(32, i)["a"], i % 2 == 0))
                if losses[-1] is not None:
                    models[0].zero_grad()
                    losses[-1].backward()
            assert losses[0] is losses[2] is losses[4] is None
            return [float(loss or 0.0) for loss in losses]

        return run

    with no_plan_warnings():
        ours = left_by(models, loop(planned))
    assert planned.plan is not None
    assert_same(ours, left_by(twins, loop(skips)))


def test_a_skipped_batch_that_begins_with_gradients_leaves_them_to_the_next() -> None:
    planned = planner.step(lambda net, x, skip: None if skip else net(x).sum(), budget="1GiB")
    model, x = nn.Linear(16, 16), _pairs(8, 0)["a"]
    planned(model, x, False).backward()
    assert planned(model, x, True) is None
    planned(model, x, False).backward()
    assert planned.plan is not None
    assert planned.plan.resident.gradient_bytes == sum(p.nbytes for p in model.parameters())


CALLS = 0


def _count() -> int:
    global CALLS
    CALLS += 1
    return CALLS


def _counted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() * _count()


def test_what_a_step_counts_in_global_variables_is_what_its_calls_are() -> None:
    global CALLS
    CALLS = 0
    planned, model, x = (
        planner.step(_counted, budget="100%", solver="none"),
        nn.Linear(16, 16),
        torch.ones(2, 16),
    )
    losses = [planned(model, x).item() for _ in range(2)]
    assert planned.plan is not None
    assert CALLS == 2
    assert losses[1] == 2 * losses[0]


class _Trainer:
    def __init__(self) -> None:
        self.batches = (torch.ones(2, 16) * n for n in range(100))

    def _next(self) -> torch.Tensor:
        return next(self.batches)

    def fetching(self, model: nn.Module) -> torch.Tensor:
        return model(self._next()).square().mean()

    def given(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()


def _fetching(batches: Any, model: nn.Module) -> torch.Tensor:
    return model(next(batches)).square().mean()


@pytest.mark.parametrize("by", ["argument", "enclosing scope", "attribute"])
def test_a_step_that_fetches_its_batches_skips_none(by: str) -> None:
    trainer, model = _Trainer(), nn.Linear(16, 16)
    given: tuple[Any, ...] = (trainer.batches, model) if by == "argument" else (model,)
    fetches: Callable[..., Any] = _fetching
    if by == "attribute":
        fetches = trainer.fetching
    elif by == "enclosing scope":
        fetches = lambda model, batches=trainer.batches: _fetching(batches, model)  # noqa: E731
    planned = planner.step(fetches, budget="100%", solver="none")
    with pytest.warns(planner.PlanWarning, match="items from a generator.*as in train_step"):
        planned(*given).backward()
    assert int(next(trainer.batches)[0, 0]) == 1
    assert planned.plan is None


def test_batches_that_only_the_loop_fetches_are_no_obstacle() -> None:
    trainer, model = _Trainer(), nn.Linear(16, 16)
    planned = planner.step(trainer.given, budget="100%", solver="none")
    with no_plan_warnings():
        planned(model, next(trainer.batches)).backward()
    assert planned.plan is not None
    assert int(next(trainer.batches)[0, 0]) == 1


class _Distiller:
    """Has a model that its step uses, and one that it does not."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.loss = model, nn.MSELoss()
        self.teacher, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def _wanted(self, x: torch.Tensor) -> torch.Tensor:
        return self.teacher(x)

    def distilled(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert self.model is model
        return self.loss(model(x), self._wanted(x))


def test_models_among_the_attributes_of_an_argument_are_not_counted_and_told_of() -> None:
    model = nn.Linear(16, 16)
    planned = planner.step(_Distiller(model).distilled, budget="100%", solver="none")
    with pytest.warns(planner.PlanWarning, match=r"uses _Distiller\.teacher, whose parameters"):
        planned(model, torch.ones(2, 16)).backward()
    assert planned.plan is not None
    model.zero_grad()
    with no_plan_warnings():
        planned(model, torch.ones(2, 16)).backward()


@planner.step(**BY)
def _decorated(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 16)).mean()


def test_a_planned_step_is_pickled_as_functions_are() -> None:
    assert pickle.loads(pickle.dumps(_decorated)) is _decorated
    again = pickle.loads(pickle.dumps(planner.step(_counted, **BY)))
    assert isinstance(again, PlannedStep)
    assert again.train_step is _counted


def test_a_plan_in_a_file_is_for_what_the_step_computes() -> None:
    def first(model: nn.Module) -> torch.Tensor:
        return model(torch.ones(2, 16)).sum()

    def second(model: nn.Module) -> torch.Tensor:
        return model(torch.ones(2, 16)).exp().sum()

    second.__qualname__ = first.__qualname__
    model = nn.Linear(16, 16)
    options = [made_of(model, {"loss": _loss_of(step)})["options"] for step in (first, second, first)]
    assert options[0] == options[2] != options[1]
