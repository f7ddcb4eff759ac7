"""Plans that are followed by replaying operators: bits, bytes, other paths, other shapes, files, options."""

import copy
import gc
import json
import random
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import planner
from planner._torch.compat import graphs_are_off
from planner._torch.cuda.streams import MadeOn
from planner.costs.devices import find_device
from planner.costs.host_time import host_time
from planner.costs.roofline import roofline
from planner.planning import prepare
from planner.planning.options import OptionError
from planner.replay.program import program_of
from tests.behaviour.bits.test_process_settings import (
    Deterministic,
    InInferenceMode,
    SetsType,
    SetsTypeForOne,
)
from tests.side_by_side import layers, no_plan_warnings

pytestmark = [pytest.mark.any_torch, pytest.mark.heavy]
needs_graphs = pytest.mark.skipif(graphs_are_off() is not None, reason="graphs are off")


class Encoder(nn.Module):
    """Layers with dropout and normalisations, and a loss."""

    def __init__(self, layers: int = 3, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Convolutions(nn.Module):
    """Batch normalisations, activations in place, and residuals that are added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            y = F.silu(block(x))
            y += x
            x = y
        return F.max_pool2d(x, 2).square().mean()


class Copies(nn.Module):
    """Activations in place, of which autograd keeps a copy of what they write over."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Hardswish(inplace=True))
            for _ in range(3)
        )
        self.left_out = -1

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number != self.left_out:
                x = F.silu(block(x), inplace=True)
                y = F.avg_pool2d(x, 3, 1, 1)
                x = y.mul_(y.sigmoid())
        return x.square().mean()


class Loop(nn.Module):
    """What ends graphs: numbers that are asked for, selections by data, numpy, a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.recurrent = nn.Linear(32, 32), nn.LSTM(32, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            y = F.dropout(torch.tanh(self.linear(x)), 0.1, self.training)
            x = x + y * 0.5 if y.mean().item() > -1e9 and i % 2 == 0 else x - F.gelu(y)
            x = x + x[x.abs() > 0.5].mean()
        return self.recurrent(x)[0].square().mean()


def _tokens() -> Tensor:
    return torch.randint(0, 50, (8, 48))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "encoder": (lambda: Encoder(2), _tokens),
    "convolutions": (Convolutions, lambda: torch.randn(4, 3, 24, 24)),
    "copies": (Copies, lambda: torch.randn(4, 8, 24, 24)),
    "loop": (Loop, lambda: torch.randn(8, 24, 32)),
}


def _planned(model: nn.Module, x: Any, budget: str = "min", **options: Any) -> planner.Plan:
    return planner.plan(model, (x,), budget=budget, backend="replay", costs="roofline", **options)


def _left(model: nn.Module) -> list[Tensor | None]:
    return [*(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]


def _same(one: nn.Module, other: nn.Module, step: Callable[[nn.Module], object]) -> bool:
    found = []
    for model in (one, other):
        model.zero_grad()
        torch.manual_seed(3)
        step(model)
        found.append(_left(model))
    return all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(*found, strict=True)
    )


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_eagers_and_peaks_are_as_predicted(case: str, half: bool) -> None:
    make, inputs = CASES[case]
    torch.manual_seed(0)
    model, x = make().train(), inputs()
    with torch.autocast("cpu", torch.bfloat16, enabled=half), warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        step = planner.prepare(model, (x,), backend="replay", costs="roofline")
        for budget in ("100%", "90%", "min"):
            plan = step.plan(budget)
            report = planner.verify(model, (x,), plan=plan, repeats=0)
            assert report.ok, (budget, report.problems)
            assert report.exact
            assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
            assert report.baseline_measured_dynamic_peak_bytes == plan.baseline.dynamic_peak_bytes
        assert plan.recomputed_operations > 0
        assert plan.predicted.dynamic_peak_bytes < 0.9 * plan.baseline.dynamic_peak_bytes


def test_noise_of_dropout_is_kept_as_bits() -> None:
    torch.manual_seed(0)
    model, x = Encoder(2), _tokens()
    plan = _planned(model, x, "70%")
    assert plan.graphs[0].packed
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


class Draws(nn.Module):
    """Noise that no dropout draws: a part of a larger memory, from a generator of the model's own, and by an
    operator that returns something beside."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 512), nn.Linear(512, 8)
        self.generator = torch.Generator() if own else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.first(x))
        noise = torch.empty(2 * x.numel())[8 : 8 + x.numel()].view(x.shape)
        x = torch.sin(x * noise.bernoulli_(0.7, generator=self.generator))
        x = torch.sin(x * torch.rand(x.shape, generator=self.generator))
        return self.last(torch.sin(x if self.generator else F.rrelu(x, training=True))).square().mean()


