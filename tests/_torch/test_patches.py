"""Functions and methods that users exchange, before planning or after, are the ones that run."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from tests.side_by_side import assert_same, counting_runs, left_by, no_plan_warnings, plan_of


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.linear(x)))


class Patched(nn.Module):
    """Calls PyTorch's functions and methods in all the ways there are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.block, self.last = Normalised(), nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x))
        x = F.softmax(x, -1) + F.dropout(x, 0.1, self.training) + x.sigmoid()
        x = torch.relu(x).reshape(-1, 16)
        y = self.last(self.block(self.part(self.second(x))))
        return (y + F.layer_norm(self.second(x), (8,))).square().mean()


FUNCTIONS = (
    (F, "relu"), (F, "softmax"), (F, "layer_norm"), (F, "dropout"), (F, "linear"), (F, "gelu"),
    (torch, "tanh"), (torch, "relu"), (torch, "reshape"), (torch, "add"),
    (torch.Tensor, "sigmoid"), (torch.Tensor, "reshape"),
)  # fmt: skip
METHODS = (
    (Patched, "forward"), (Patched, "part"), (Normalised, "forward"), (Normalised, "__call__"),
    (nn.LayerNorm, "forward"), (nn.LayerNorm, "__call__"), (nn.Linear, "forward"), (nn.ReLU, "forward"),
    (nn.Sequential, "forward"), (nn.Module, "_call_impl"), (torch, "layer_norm"),
)  # fmt: skip


def wrapped(owner: Any, name: str) -> Callable[..., Any]:
    original = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * 1.5

    return wrapper


def _built() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Patched().train()
    return model, copy.deepcopy(model), torch.randn(4, 8)


def _step(x: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    def step(network: Any) -> torch.Tensor:
        network.zero_grad()
        loss: torch.Tensor = network(x)
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.heavy
def test_wrappers_that_are_there_before_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compile(torch.sin, backend="eager")(torch.ones(()))  # Dynamo has looked for PyTorch's functions
    for owner, name in (*FUNCTIONS, (Normalised, "forward"), (Patched, "part")):
        monkeypatch.setattr(owner, name, wrapped(owner, name))
    model, twin, x = _built()
    plan_of(model, (x,)).apply(model)
    with no_plan_warnings():
        ours = left_by(model, _step(x))
    assert_same(ours, left_by(twin, _step(x)))


@pytest.mark.heavy
def test_wrappers_are_followed_after_a_process_group_was_made(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    model, twin, x = _built()
    plan_of(model, (x,))
    for owner, name in (*FUNCTIONS, (Normalised, "forward"), (Patched, "part")):
        monkeypatch.setattr(owner, name, wrapped(owner, name))
    made = plan_of(model, (x,))
    request.getfixturevalue("process_group")  # with it PyTorch forgets what was changed of Dynamo's rules
    made.apply(model)
    with counting_runs() as runs, no_plan_warnings():
        ours = left_by(model, _step(x))
    assert runs.backward == 1
    assert_same(ours, left_by(twin, _step(x)))


@pytest.mark.heavy
def test_patches_after_the_first_step_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin, x = _built()
    plan_of(model, (x,)).apply(model)
    with counting_runs() as runs, no_plan_warnings():
        _step(x)(model)
    for owner, name in (*METHODS, *FUNCTIONS):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrapped(owner, name))
            with pytest.warns(planner.PlanWarning, match=rf"{name} was changed since the first planned step"):
                ours = left_by(model, _step(x))
            assert_same(ours, left_by(twin, _step(x)))
    monkeypatch.setattr(torch.Tensor, "of_another_library", lambda tensor: tensor, raising=False)
    with no_plan_warnings():
        _step(x)(model)
    assert runs.backward == 2  # as soon as all is as it was, the plan is followed again


@pytest.mark.heavy
def test_classes_of_submodules_that_come_later_are_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(Normalised):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    model, twin, x = _built()
    plan_of(model, (x,)).apply(model)
    _step(x)(model)
    later = Later()
    for network in (model, twin):
        network.block = copy.deepcopy(later)
    with pytest.warns(planner.PlanWarning, match="has not seen"):
        _step(x)(model)
    monkeypatch.setattr(Later, "forward", wrapped(Later, "forward"))
    with pytest.warns(planner.PlanWarning, match=r"Later.forward was changed"):
        ours = left_by(model, _step(x))
    assert_same(ours, left_by(twin, _step(x)))


@pytest.mark.heavy
def test_wrappers_that_are_there_before_anything_is_compiled(tmp_path: Path) -> None:
    code = """
import torch.nn.functional as F

def wrapped(original):
    return lambda *args, **kwargs: original(*args, **kwargs) * 1.5

for name in ("relu", "softmax", "layer_norm", "dropout"):
    setattr(F, name, wrapped(getattr(F, name)))
from tests._torch import test_patches as here
model, twin, x = here._built()
here.plan_of(model, (x,)).apply(model)
here.assert_same(here.left_by(model, here._step(x)), here.left_by(twin, here._step(x)))
"""
    script = tmp_path / "train.py"  # Dynamo follows what is in no file
    script.write_text(code)
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
