"""``recompute``, ``checkpointable`` and ``no_recompute``: by themselves, and inside a planned module."""

import copy
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner.blocks import replay
from planner.blocks.replay import RecomputeError
from planner.verification.measure import measure_peak
from tests.side_by_side import assert_same, left_by, no_plan_warnings


class Layer(nn.Module):
    """What recomputing gets wrong: dropout, running statistics, an attribute that forward changes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.widen, self.norm, self.narrow = nn.Linear(width, 64), nn.BatchNorm1d(64), nn.Linear(64, width)
        self.calls, self.last = 0, torch.zeros(())

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        self.calls += 1
        hidden = F.dropout(F.gelu(self.norm(self.widen(x))), 0.2, self.training)
        self.last = hidden.mean()
        return x + scale * self.narrow(hidden).tanh()


class RecomputedLayer(Layer):
    """The same, to be decorated."""


planner.recompute(RecomputedLayer)


class Net(nn.Module):
    """Layers, and a loss."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _pair(decorated: Callable[[], Any], plain: Callable[[], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    ours = decorated()
    torch.manual_seed(0)
    return ours.train(), plain().train()


def _steps(*args: Any, **kwargs: Any) -> Callable[[nn.Module], list[float]]:
    def loop(model: nn.Module) -> list[float]:
        losses = []
        for _ in range(2):
            loss = model(*args, **kwargs)
            loss.backward()
            losses.append(loss.item())
        return losses

    return loop


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class Runs:
    """How often blocks ran a second time."""

    again = 0


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    counted, second = Runs(), replay._Run._second

    def count(self: Any, *args: Any) -> Any:
        counted.again += 1
        return second(self, *args)

    monkeypatch.setattr(replay._Run, "_second", count)
    return counted


def test_a_class_a_module_and_a_method_leave_what_the_plain_layer_leaves(runs: Runs) -> None:
    class WithMethod(Layer):
        @planner.recompute(name="inner")
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
            return self.inner(x)

    for layer in (RecomputedLayer, lambda: planner.recompute(Layer()), WithMethod):
        ours, theirs = _pair(lambda layer=layer: Net(layer), Net)  # type: ignore[misc]
        assert_same(left_by(ours, _steps(X)), left_by(theirs, _steps(X)))
        assert [layer.calls for layer in ours.layers] == [2, 2, 2]
        assert all(layer.last.grad_fn is not None for layer in ours.layers)
    assert runs.again == 3 * 6
    assert isinstance(RecomputedLayer(), RecomputedLayer)
    assert planner.recompute(Layer().forward) is not None