@pytest.mark.parametrize("own", [False, True])
def test_noise_is_that_of_its_generator_and_bits_are_of_what_fills_its_memory(own: bool) -> None:
    torch.manual_seed(0)
    model, x = Draws(own), torch.randn(256, 32)
    plan, eager = _planned(model, x, "min" if own else "60%"), copy.deepcopy(model)
    assert plan.recomputed_operations
    plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        assert _same(model, eager, lambda one: one(x).backward())
        assert _same(model, eager, lambda one: one(x).backward())
        report = planner.verify(model, (x,), repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    if own:
        assert torch.equal(model.generator.get_state(), eager.generator.get_state())


class Conjugated(nn.Module):
    """Numbers that are conjugated, and negated, where they are read: their memory has the others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(32, 32, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, torch.tanh(x))
        for _ in range(2):
            z = torch.sin(z @ self.weight)
            z = torch.exp(z.conj() @ self.weight) + torch.tanh(z.conj().imag) * torch.sin(z.conj())
            z = torch.sin(z).conj().mul_(0.5) * 1.5
        return z.abs().mean()


def test_what_is_read_conjugated_is_made_again_so() -> None:
    torch.manual_seed(0)
    model, x = Conjugated(), torch.randn(32, 32)
    eager = copy.deepcopy(model)
    plan = _planned(model, x)
    assert plan.recomputed_operations
    plan.apply(model)
    assert _same(model, eager, lambda one: one(x).backward())


class Paths(nn.Module):
    """Layers of which some are left out, and code that not every step runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(5)
        )
        self.left_out: set[int] = set()
        self.more = False

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i not in self.left_out:
                x = x + layer(x)
            if self.more and i == 2:
                x = torch.tanh(x) * 1.5
        return x.square().mean()


def test_other_paths_are_exact_and_are_told_of() -> None:
    torch.manual_seed(0)
    model, x = Paths(), torch.randn(64, 32)
    eager = copy.deepcopy(model)
    _planned(model, x).apply(model)

    def step(one: Any) -> None:
        one(x).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _same(model, eager, step)
    with pytest.warns(planner.PlanWarning, match="took a path that the plan has not seen"):  # noqa: PT031
        for left_out, more in (({1}, False), ({0, 3}, True), (set(), True), ({4}, False)):
            for one in (model, eager):
                one.left_out, one.more = left_out, more
            assert _same(model, eager, step), (left_out, more)
    for one in (model, eager):
        one.left_out, one.more = set(), False
        one.layers[0].requires_grad_(False)
    assert _same(model, eager, step)


def test_copies_of_what_is_written_over_are_made_again_in_any_order() -> None:
    """What they are copies of is made for them alone, as it was before the write."""
    torch.manual_seed(0)
    model, x = Copies(), torch.randn(4, 8, 24, 24)
    eager = copy.deepcopy(model)
    plan = _planned(model, x)
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    assert plan.predicted.dynamic_peak_bytes < 0.5 * plan.baseline.dynamic_peak_bytes
    plan.apply(model)

    def twice(one: nn.Module) -> None:
        loss = one(x)
        loss.backward(retain_graph=True)
        loss.backward()

    def penalty(one: nn.Module) -> None:
        given = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(one(given), given, create_graph=True)
        gradient.square().sum().backward()

    def from_within(one: nn.Module) -> None:
        inner: list[Tensor] = []
        handle = one.blocks[1].register_forward_hook(lambda *given: inner.append(given[2]))
        loss = one(x)
        handle.remove()
        torch.autograd.grad(inner[0].sum(), list(one.blocks[0].parameters()), retain_graph=True)
        loss.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", planner.PlanWarning)
        for step in (lambda one: one(x).backward(), twice, penalty, from_within):
            assert _same(model, eager, step), step
        model.left_out = eager.left_out = 1
        assert _same(model, eager, lambda one: one(x).backward())


