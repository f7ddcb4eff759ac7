"""Several threads plan, compile and train at once: each as if it were alone."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn as nn

import planner
from planner._torch.own_code import stand_in
from planner._torch.tracing.definitions import Definitions
from tests.side_by_side import counting_runs, no_plan_warnings, plan_of


class Net(nn.Module):
    """No dropout: threads share the random generator."""

    def __init__(self, count: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), act(), nn.LayerNorm(64), nn.Linear(64, 32)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def _nets() -> list[Net]:
    torch.manual_seed(0)
    return [Net(2 + i % 2, act) for i, act in enumerate((nn.GELU, nn.Tanh, nn.SiLU, nn.ReLU))]


def _trained(model: nn.Module, x: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.heavy
@pytest.mark.parametrize("lazily", [pytest.param(False, marks=pytest.mark.heavy), True])
def test_threads_that_plan_at_once(lazily: bool) -> None:
    models, x = _nets(), torch.randn(16, 32)
    twins = copy.deepcopy(models)

    def work(model: Net) -> list[torch.Tensor]:
        if lazily:
            planner.auto_checkpoint(model, budget="min", solver="sqrt_n")
        else:
            plan_of(model, (x,)).apply(model)
        return _trained(model, x)

    with counting_runs() as runs, no_plan_warnings(), ThreadPoolExecutor(4) as threads:
        found = list(threads.map(work, models))
    assert runs.backward == 3 * len(models)
    for ours, twin in zip(found, twins, strict=True):
        assert all(map(torch.equal, ours, _trained(twin, x)))


def test_what_fx_patches_while_a_thread_traces_is_nobodys_change() -> None:
    model, found = nn.Linear(2, 2), list[str | None]()
    definitions = Definitions(model)

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append(definitions.changed())
            return x

    torch.fx.symbolic_trace(Asks())
    assert found == [None]


def _planned_in_the_end(model: Net, x: torch.Tensor) -> None:
    """About one capture in 200 is refused, as one that differs each time, where another thread trains: why is
    not known. The model is as it was then, and may be planned again."""
    try:
        plan_of(model, (x,)).apply(model)
    except planner.CaptureError as error:
        if "captures differently every time" not in str(error):
            raise
        plan_of(model, (x,)).apply(model)


def test_what_is_put_in_place_while_another_thread_plans_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (before, during, *_), x = _nets(), torch.randn(16, 32)
    for model in (before, during):
        plan_of(model, (x,)).apply(model)
    original = torch.get_rng_state
    with no_plan_warnings(), counting_runs() as runs:
        _trained(before, x, 1)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "get_rng_state", stand_in(lambda: original(), original))
            _trained(before, x, 1)
            _trained(during, x, 1)
        _trained(during, x, 1)
    assert runs.backward == 4


@pytest.mark.heavy
def test_a_planned_model_trains_while_others_are_planned() -> None:
    models, x = _nets(), torch.randn(16, 32)
    model, twin = models[0], copy.deepcopy(models[0])
    plan_of(model, (x,)).apply(model)
    _trained(model, x, 1)
    steps, planned = 0, threading.Event()

    def plan_others() -> None:
        try:
            for other in models[1:]:
                _planned_in_the_end(other, x)
                _trained(other, x, 1)
        finally:
            planned.set()

    with ThreadPoolExecutor(1) as thread:
        others = thread.submit(plan_others)
        while not planned.is_set():
            ours = _trained(model, x, 1)
            steps += 1
        others.result()
    assert steps > 0
    assert all(map(torch.equal, ours, _trained(twin, x, steps + 1)))


_compiling_here_and_elsewhere: set[tuple[bool, bool]] = set()


@torch.library.custom_op("threads::doubled", mutates_args=())
def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@_doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(1) as other:
        elsewhere = other.submit(lambda: bool(torch.compiler.is_compiling())).result()
    _compiling_here_and_elsewhere.add((bool(torch.compiler.is_compiling()), elsewhere))
    return torch.empty_like(x)


_doubled.register_autograd(lambda _, gradient: gradient * 2)


class _Doubled(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_doubled(x + self.layers[0][0].bias.mean()))


def test_optimizers_in_other_threads_are_not_told_that_they_are_compiled() -> None:
    """They would compute with counts of steps in single precision, and leave other weights."""
    model, x = _Doubled(2, nn.GELU), torch.randn(16, 32)
    plan_of(model, (x,)).apply(model)
    _trained(model, x, 1)
    assert (True, False) in _compiling_here_and_elsewhere
    assert not any(elsewhere for _, elsewhere in _compiling_here_and_elsewhere)
    assert torch.compiler.is_compiling() is False
