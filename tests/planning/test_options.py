"""Options of a wrong kind are refused before the long work, by name."""

import inspect
import re
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn

import planner
from planner.cli.options import StepOptions
from planner.costs.devices import DeviceError
from planner.costs.optimizer_step import OptimizerError
from planner.planning.options import OptionError, PlanKeywords, PlanOptions, StepKeywords
from planner.training_step.inputs import InputError

X = torch.randn(6, 4)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


WRONG: dict[str, tuple[Any, str]] = {
    "keep": (3, "list of names"),
    "recompute": ([nn.ReLU()], "list of names"),
    "checkpoints": (None, "list of names"),
    "attention": ("fast", "None or one of"),
    "time_limit": ("60s", "number of seconds"),
    "in_flight": (2_000_000, "1 or more, 1,000,000 at most"),
    "effort": (np.ones(2), "one of"),
    "accumulate": ("yes", "True, False or None"),
    "progress": (3, "function"),
}


@pytest.mark.parametrize("name", WRONG)
def test_options_of_plan(name: str) -> None:
    value, words = WRONG[name]
    with pytest.raises(InputError, match=f"{name}=.*{words}"):
        planner.plan(_model(), X, budget="min", loss=_loss, **{name: value})


@pytest.mark.parametrize("option", ["outputs", "inputs", "costs", "backend", "split", "solver", "attention"])
def test_values_that_cannot_be_compared_with_words(option: str) -> None:
    for value in (np.ones(2), ["graph"]):
        with pytest.raises(planner.PlannerError, match=r"expected|there is no solver"):
            planner.plan(_model(), X, budget="min", loss=_loss, **{option: value})


@pytest.mark.parametrize("seconds", [-1, float("nan"), None, True, 10**400])
def test_seconds(seconds: Any) -> None:
    with pytest.raises(InputError, match="0 or more"):
        planner.sweep(_model(), X, loss=_loss, time_limit=seconds)


@pytest.mark.parametrize("points", ["a", 2.5, 0, True])
def test_points_of_a_sweep(points: Any) -> None:
    with pytest.raises(InputError, match=r"points=.*1 or more"):
        planner.sweep(_model(), X, loss=_loss, points=points)


@pytest.mark.parametrize(("name", "value"), [("max_overhead", "29%"), ("start", "a"), ("most", 0)])
def test_options_of_max_batch(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name}=.*expected"):
        planner.max_batch(_model(), lambda batch: X[:batch], "1MiB", loss=_loss, **{name: value})


def test_repeats_of_verify_and_a_device() -> None:
    with pytest.raises(InputError, match=r"repeats='a'.*0 or more"):
        planner.verify(_model(), X, loss=_loss, repeats="a")  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"device= is a int.*A100"):
        planner.plan(_model(), X, budget="min", loss=_loss, device=3)  # type: ignore[arg-type]


def test_a_loss_that_is_none_is_refused_when_a_plan_is_applied() -> None:
    model = _model()
    plan = planner.plan(model, X, budget="100%", loss=_loss, solver="none")
    with pytest.raises(InputError, match="loss= is a int"):
        plan.apply(model, loss=3)  # type: ignore[arg-type]
    assert planner.runtime.install.installed_plan(model) is None  # type: ignore[attr-defined]


def test_an_option_is_declared_once_and_known_everywhere() -> None:
    names = {field.name for field in fields(PlanOptions)}
    assert set(PlanKeywords.__annotations__) == names
    assert {field.name for field in fields(StepOptions)} == set(StepKeywords.__annotations__) - {"training"}
    for function, known in ((planner.plan, names), (planner.sweep, set(StepKeywords.__annotations__))):
        shown = inspect.signature(function).parameters
        assert known <= set(shown)
        assert all(parameter.default is not MISSING for parameter in shown.values())
        for name in known:
            told = function.__doc__ or ""  # from which Python 3.13 takes the indentation away
            assert re.search(rf"^ +{name}: ", told, re.MULTILINE), f"{function.__name__}: {name}"


def test_an_unknown_option_is_named_with_what_was_meant() -> None:
    with pytest.raises(InputError, match=r"plan\(\) got an unexpected keyword argument 'solvr'.*solver="):
        planner.plan(_model(), X, budget="min", solvr="sqrt_n")  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"sweep\(\) got an unexpected keyword argument 'solver'"):
        planner.sweep(_model(), X, solver="sqrt_n")  # type: ignore[call-arg]


def test_a_warning_names_the_users_line() -> None:
    with pytest.warns(planner.PlanWarning, match="evaluation mode") as caught:
        planner.plan(_model().eval(), X, budget="min", loss=_loss, solver="sqrt_n")
    ours = [warning for warning in caught if issubclass(warning.category, planner.PlanWarning)]
    assert [warning.filename for warning in ours] == [__file__]


@pytest.mark.parametrize("optimizer", ["adamwx", 3, torch.nn.Linear])
def test_an_optimizer_that_there_is_not_is_refused_before_the_long_work(optimizer: Any) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(OptimizerError, match=r"optimizer"):
        planner.auto_checkpoint(model, budget="8GiB", optimizer=optimizer)


def test_a_file_without_a_name_is_refused() -> None:
    with pytest.raises(planner.PlanFileError, match="name of the file to write is empty"):
        planner.auto_checkpoint(torch.nn.Linear(2, 2), budget="8GiB", cache="")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "cudagraphs"}, "expected unproven=True"),
        ({"backend": "inductor", "device": "H100"}, "expected unproven=True for H100"),
        ({"backend": "cudagraphs", "unproven": 1}, "unproven=1: expected True or False"),
        ({"backend": "cudagraphs", "unproven": True, "parallel": "ddp:2"}, "parallel=: expected none"),
        (
            {
                "backend": "inductor",
                "device": "H100",
                "unproven": True,
                "backend_options": {"max_autotune": True},
            },
            "expected none of max_autotune",
        ),
    ],
)
def test_what_has_not_run_on_a_gpu_is_asked_for_on_purpose(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        planner.plan(torch.nn.Linear(2, 2), (torch.ones(2, 2),), budget="min", **options)