class _Beside(nn.Module):
    """Returns, beside its loss, what its loss is not computed of; it begins at an output that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
        self.others = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.tanh(self.first(x))
        drawn = y + torch.randn_like(y)
        z = self.norm(drawn)
        for layer in self.others:
            z = F.hardswish(F.gelu(layer(z)) + z, inplace=True)
        return y.square().mean() + F.gelu(torch.sin(drawn)).mean(), drawn, z


def test_what_no_node_asks_for_is_dropped_and_made_on_demand() -> None:
    torch.manual_seed(0)
    model, x = _Beside(), torch.randn(64, 64)
    eager = copy.deepcopy(model)
    step = planner.prepare(model, (x,), loss=lambda out: out[0], backend="replay", costs="roofline")

    def one_after_the_other(one: Any) -> None:
        loss, _, beside = one(x)
        loss.backward()
        parts = list(one.others.parameters())
        for part, gradient in zip(parts, torch.autograd.grad(beside.sum(), parts), strict=True):
            part.grad = gradient

    for budget in ("75%", "min"):
        plan = step.plan(budget)
        report = planner.verify(model, (x,), plan=plan, loss=lambda out: out[0], repeats=0)
        assert report.ok, report.problems
        assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
        # Without the four layers' results, each of 16 KiB, of which autograd saves three a layer.
        dropped = plan.baseline.dynamic_peak_bytes - plan.no_recompute.dynamic_peak_bytes
        assert dropped > 9 * x.nbytes
        plan.apply(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert _same(model, eager, lambda one: one(x)[0].backward())
        with pytest.warns(planner.PlanWarning, match="as for one of several losses"):  # noqa: PT031
            assert _same(model, eager, lambda one: one(x)[2].square().mean().backward())
            assert _same(model, eager, lambda one: sum(out.sum() for out in one(x)).backward())
            assert _same(model, eager, one_after_the_other)
        planner.remove(model)


def test_a_layer_that_is_frozen_or_reads_another_value_is_noticed() -> None:
    """Which tensor a call reads is looked at, not taken from the plan."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.first = nn.Linear(32, 32), nn.Linear(32, 32), True

        def forward(self, x: Tensor) -> Tensor:
            one, two = torch.tanh(self.a(x)), torch.tanh(self.b(x))
            read = one if self.first else two
            return (torch.sigmoid(read) * torch.exp(read)).square().mean() + one.mean() + two.mean()

    torch.manual_seed(0)
    model, x = Either(), torch.randn(64, 32)
    eager = copy.deepcopy(model)
    _planned(model, x).apply(model)
    assert _same(model, eager, lambda one: one(x).backward())
    model.first = eager.first = False
    with pytest.warns(planner.PlanWarning, match="some of their arguments"):
        assert _same(model, eager, lambda one: one(x).backward())


@pytest.mark.parametrize("budget", ["min", "100%"])
def test_a_backward_may_run_twice_and_be_differentiated(budget: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4), nn.Sigmoid())
    x = torch.randn(32, 16)
    eager = copy.deepcopy(model)
    _planned(model, x, budget, loss=lambda y: y.square().mean()).apply(model)

    def twice(one: nn.Module) -> None:
        loss = one(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    def penalty(one: nn.Module) -> None:
        given = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(one(given).square().sum(), given, create_graph=True)
        gradient.square().sum().backward()

    with pytest.warns(planner.PlanWarning, match="retain_graph=True holds what the plan would free"):
        assert _same(model, eager, twice)
    assert _same(model, eager, penalty)


@pytest.mark.parametrize("budget", ["min", "100%"])
def test_reading_what_a_node_saves_is_no_backward_that_holds_it(budget: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()), torch.randn(256, 64)
    eager = copy.deepcopy(model)
    _planned(model, x, budget, loss=lambda y: y.square().mean()).apply(model)

    def looked_at(one: nn.Module) -> None:
        out: Any = one(x)
        assert torch.equal(out.grad_fn._saved_result, out)
        out.square().mean().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        assert _same(model, eager, looked_at)


def test_what_is_changed_in_place_after_the_forward_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    x = torch.randn(64, 16)
    _planned(model, x, loss=lambda y: y.square().mean()).apply(model)
    loss = model(x).square().mean()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(planner.InputsChanged, match="changed in place after the forward"):
        loss.backward()


@pytest.mark.parametrize("written", [lambda h: h, lambda h: h[:, :2], Tensor.detach])
def test_a_result_that_is_changed_after_it_was_saved_is_an_error(written: Callable[[Tensor], Tensor]) -> None:
    """As without a plan, although the plan would make it again as it was."""
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(32, 32), nn.Tanh())))
    model.append(nn.Linear(32, 1)).append(nn.Flatten(0))
    _planned(model, torch.randn(64, 32), loss=Tensor.sum).apply(model)
    for part in model[1:-1:2]:
        model.zero_grad()
        results: list[Tensor] = []
        hook = part.register_forward_hook(lambda *call, results=results: results.append(call[-1]))
        loss = model(torch.randn(64, 32)).sum()
        hook.remove()
        with torch.no_grad():
            written(results[0]).mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace|changed in place"):
            loss.backward()


