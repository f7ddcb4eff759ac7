"""Everything that a step changes is put back: by planning, verify, compare, and before a step runs again."""

import functools
import os
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import planner
from planner.errors import CaptureError, PlanWarning
from planner.estimation import comparison
from planner.training_step.arrivals.suspended import only_hooks_that_are_put_back
from planner.training_step.generators import GeneratorStates

pytestmark = pytest.mark.heavy

Tensor = torch.Tensor


class Cache:
    """Of a class of the user's."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, []

    def add(self, x: Tensor) -> None:
        self.calls += 1
        self.seen.append(x.detach())


def counting() -> tuple[Callable[..., None], Callable[[], int]]:
    """A hook that counts its calls in a variable, and what tells the count."""
    count = 0

    def hook(*_: Any) -> None:
        nonlocal count
        count += 1

    return hook, lambda: count


class Loss:
    """An object with a head of its own, and a history."""

    def __init__(self) -> None:
        self.head, self.history = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1)), []
        self.scale = torch.ones(())

    def __call__(self, y: Tensor, cache: Cache) -> Tensor:
        loss = self.head(y).square().mean()
        cache.add(loss)
        self.history.append(loss.detach())
        return loss * self.scale


class Changing(nn.Module):
    """Changes all that a step can change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.steps, self.factor = torch.zeros(8), torch.ones(8, requires_grad=True)
        self.memory = {"last": [torch.zeros(8)]}
        self.generators = [torch.Generator().manual_seed(1), random.Random(1)]
        self.meter = SimpleNamespace(calls=0)
        hook, self.count = counting()
        self.register_forward_hook(hook)

    def forward(self, x: Tensor, cache: Cache, given: dict[str, Any], own: np.random.Generator) -> Tensor:
        return (self.linear(x) * self.factor).tanh() + self.noted(x, cache, given, own)

    @torch.compiler.disable
    def noted(self, x: Tensor, cache: Cache, given: dict[str, Any], own: np.random.Generator) -> float:
        cache.add(x)
        given["seen"] = x.detach()
        self.meter.calls += 1
        self.steps.add_(1)
        self.memory["last"][0].add_(1)
        torch.rand(1, generator=self.generators[0])
        return own.random() + self.generators[1].random()


def changed(model: Changing, cache: Cache, given: dict[str, Any], own: Any, loss: Any) -> list[str]:
    """What is not as it was made."""
    whole: Loss = loss.func
    norm, last = whole.head
    ours, pythons = model.generators
    checks = {
        "an object among the inputs": (cache.calls, cache.seen) == (0, []),
        "a dictionary among the inputs": given == {},
        "a generator among the inputs": own.random() == np.random.default_rng(1).random(),
        "PyTorch's generator in a list": torch.equal(ours.get_state(), ours.manual_seed(1).get_state()),
        "Python's generator in a list": pythons.getstate() == random.Random(1).getstate(),
        "an object among the attributes": model.meter.calls == 0,
        "a variable of a hook": model.count() == 0,
        "a tensor among the attributes": not model.steps.any() and model.steps._version == 0,
        "a tensor in a dictionary": not model.memory["last"][0].any(),
        "the gradient of an attribute": model.factor.grad is None,
        "an object of the loss": (loss.args, loss.keywords["cache"].calls) == ((), 0),
        "a history of the loss": whole.history == [],
        "gradients of the loss": norm.weight.grad is None and last.weight.grad is None,
        "buffers of the loss": int(norm.num_batches_tracked) == 0 and not norm.running_mean.any(),
    }
    return [name for name, unchanged in checks.items() if not unchanged]