def test_arguments_of_all_kinds_and_several_results(runs: Runs) -> None:
    class Pair(NamedTuple):
        first: torch.Tensor
        rest: dict[str, Any]

    weight = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(2)))
    nested: Any = {"a": [X * 2, (X.clone().requires_grad_(), None)], "how": "sum"}

    def function(
        x: torch.Tensor, others: dict[str, Any], *more: int, scale: float, use_reentrant: Any = 1
    ) -> Pair:
        y = F.dropout(torch.tanh(x @ weight), 0.3) * scale + others["a"][0]
        rest = {"y": y.exp(), "z": (others["a"][1][0] * sum(more)).sin(), "how": others["how"]}
        return Pair(y, rest)

    def left(call: Callable[..., Pair]) -> list[Any]:
        weight.grad = None
        leaf = nested["a"][1][0]
        leaf.grad = None
        x = X.clone().requires_grad_()
        torch.manual_seed(3)
        result = call(x, nested, 2, 3, scale=0.5, use_reentrant="theirs")
        assert result.rest["how"] == "sum"
        (result.first.mean() + result.rest["y"].mean() + result.rest["z"].sum()).backward()
        return [result.first, result.rest["y"], weight.grad, leaf.grad, x.grad, torch.get_rng_state()]

    expected = left(function)
    for decorate in (planner.recompute, planner.recompute(), planner.recompute(name="f")):
        for ours, theirs in zip(left(decorate(function)), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert runs.again == 3


def test_random_numbers_of_all_generators_are_the_same() -> None:
    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.generator = nn.Linear(16, 16), torch.Generator().manual_seed(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(16, generator=self.generator) * random.random() * np.random.rand()
            return torch.sin(torch.exp(self.linear(x)) * noise)

    def loop(model: Any) -> Any:
        _steps(X)(model)
        return [layer.generator.get_state() for layer in model.layers]

    ours, theirs = _pair(lambda: Net(lambda: planner.recompute(Random())), lambda: Net(Random))
    assert_same(left_by(ours, loop), left_by(theirs, loop))


NOISE = torch.Generator()


class Count:
    """A plain object that a forward changes."""

    def __init__(self) -> None:
        self.count, self.scale = 0, torch.ones(3)


def _global_generator() -> tuple[Callable[..., torch.Tensor], list[Any]]:
    NOISE.manual_seed(0)
    return lambda x: (x * torch.rand(3, generator=NOISE)) ** 2, []


def _own_generator() -> tuple[Callable[..., torch.Tensor], list[Any]]:
    own, other = torch.Generator().manual_seed(0), random.Random(0)
    return lambda x: (x * torch.rand(3, generator=own) * other.random()) ** 2, []


def _lists_and_numbers() -> tuple[Callable[..., torch.Tensor], list[Any]]:
    calls, number = list[int](), 0

    def function(x: torch.Tensor, given: list[int], named: dict[str, int]) -> torch.Tensor:
        nonlocal number
        number += 1
        calls.append(1)
        given.append(1)
        named["calls"] = named.get("calls", 0) + 1
        return (x * (number + len(calls) + 2 * len(given) + 3 * named["calls"])) ** 2

    return function, [[], {}]


def _ordered() -> tuple[Callable[..., torch.Tensor], list[Any]]:
    cache = OrderedDict({1: 1.0, 2: 2.0})

    def function(x: torch.Tensor) -> torch.Tensor:
        cache.move_to_end(1)
        cache[len(cache) + 1] = 3.0
        return (x * next(iter(cache.values())) * len(cache)) ** 2

    return function, []


def _object() -> tuple[Callable[..., torch.Tensor], list[Any]]:
    def function(x: torch.Tensor, counted: Count) -> torch.Tensor:
        counted.count += 1
        return (x * counted.count * counted.scale) ** 2

    return function, [Count()]


@pytest.mark.parametrize("build", [_global_generator, _own_generator, _lists_and_numbers, _ordered, _object])
def test_a_block_runs_again_in_the_state_of_its_run(build: Any) -> None:
    gradients = []
    for recompute in (False, True):
        function, others = build()
        x, block = torch.ones(3, requires_grad=True), planner.recompute(function)
        for _ in range(2):
            block(x, *others, _recompute=recompute).sum().backward()
        gradients.append((x.grad, [vars(o).get("count") if isinstance(o, Count) else o for o in others]))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert gradients[0][1] == gradients[1][1]


def test_buffers_that_two_modules_share_stay_shared() -> None:
    class Writes(nn.Module):
        def __init__(self, buffer: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("table", buffer)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.table += 1
            return x

    class Reads(Writes):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.table.clone()) ** 2

    gradients = []
    for recompute in (False, True):
        table = torch.zeros(1)
        block, x = (
            planner.recompute(nn.Sequential(Writes(table), Reads(table))),
            torch.ones(3, requires_grad=True),
        )
        block(x, _recompute=recompute).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_tensors_of_objects_and_modules_are_watched() -> None:
    counted, x = Count(), torch.ones(3, requires_grad=True)
    loss = planner.recompute(lambda x, counted: (x * counted.scale) ** 2)(x, counted).sum()
    counted.scale.mul_(10)
    with pytest.raises(planner.InputsChanged):
        loss.backward()

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = torch.zeros(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total += 1
            return (x * self.total.clone()) ** 2

    with pytest.raises(RecomputeError, match="attribute total"):
        planner.recompute(Plain())(x)


def test_tensors_around_a_block_may_be_of_all_kinds() -> None:
    meta, table = torch.zeros(4, device="meta"), torch.tensor([1.0, float("nan")])
    sparse, x = torch.eye(2).to_sparse(), torch.ones(2, requires_grad=True)
    assert planner.recompute(lambda x: x + meta)(torch.zeros(4, device="meta")).shape == (4,)
    planner.recompute(lambda x: x * table)(x).nansum().backward()
    planner.recompute(lambda x, s: s @ x)(x, sparse).sum().backward()
    assert x.grad is not None


def test_a_forward_that_another_library_set_stays() -> None:
    layer = nn.Linear(3, 3)
    layer.forward = partial(lambda module, x: 2 * type(module).forward(module, x), layer)  # type: ignore[method-assign]
    with pytest.raises(RecomputeError, match="has a forward of its own"):
        planner.recompute(layer)


def test_inputs_that_a_block_writes_to() -> None:
    class InPlace(Layer):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
            return super().forward(F.relu(x, inplace=True))

    def loop(model: nn.Module) -> list[float]:
        return [_steps(X * 1)(model)[0] for _ in range(2)]

    class Outer(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * 1)

    ours, theirs = _pair(lambda: Outer(lambda: planner.recompute(InPlace())), lambda: Outer(InPlace))
    assert_same(left_by(ours, loop), left_by(theirs, loop))


def test_what_changes_between_forward_and_backward_is_named() -> None:
    layer = planner.recompute(Layer().train())
    x = X.clone()
    loss = layer(x).sum()
    x.add_(1)
    with pytest.raises(planner.InputsChanged, match="input 0 of the block Layer was changed in place"):
        loss.backward()
    loss = layer(X).sum()
    layer.eval()  # what the forward saw counts
    loss.backward()
    loss = layer(X).sum()
    with torch.no_grad():
        layer.widen.weight.mul_(2)
    with pytest.raises(planner.InputsChanged, match=r"parameter widen\.weight"):
        loss.backward()


def test_weights_that_are_frozen_and_thawed_between_forward_and_backward() -> None:
    def loop(model: Net) -> list[float]:
        losses = []
        for index in range(2):
            loss = model(X)
            model.layers[index].requires_grad_(index == 1)
            loss.backward()
            model.layers[index].requires_grad_(index == 0)
            losses.append(loss.item())
        return losses

    ours, theirs = _pair(lambda: Net(RecomputedLayer), Net)
    for model in (ours, theirs):
        model.layers[1].requires_grad_(False)
    assert_same(left_by(ours, loop), left_by(theirs, loop))
    assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in theirs.parameters()]


def test_what_cannot_be_a_block_is_refused() -> None:
    total = torch.zeros(())

    @planner.recompute
    def adds(x: torch.Tensor) -> torch.Tensor:
        total.add_(x.detach().sum())
        return x.exp()

    with pytest.raises(RecomputeError, match="adds writes to tensor 0 of an enclosing scope"):
        adds(X.clone().requires_grad_())
    wrong: Any
    for wrong in (3, int, iter(())):
        with pytest.raises(RecomputeError, match="is no block"):
            planner.recompute(wrong)
    with pytest.raises(RecomputeError, match="one after another"):

        @planner.recompute
        def generates() -> Any:
            yield 1

    with pytest.raises(RecomputeError, match="name=''"):
        planner.recompute(name="")
    taken: Any = nn.Linear(2, 2)
    taken.forward = lambda x: x
    with pytest.raises(RecomputeError, match="a forward of its own"):
        planner.recompute(taken)


def test_switches(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = RecomputedLayer().train()
    layer(X).sum().backward()
    assert runs.again == 1
    layer(X, _recompute=False).sum().backward()
    with planner.no_recompute():
        loss = layer(X).sum()
    loss.backward()
    with torch.no_grad():
        layer(X)
    monkeypatch.setenv("PLANNER", "0")
    layer(X).sum().backward()
    assert runs.again == 1


@pytest.mark.heavy
def test_blocks_inside_blocks_copies_and_pickles(runs: Runs) -> None:
    ours, theirs = _pair(lambda: planner.recompute(Net(RecomputedLayer)), Net)
    copied = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    expected = left_by(theirs, _steps(X))
    for model in (*copied, ours):
        runs.again = 0
        assert_same(left_by(model, _steps(X)), expected)
        assert runs.again >= 2 * 4
    assert copied[0].forward.args[0] is copied[0]


def test_gradients_of_gradients_and_bfloat16() -> None:
    def loop(model: nn.Module) -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.square().sum().backward()
        return [slope]

    ours, theirs = _pair(lambda: Net(RecomputedLayer), Net)
    assert_same(left_by(ours, loop), left_by(theirs, loop))


def _backward(model: Any, x: torch.Tensor) -> None:
    model(x).backward()


@pytest.mark.heavy
def test_it_takes_less_memory() -> None:
    peaks = []
    for kind in (Layer, RecomputedLayer):
        torch.manual_seed(0)
        model = Net(kind, 6).train()
        x = torch.randn(512, 16)
        model(x).backward()
        model.zero_grad()
        peaks.append(measure_peak(partial(_backward, model, x), "cpu").peak_bytes)
    assert peaks[1] < 0.5 * peaks[0]


def test_under_torch_compile_of_the_users() -> None:
    ours, theirs = _pair(lambda: Net(RecomputedLayer), Net)
    compiled = torch.compile(ours, backend="aot_eager")
    expected = left_by(theirs, _steps(X))
    found = left_by(ours, lambda _: _steps(X)(compiled))
    for name, value in expected.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            assert torch.allclose(found[name], value, atol=1e-6), name


# ---- inside a planned module ------------------------------------------------------------------------------


def _rerun(plan: planner.Plan) -> set[str]:
    """The modules of the operations that a plan re-runs."""
    return {
        graph.ops[i].module
        for graph in plan.graphs
        for program in graph.programs
        for i in program.backward
        if graph.ops[i].phase == "forward"
    }


class Told(nn.Module):
    """Blocks of each kind, that are on and off."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (RecomputedLayer, RecomputedLayer, Layer)
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.last = planner.recompute(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)))
        self.breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = twice(self.layers[0], x=x)
        with planner.no_recompute():
            x = self.layers[1](x)
        x = self.layers[1](x, _recompute=False)
        x = ends(self.layers[2], x)[0]
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(x).square().mean()


@planner.recompute
def twice(layer: nn.Module, *, x: torch.Tensor) -> Any:
    if getattr(layer, "breaks", False):
        torch._dynamo.graph_break()
    return layer(F.dropout(layer(x).exp(), 0.1))


@planner.checkpointable("end")
def ends(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return layer(x), 3


_INSIDE = {"layers.0", "layers.0.widen", "layers.0.norm", "layers.0.narrow", "", "last.0", "last.1", "last.2"}


@pytest.mark.heavy
def test_a_plan_does_as_it_is_told() -> None:
    ours, theirs = _pair(Told, Told)
    step = planner.prepare(ours, X)
    plan = step.plan("100%", encodings="none")
    assert _rerun(plan) <= _INSIDE
    assert {"layers.0.widen", "layers.0.norm"} <= _rerun(plan)
    assert plan.predicted.dynamic_peak_bytes < plan.baseline.dynamic_peak_bytes
    for name in ("end", "*.end"):
        named = step.plan("100%", recompute=[name], encodings="none")
        assert {m for m in _rerun(named) - _rerun(plan) if m} == {
            "layers.2", "layers.2.widen", "layers.2.norm", "layers.2.narrow",
        }  # fmt: skip
    with pytest.raises(ValueError, match="leave it out of one of them"):
        step.plan("100%", keep=["twice"])
    with pytest.raises(ValueError, match=r"near to it are .*end"):
        step.plan("100%", keep=["layers.2.endd"])
    plan.apply(ours)
    with no_plan_warnings(), planner.no_recompute():
        theirs_left = left_by(theirs, _steps(X))
    with no_plan_warnings():
        assert_same(left_by(ours, _steps(X)), theirs_left)
        ours.zero_grad()
        peak = measure_peak(lambda: ours(X).backward(), "cpu").peak_bytes
    assert peak == plan.predicted.dynamic_peak_bytes


@pytest.mark.graphs
@pytest.mark.heavy
def test_a_plan_of_several_graphs_does_as_it_is_told() -> None:
    ours, theirs = _pair(Told, Told)
    for model in (ours, theirs):
        model.breaks = model.layers[0].breaks = True
    plan = planner.plan(ours, X, budget="100%", solver="sqrt_n", encodings="none")
    assert {"layers.0.widen", "layers.0.norm"} <= _rerun(plan) <= _INSIDE
    plan.apply(ours)
    with no_plan_warnings():
        assert_same(left_by(ours, _steps(X)), left_by(theirs, _steps(X)))