class Averages(nn.Module):
    """Updates a buffer, and reads it, in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.register_buffer("average", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
            with torch.no_grad():
                self.average.lerp_(x.mean(0), 0.1)
            x = (x - self.average).sin()
        return x.square().mean()


def test_a_buffer_that_each_call_writes_and_reads_may_change_before_the_backward() -> None:
    """As of spectral normalisation, in a discriminator that is called for what is real and what is not."""
    torch.manual_seed(0)
    model, x = Averages(), torch.randn(64, 32)
    plan, eager = _planned(model, x), copy.deepcopy(model)
    assert plan.recomputed_operations
    plan.apply(model)
    with pytest.warns(planner.PlanWarning, match="awaits its backward"):
        assert _same(model, eager, lambda one: (one(x) + one(-x)).backward())


def test_larger_inputs_are_predicted() -> None:
    torch.manual_seed(0)
    model = Encoder(1)
    _planned(model, _tokens(), solver="sqrt_n").apply(model)
    with pytest.warns(planner.PlanWarning, match="larger than those that were planned"):
        model(torch.randint(0, 50, (12, 48))).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.zero_grad()
        model(torch.randint(0, 50, (4, 30))).backward()


def test_a_plan_file_is_followed_where_nothing_was_captured(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = Loop().train(), torch.randn(8, 24, 32)
    eager = copy.deepcopy(model)
    plan = _planned(model, x)
    plan.save(tmp_path / "plan.json")
    read = planner.Plan.load(tmp_path / "plan.json")
    assert read == plan
    read.apply(model)
    assert _same(model, eager, lambda one: one(x).backward())
    assert planner.remove(model) is model


def test_whatever_a_file_says_of_calls_gradients_are_eagers() -> None:
    """A plan decides what is dropped and when it is made again, never what it is made of."""
    torch.manual_seed(0)
    model, x = Encoder(2, 32), torch.randint(0, 50, (4, 16))
    eager = copy.deepcopy(model)
    text = json.loads(_planned(model, x, solver="sqrt_n").dumps())
    chance = random.Random(6)
    followed = 0
    for _ in range(15):
        changed = copy.deepcopy(text)
        column = chance.choice(["operands", "results", "written", "saves", "ids", "asked", "begun"])
        values = changed["replay"][column]
        for _ in range(chance.choice([1, 3, 20])):
            i, j = chance.randrange(len(values)), chance.randrange(len(values))
            values[i], values[j] = values[j], values[i]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                planner.Plan.loads(json.dumps(changed)).apply(model)
                assert _same(model, eager, lambda one: one(x).backward()), column
            followed += 1
        except planner.PlanFileError:
            continue
        finally:
            planner.remove(model)
    assert followed > 5


def test_a_file_by_which_a_re_run_lacks_what_it_reads_is_refused() -> None:
    torch.manual_seed(0)
    text = json.loads(_planned(Encoder(1, 32), torch.randint(0, 50, (4, 16)), solver="sqrt_n").dumps())
    chance, refused = random.Random(0), list[str]()
    for _ in range(10):
        changed = copy.deepcopy(text)
        values = changed["replay"]["results"]
        i, j = chance.sample(range(len(values)), 2)
        values[i], values[j] = values[j], values[i]
        try:
            program_of(planner.Plan.loads(json.dumps(changed)))
        except planner.PlanFileError as error:
            refused.append(str(error))
    assert any("which runs again, needs value" in text for text in refused)


@needs_graphs
def test_auto_takes_graphs_where_they_need_no_more_said(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        linear = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        one = planner.plan(linear, torch.randn(4, 8), budget="100%", backend="auto", costs="roofline")
        loop, x = Loop().train(), torch.randn(4, 8, 32)
        many = planner.plan(loop, x, budget="100%", backend="auto", costs="roofline")
        monkeypatch.setattr(prepare, "MOST_OPERATIONS", 2)
        long = planner.plan(linear, torch.randn(4, 8), budget="100%", backend="auto", costs="roofline")
    assert one.target.backend == "eager"
    assert many.target.backend == long.target.backend == "replay"
    assert "the forward has 4 operations" in long.notes[-1]
    reason = "followed by replaying operators, not by a graph: the forward breaks into too many graphs"
    assert many.notes[-1].startswith(reason)


class Scaled(nn.Module):
    """A layer that reads a number of its own result."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.up, self.down, self.reads = nn.Linear(8, 32), nn.Linear(32, 8), reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        return x + self.down(y * 2 if self.reads and y.abs().max().item() > 1e-3 else y)