def test_a_step_that_changes_all_that_it_can() -> None:
    torch.manual_seed(0)
    model, cache, given, own = Changing(), Cache(), {}, np.random.default_rng(1)
    loss, args = functools.partial(Loss(), cache=Cache()), (torch.randn(4, 8), cache, given, own)
    drawn = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        plan = planner.plan(model, args, loss=loss, budget="100%", solver="none")
        assert changed(model, cache, given, own, loss) == []
        own.bit_generator.state = np.random.default_rng(1).bit_generator.state
        planner.verify(model, args, plan=plan, loss=loss, repeats=0)
    assert changed(model, cache, given, own, loss) == []
    assert torch.equal(torch.get_rng_state(), drawn)


def test_the_number_that_numpy_keeps_for_the_next_call_is_part_of_a_state() -> None:
    states = GeneratorStates.now()
    np.random.randn()
    one = GeneratorStates.now()
    np.random.randn()  # what was drawn with the first
    assert not GeneratorStates.now().same_as(one)
    one.restore()
    assert GeneratorStates.now().same_as(one)
    states.restore()


def test_generators_of_the_operating_system_have_no_state() -> None:
    class Given(nn.Linear):
        def forward(self, x: Tensor, generator: random.Random) -> Tensor:
            return super().forward(x).tanh()

    args = torch.randn(4, 8), random.SystemRandom()
    assert planner.plan(Given(8, 8), args, budget="100%", solver="none").graphs


def test_modules_without_data_that_serve_as_templates_have_no_state() -> None:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights, self.template = nn.Parameter(torch.randn(3, 8, 8)), [nn.Linear(8, 8, False, "meta")]

        def forward(self, x: Tensor) -> Tensor:
            def member(weight: Tensor) -> Tensor:
                result: Tensor = torch.func.functional_call(self.template[0], {"weight": weight}, (x,))
                return result

            return torch.vmap(member)(self.weights).tanh().var(0).mean()

    model, args = Ensemble(), (torch.randn(4, 8),)
    plan = planner.plan(model, args, budget="100%", solver="none")
    assert planner.verify(model, args, plan=plan, repeats=0).ok


def test_modes_are_as_they_were_where_a_step_changes_them() -> None:
    class Off(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch.set_grad_enabled(False)
            return super().forward(x)

    with pytest.raises(CaptureError):
        planner.plan(Off(8, 8), torch.randn(4, 8), budget="min")
    assert torch.is_grad_enabled()


class Deciding(nn.Module):
    """Takes another path where it was run before, and one that data decide."""

    def __init__(self, sign: str) -> None:
        super().__init__()
        self.norm, self.sign = nn.BatchNorm1d(8, momentum=0.5), sign
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen = torch.zeros(())
        self.register_buffer("sized", torch.empty(0))

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        before = {
            "statistics": lambda: bool(self.norm.running_mean.any()),
            "an attribute": lambda: bool(self.seen),
            "an input": lambda: "seen" in cache,
            "a size": lambda: bool(self.sized.numel()),
        }[self.sign]()
        x = self.norm(x)
        self.noted(x.detach(), cache)
        return (self.second if before else self.first)(x).tanh() * (2 if x.sum() > 1000 else 1)

    @torch.compiler.disable
    def noted(self, x: Tensor, cache: dict[str, Tensor]) -> None:
        if self.sign == "a size":
            self.sized.resize_(8).copy_(x.abs().amax(0))
        self.seen.add_(1)
        cache["seen"] = x


@pytest.mark.parametrize("sign", ["statistics", "an attribute", "an input", "a size"])
def test_each_pass_of_planning_begins_with_what_the_step_has(sign: str) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        plan = planner.plan(Deciding(sign), (torch.randn(4, 8), {}), budget="1MiB", solver="none")
    modules = {op.module for graph in plan.graphs for op in graph.ops}
    assert any("first" in name for name in modules)
    assert not any("second" in name for name in modules)


def test_compare_draws_nothing_and_leaves_what_a_loss_refers_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "RATIOS", ())
    torch.manual_seed(0)
    model, head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)), nn.BatchNorm1d(8)

    def loss(y: Tensor) -> Tensor:
        return head(y).square().mean() * random.random()

    x, python = torch.randn(4, 8), random.getstate()
    drawn = torch.get_rng_state()
    planner.compare(model, x, loss=loss, budget="100%", solvers=(), measure=True)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert random.getstate() == python
    assert head.weight.grad is None
    assert not head.running_mean.any()