@needs_graphs
@pytest.mark.parametrize(("reads", "backend"), [(False, "eager"), (True, "replay")])
@pytest.mark.parametrize("regions", [None, ["0", "1"]])
def test_auto_replays_where_a_unit_of_fully_shard_is_no_graph(
    reads: bool, backend: str, regions: list[str] | None
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(reads=reads), Scaled(reads=reads), nn.Linear(8, 1))
    given: Any = {"parallel": planner.FSDP2(2), "regions": regions, "costs": "roofline"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan = planner.plan(model, torch.randn(4, 8), budget="100%", **given)
    assert plan.target.backend == backend


@needs_graphs
def test_graph_is_another_name_of_eager() -> None:
    plan = planner.plan(nn.Linear(4, 4), torch.randn(2, 4), budget="100%", backend="graph")
    assert plan.target.backend == "eager"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"regions": "auto"}, "gradients leave when eager's do"),
        ({"in_flight": 2}, "stages of pipelines"),
        ({"backend_options": {"max_autotune": True}}, "they are Inductor's"),
    ],
)
def test_what_replays_cannot_do_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        _planned(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4), **options)


def test_lazily_planned_modules_and_steps_take_the_backend() -> None:
    torch.manual_seed(0)
    model = Encoder(2)
    eager = copy.deepcopy(model)
    x = _tokens()
    planner.auto_checkpoint(model, budget="80%", backend="replay")
    assert _same(model, eager, lambda one: one(x).backward())
    step = planner.step(lambda one, batch: one(batch), budget="80%", backend="replay")
    model = copy.deepcopy(eager)
    assert _same(model, eager, lambda one: (one(x) if one is eager else step(one, x)).backward())


def test_a_second_forward_before_the_backward_is_told_of() -> None:
    torch.manual_seed(0)
    model, x = Encoder(1), _tokens()
    _planned(model, x, solver="sqrt_n").apply(model)
    with pytest.warns(planner.PlanWarning, match="awaits its backward"):
        (model(x) + model(x)).backward()


def test_a_write_that_the_plan_has_not_seen_is_an_error() -> None:
    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.fills = nn.Linear(16, 64), False

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(self.linear(x))
            z = torch.exp(y)
            if self.fills:
                y.data.zero_()
            return z.square().mean()

    torch.manual_seed(0)
    model, x = Fills(), torch.randn(64, 16)
    _planned(model, x).apply(model)
    model(x).backward()
    model.fills = True
    with pytest.raises(planner.InputsChanged, match="a path that the plan has not seen"):
        model(x).backward()


def test_blocks_of_the_users_are_run_again_by_the_plan() -> None:
    @planner.recompute
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.linear(x))

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(32, 1))
    x = torch.randn(64, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan = _planned(model, x, "100%", loss=lambda y: y.square().mean())
        report = planner.verify(model, (x,), plan=plan, loss=lambda y: y.square().mean(), repeats=0)
    assert report.ok, report.problems
    graph = plan.graphs[0]
    assert {op.module for i in graph.backward if (op := graph.ops[i]).phase == "forward"} == {
        "0.linear",
        "1.linear",
    }
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    again = sum(graph.ops[i].phase == "forward" for i in graph.backward)
    cpu = find_device("cpu")
    of_python = host_time(cpu, roofline(cpu))
    extra = plan.predicted.seconds - plan.no_recompute.seconds
    assert extra > again * of_python.again + len(plan.replay.saves) * of_python.save > 0


class _Shifted(nn.Module):
    """Writes in place over a product, whose count of writes is not that of the tensor it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(32, 32), nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            y = torch.matmul(x, x.transpose(-1, -2))
            y += 1.0
            x = x + (self.layer(y.transpose(1, 2).contiguous()) + y * self.scale).mean() * x
        return x.mean()


def test_a_product_that_is_written_over_is_read_again_as_it_was_left() -> None:
    torch.manual_seed(0)
    model, x = _Shifted(), torch.randn(8, 32, 256)
    plan = planner.plan(model, x, budget="85%", backend="replay")
    assert plan.recomputed_operations
    report = planner.verify(model, x, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


class _ReadsStatistics(nn.Module):
    """Divides by a deviation that its normalisation updates afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            deviation = (self.norm.running_var + 1e-5).sqrt().view(1, -1, 1, 1)
            y = self.first(x)
            x = x + self.norm(torch.tanh(y / deviation) * deviation).sum(1, keepdim=True)[..., :1, :1]
        return x.square().mean()


def test_running_statistics_are_read_as_they_were_before_they_were_updated() -> None:
    """PyTorch neither counts that write nor says so in the operator's schema."""
    torch.manual_seed(0)
    model, x = _ReadsStatistics(), torch.randn(4, 3, 9, 9)
    plan = planner.plan(model, x, budget="min", backend="replay")
    assert plan.recomputed_operations
    report = planner.verify(model, x, plan=plan, repeats=0)
    assert report.ok, report.problems


@pytest.mark.parametrize("build", [SetsType, SetsTypeForOne, Deterministic, InInferenceMode])
def test_what_runs_again_runs_as_pytorch_was_set(build: type[nn.Module]) -> None:
    model, (x,), _ = layers(build)
    plan = planner.plan(model, x, budget="min", backend="replay", solver="sqrt_n")
    assert plan.recomputed_operations
    report = planner.verify(model, x, plan=plan, repeats=0)
    assert report.ok, report.problems


class TwoBlocks(nn.Module):
    """Blocks that read what the model itself and the block before made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 32), nn.Linear(32, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 32))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x * torch.sigmoid(block(x))
        return self.head(x).square().mean()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_units_of_fully_shard_are_regions(dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, x = TwoBlocks().train(), torch.randn(64, 32)
    parallel = planner.FSDP2(2, param_dtype=dtype)
    plan = _planned(model, x, parallel=parallel)
    assert plan.target.backend == "replay"
    assert plan.model.regions == ["blocks.0", "blocks.1", "blocks.2"]
    assert plan.recomputed_operations > 0
    assert plan.replay is not None
    graph = plan.graphs[0]
    module = [op.module for op in graph.ops]
    waiting: list[int] = []
    for op in graph.by_execution[0].backward:
        if op < graph.forward_length:
            waiting.append(op)
            continue
        # What runs again before an operation of the backward is all of one unit.
        units = {
            ".".join(module[w].split(".")[:2]) if module[w].startswith("blocks") else "" for w in waiting
        }
        assert len(units) <= 1
        waiting = []
    # In one process the model is whole, and trains by the plan all the same.
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.exact, report.problems


def test_kinds_as_vectors_are_followed_as_they_are_with_data() -> None:
    """Without data ``one_hot`` is computed by other operators."""

    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 32), nn.Linear(32, 32)

        def forward(self, kinds: Tensor) -> Tensor:
            x = torch.tanh(self.first(F.one_hot(input=kinds, num_classes=5).float()))
            return F.gelu(self.last(x)).square().mean()

    torch.manual_seed(0)
    model, kinds = Kinds(), torch.randint(0, 5, (64,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        report = planner.verify(model, (kinds,), plan=_planned(model, kinds), repeats=0)
    assert report.ok, report.problems


def test_ctc_losses_are_followed_as_they_are_under_a_dispatch_mode() -> None:
    """PyTorch goes on with lengths as tensors there, and with numbers of them without a mode."""

    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU())
            self.head = nn.Linear(32, 6)

        def forward(self, sound: Tensor, text: Tensor, length: Tensor, letters: Tensor) -> Tensor:
            return F.ctc_loss(self.head(self.layers(sound)).log_softmax(-1), text, length, letters)

    torch.manual_seed(0)
    model, text = Speech(), torch.randint(1, 6, (4, 5))
    inputs = torch.randn(20, 4, 8), text, torch.tensor([20, 20, 18, 15]), torch.tensor([5, 4, 5, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan = planner.plan(model, inputs, budget="min", backend="replay", solver="sqrt_n")
        report = planner.verify(model, inputs, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


def test_a_loss_in_a_larger_memory_than_its_own_is_as_planned() -> None:
    """The kernel of ``smooth_l1_loss`` returns one number in memory for all of its input."""

    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16), nn.GELU())))

        def forward(self, x: Tensor) -> Tensor:
            return F.smooth_l1_loss(self.layers(x), x).square()

    model, x = Squared(), torch.randn(512, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        report = planner.verify(model, (x,), plan=_planned(model, x), repeats=0)
    assert report.ok, report.problems


def test_what_takes_more_is_told_of_where_nothing_is_dropped() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.more = nn.Linear(8, 8), False

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.linear(x))
            x = torch.tanh(x[x[:, 0] > 0])
            return (torch.tanh(x) if self.more else x).square().mean()

    torch.manual_seed(0)
    model, x = Chosen(), torch.randn(64, 8)
    plan = _planned(model, x, "200%")
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        report = planner.verify(model, (x,), plan=plan, repeats=0)
        assert report.ok, report.problems
        plan.apply(model)
        model(x).backward()
    with torch.no_grad():
        model.linear.bias += 3.0
    with pytest.warns(planner.PlanWarning, match="data or something else"):
        model(x).backward()
    model.more = True
    with pytest.warns(planner.PlanWarning, match="took a path that the plan has not seen"):
        model(x).backward()


def test_a_backward_that_recording_changes_is_told_of() -> None:
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="householder")
    with pytest.warns(planner.PlanWarning, match="householder_product"):
        plan = _planned(nn.Sequential(layer, nn.GELU()), torch.randn(16, 8))
    assert any("householder_product" in note for note in plan.notes)


def test_settings_under_which_kernels_take_more_are_said_once() -> None:
    torch.manual_seed(0)
    model, x, threads = Encoder(1, 32), torch.randint(0, 50, (4, 16)), torch.get_num_threads()
    plan = _planned(model, x, solver="sqrt_n")
    assert plan.created_with["threads"] == str(threads)
    plan.apply(model)
    try:
        torch.set_num_threads(threads + 1)
        with pytest.warns(planner.PlanWarning, match=rf"threads\(\) is {threads + 1}, and was {threads}"):
            model(x).backward()
        with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
            with pytest.warns(planner.PlanWarning, match=r"mkldnn\.enabled was changed"):
                model(x)
            with no_plan_warnings():
                model(x)
    finally:
        torch.set_num_threads(threads)


class CallsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        h = torch.tanh(self.linear(x)).sin()
        made: Tensor = self(h, depth - 1) if depth else h.square().mean()
        return made


def test_a_module_that_calls_itself_is_followed_as_one() -> None:
    torch.manual_seed(0)
    model, x = CallsItself(), torch.randn(64, 16)
    eager = copy.deepcopy(model)
    plan = _planned(model, x)
    assert plan.recomputed_operations
    plan.apply(model)
    with no_plan_warnings():
        assert _same(model, eager, lambda one: one(x).backward())


def test_complex_pseudoinverses_are_warned_of() -> None:
    class Inverting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.pinv(self.weight * x).abs().sum()

    with pytest.warns(planner.PlanWarning, match=r"linalg\.pinv of complex"):
        _planned(Inverting(), torch.ones(()))


@planner.recompute
class _Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.tanh(self.linear(x)).sin()
        return made


class _InACheckpoint(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(32, 32), kind(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(self.inner, torch.tanh(self.first(x)).sin(), use_reentrant=False)
        return torch.tanh(self.last(inner)).square().mean()


def _compiled() -> nn.Module:
    inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    inner.compile(backend="eager")
    return inner


@needs_graphs
@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
@pytest.mark.parametrize("kind", [_Again, _compiled])
def test_a_checkpoint_runs_its_part_again_as_it_ran_first(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = _InACheckpoint(kind), torch.randn(64, 32)
    eager = copy.deepcopy(model)
    _planned(model, x).apply(model)
    assert _same(model, eager, lambda one: one(x).backward())
    planner.remove(model)
    with planner.no_recompute():
        losses = [one(x) for one in (model, eager)]
    for loss in losses:
        loss.backward()


def test_blocks_are_left_alone_where_the_plan_drops_nothing() -> None:
    torch.manual_seed(0)
    model, x, runs = nn.Sequential(_Again(), nn.Linear(32, 4)), torch.randn(64, 32), list[int]()
    with planner.no_recompute():
        plan = planner.plan(model, (x,), budget="100%", backend="replay", loss=torch.sum)
    plan.apply(model)
    model[0].linear.register_forward_hook(lambda *_: runs.append(1))
    model(x).sum().backward()
    assert len(runs) == 1


def test_hooks_on_saved_tensors_that_are_off_are_said() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(64, 32)
    eager = copy.deepcopy(model)
    _planned(model, x, loss=torch.sum).apply(model)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("none here"),
        pytest.warns(planner.PlanWarning, match="disable_saved_tensors_hooks is on"),
    ):
        assert _same(model, eager, lambda one: one(x).sum().backward())
    block = _Again()
    gradient = torch.func.grad(lambda y: block(y).sum())(x)
    y = x.clone().requires_grad_()
    block(y).sum().backward()
    assert y.grad is not None
    assert torch.equal(gradient, y.grad)


def test_a_block_holds_nothing_of_earlier_steps() -> None:
    @planner.recompute
    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.linear(x))
            self.logged = h.cos().sum()  # not in the loss, and not detached
            made: Tensor = h.sin()
            return made

    block, inputs = Logging(), list[Any]()
    for _ in range(4):
        x = torch.randn(4, 8)
        inputs.append(weakref.ref(x))
        block(x).sum().backward()
        del x
        gc.collect()
    assert sum(ref() is not None for ref in inputs) <= 1


def test_what_is_read_in_the_backward_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU another stream may have made it."""
    noted, waited = set[int](), set[int]()
    monkeypatch.setattr(MadeOn, "note", lambda _, number, made: noted.add(number))
    monkeypatch.setattr(
        MadeOn, "wait", lambda _, number, value: None if value is None else waited.add(number)
    )
    torch.manual_seed(0)
    model, x = Encoder(1, 32), torch.randint(0, 50, (4, 16))
    plan = _planned(model, x, solver="sqrt_n")
    assert plan.recomputed_operations
    plan.apply(model)
    model(x).backward()
    assert waited
    assert waited <= noted


class WritesOver(torch.autograd.Function):
    """Writes over its input, and reads that before PyTorch is told of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, told: str) -> Tensor:
        x.mul_(factor)
        ctx.save_for_backward(factor, x.clone())
        if told == "mark_dirty":
            ctx.mark_dirty(x)
        else:
            torch.autograd.graph.increment_version(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        factor, made = ctx.saved_tensors
        return gradient * factor, gradient * made / factor, None


@pytest.mark.parametrize("read_again", [False, True])
@pytest.mark.parametrize("told", ["mark_dirty", "increment_version"])
def test_a_write_that_is_told_of_late_is_no_change_after_the_forward(told: str, read_again: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.linear(x))
            factor = torch.exp(x)
            written = WritesOver.apply(x.clone() if told == "mark_dirty" else x.detach() + 1, factor, told)
            x = torch.tanh(x + (written.sin() if read_again else written * 2))
            return torch.tanh(self.linear(x)).square().mean()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(64, 32)
    plan, eager = _planned(model, x), copy.deepcopy(model)
    assert plan.recomputed_operations
    plan.apply(model)
    assert _same(model, eager, lambda one: one(x).backward())


@torch.library.custom_op("planner_test_replayed::noise", mutates_args=())
def _noise(x: Tensor) -> Tensor:
    return x * random.random() + torch.from_numpy(np.random.rand(*x.shape)) + torch.rand_like(x)


_noise.register_fake(torch.empty_like)


@pytest.mark.parametrize("backend", ["replay", pytest.param("graph", marks=needs_graphs)])
def test_an_operator_of_the_users_draws_the_same_numbers_again(backend: Any) -> None:
    """From PyTorch's, Python's and numpy's generators. None of them says so."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32, dtype=torch.double)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = torch.tanh(self.linear(x))
                x = x * _noise(x.detach())
            return x.square().mean()

    def step(one: nn.Module) -> None:
        random.seed(0)
        np.random.seed(0)
        one(x).backward()
        drawn.append((random.random(), np.random.rand()))

    torch.manual_seed(0)
    model, x, drawn = Model(), torch.randn(64, 32, dtype=torch.double), list[Any]()
    operator = "planner_test_replayed.noise.default"
    plan = planner.plan(model, (x,), budget="min", backend=backend, recompute=[operator])
    assert plan.recomputed_operations
    eager = copy.deepcopy(model)
    plan.apply(model)
    assert _same(model, eager, step)
    assert drawn[0] == drawn[1]


def test_a_module_of_two_names_has_the_first() -> None:
    """As in a plan by graphs, and in tables of modules."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(64, 32)
    model.add_module("again", model[1])
    plan = _planned(model, x, loss=torch.sum, recompute=["1"])
    assert {op.module for op in plan.graphs[0].ops} >= {"0", "1", "2"}