def test_compare_measures_parts_in_their_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "RATIOS", ())
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5).eval())
    [row, *_] = planner.compare(model, torch.randn(64, 8), budget="100%", solvers=(), measure=True).ways
    assert row.measured_peak_bytes == row.peak_bytes


GENERATOR, NUMBERS, CALLS = torch.Generator().manual_seed(0), random.Random(0), 0


def _helper(x: torch.Tensor) -> torch.Tensor:
    """A global function that draws and counts."""
    global CALLS
    CALLS += 1
    return x * torch.rand(x.shape, generator=GENERATOR) * NUMBERS.random()


class Shares(nn.Module):
    """Changes what all objects of its class share, in all the ways that there are."""

    calls = 0
    log: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.cache = OrderedDict({1: 1, 2: 2})

    def forward(self, x: torch.Tensor, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
        type(self).calls += 1
        self.log.append(1)
        seen.append(1)
        self.cache.move_to_end(1)
        self.cache[len(self.cache) + 1] = 0
        return self.layers(_helper(x)).mean()


def test_what_a_class_and_global_functions_have_is_as_it_was() -> None:
    model, x = Shares(), torch.ones(64, 8)

    def state() -> tuple[Any, ...]:
        seen = list(Shares.forward.__defaults__[0])  # type: ignore[index]
        shared = CALLS, Shares.calls, list(Shares.log), seen, list(model.cache)
        return *shared, NUMBERS.getstate(), GENERATOR.get_state().tolist()

    before = state()
    plan = planner.plan(model, (x,), budget="min", backend="replay")
    assert state() == before
    report = planner.verify(model, (x,), plan=plan)
    assert report.loss_equal
    assert report.gradients_equal
    assert state() == before


def test_hooks_stay_where_a_warning_of_them_is_an_error() -> None:
    layer = nn.Linear(2, 2)
    with open(os.devnull, "w") as file:
        layer.weight.register_post_accumulate_grad_hook(lambda p: file.write("x") and None)
        suspended = only_hooks_that_are_put_back(layer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(PlanWarning, match="does not run the hooks"):
                suspended.__enter__()
    assert layer.weight._post_accumulate_grad_hooks


def test_an_input_that_a_forward_turns_lies_as_before() -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x.t_()).tanh())

    numbers = np.random.rand(8, 8).astype(np.float32)
    x, before, model = torch.from_numpy(numbers), numbers.copy(), Turns()
    plan = planner.plan(model, (x,), budget="min", solver="sqrt_n", backend="replay")
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert x.stride() == (8, 1)
    assert np.array_equal(numbers, before)


def test_max_batch_draws_nothing() -> None:
    own = random.Random(1)
    limits: dict[str, Any] = {"start": 1, "most": 1, "solver": "sqrt_n", "max_overhead": None}
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    drawn = torch.get_rng_state()
    planner.max_batch(model, lambda size: torch.randn(size, 8) * own.random(), "1MiB", **limits)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert own.random() == random.Random(1).random()


def test_a_block_that_runs_again_sees_what_it_saw() -> None:
    class Drawing(nn.Module):
        """Draws from generators in a list, and counts in a variable of a function."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.generators = nn.Linear(8, 8), [torch.Generator().manual_seed(4)]
            self.counter, self.count = counting()

        def forward(self, x: Tensor) -> Tensor:
            self.counter()
            noise = torch.rand(8, generator=self.generators[0])
            return torch.sin(torch.exp(self.linear(x)) * noise * self.count())

    found = []
    for block in (Drawing, lambda: planner.recompute(Drawing())):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), block())
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
        drawn = model[1].generators[0].get_state()
        found.append([model[1].count(), drawn, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert ours == theirs if isinstance(ours, int) else torch.equal(ours, theirs)
