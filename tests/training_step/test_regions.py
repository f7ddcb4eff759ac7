"""Regions: submodules whose forward and backward are graphs, and an autograd node, of their own."""

import copy
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import planner
from planner._torch import dynamo, modules
from planner.report.text import as_text, summary
from planner.training_step.regions import RegionError, RunningRegions, find_regions
from planner.user_plan import Plan
from planner.verification.measure import measure_peak
from tests.side_by_side import (
    Layers,
    assert_same,
    counting_runs,
    layers,
    left_by,
    no_plan_warnings,
    peak_of,
    plan_of,
    steps,
)

pytestmark = pytest.mark.heavy

ALL = [f"layers.{i}" for i in range(4)]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.stages = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))) for _ in range(2)
        )
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (None, []),
        ("auto", ["stages.0", "stages.1"]),
        ("stages.*", ["stages.0", "stages.1"]),
        (["stages"], ["stages.0", "stages.1"]),
        (["heads.1", "stem"], ["stem", "heads.1"]),
        (["stages.1.0", "stages.1.0.1", "stages.0.*"], ["stages.0.0", "stages.0.1", "stages.1.0"]),
    ],
)
def test_names_and_patterns(wanted: Any, found: list[str]) -> None:
    assert find_regions(Parts(), wanted) == found


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(RegionError, match=r"'stagse\.\*', and no submodule matches; near to it are stages"):
        planner.plan(Parts(), (), budget="min", regions=["stagse.*"])
    with pytest.raises(RegionError, match="finds no submodules of one class that repeat"):
        find_regions(nn.Linear(2, 2), "auto")
    with pytest.raises(planner.PlannerError, match="regions=3: expected a list of names"):
        planner.plan(Parts(), (), budget="min", regions=3)  # type: ignore[arg-type]


def _boundaries(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if name and modules.installed_call(module)]


def test_regions_train_alike_within_the_prediction_and_hand_out_gradients_early() -> None:
    model, (x,), _ = layers()
    twin = copy.deepcopy(model)
    plan = Plan.loads(plan_of(model, (x,), regions="auto").dumps())
    assert plan.model.regions == ALL
    assert "layers.[0-3]" in as_text(summary(plan))
    plan.apply(model)

    def loop(model: nn.Module) -> list[torch.Tensor]:
        optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(model(x))
            losses[-1].backward()
            optimizer.step()
        return losses

    ready: list[int] = []
    with counting_runs() as runs, no_plan_warnings():
        weight = model.get_parameter("layers.3.0.weight")
        hook = weight.register_post_accumulate_grad_hook(lambda _: ready.append(runs.backward))
        ours = left_by(model, loop)
        hook.remove()
    assert ready[0] == 3  # after the loss, what adds the last region up, and that
    assert runs.backward >= 10
    assert_same(ours, left_by(twin, loop))

    def step() -> torch.Tensor:
        loss = model(x)
        loss.backward()
        return loss

    model.zero_grad()
    assert measure_peak(step, "cpu").peak_bytes == plan.predicted.dynamic_peak_bytes
    assert _boundaries(model) == ALL
    assert torch.equal(model.eval()(x), twin.eval()(x))
    planner.remove(model)
    assert not _boundaries(model)


def test_a_copy_trains_by_regions_of_its_own() -> None:
    model, (x,), _ = layers(lambda: Layers(2))
    twin = copy.deepcopy(model)
    plan_of(model, (x,), solver="checkpoint_all", regions=["layers.*"]).apply(model)
    model(x).backward()
    copied = copy.deepcopy(model)
    assert not _boundaries(copied)  # until it trains
    for each in (copied, twin):
        each.zero_grad()
    with counting_runs() as runs:
        ours = left_by(copied, lambda m: m(x).backward())
    assert runs.backward >= 3
    assert _boundaries(copied) == ["layers.0", "layers.1"]
    assert_same(ours, left_by(twin, lambda m: m(x).backward()))


class Checkpointed(Layers):
    """Each layer inside a checkpoint that changes buffers, which therefore runs as it is written."""

    def __init__(self) -> None:
        super().__init__(2)
        for layer in self.layers:
            layer.append(nn.BatchNorm1d(32))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


class LeftOutByChance(Layers):
    probability = 0.0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.layers[0](x)
        for layer in self.layers[1:]:
            if not torch.rand(()) < self.probability:
                x = x + layer(x)
        return x


def test_regions_that_are_left_out_by_chance_take_no_more_than_all_of_them() -> None:
    """As layerdrop does: the plan is made with all layers, at a probability of 0."""
    model, args, _ = layers(LeftOutByChance)
    twin = copy.deepcopy(model)
    plan = plan_of(model, args, regions=ALL)
    plan.apply(model)
    for network in (model, twin):
        network.probability = 0.4
    peaks = set()
    with no_plan_warnings():
        for seed in range(6):
            assert_same(left_by(model, steps(args, 1), seed), left_by(twin, steps(args, 1), seed))
            torch.manual_seed(seed)
            peaks.add(peak_of(model, args))
    assert len(peaks) > 1
    assert max(peaks) <= plan.predicted.dynamic_peak_bytes


class CheckpointedLater(Layers):
    on = False

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.on else layer(x))
        return x


def test_a_region_that_the_model_runs_again_after_it_was_planned() -> None:
    model, args, _ = layers(CheckpointedLater)
    twin = copy.deepcopy(model)
    plan_of(model, args, regions=ALL).apply(model)

    def loop(network: Any) -> list[Any]:
        losses = []
        for network.on in (False, True, False):
            losses += steps(args, 1)(network)
        return losses

    with pytest.warns(planner.PlanWarning, match=r"inside of torch\.utils\.checkpoint") as warned:
        ours = left_by(model, loop)
    assert len(warned) == 1
    assert_same(ours, left_by(twin, loop))


def test_a_region_that_the_model_itself_runs_again_is_refused() -> None:
    model, args, _ = layers(Checkpointed)
    with pytest.raises(planner.CaptureError, match=r"torch\.utils\.checkpoint.*Plan without regions="):
        plan_of(model, (args[0].requires_grad_(),), regions="auto")
    assert not _boundaries(model)
    assert plan_of(model, (args[0],)).coverage != "one-graph"


def test_more_layers_than_one_line_may_be_captured_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes on after each layer is captured by itself: of a loop over 64 layers Dynamo had enough."""
    monkeypatch.setitem(dynamo._DYNAMO_CONFIG, "recompile_limit", 4)
    for _ in range(2):  # a second capture does not find the first one's
        model, args, _ = layers(lambda: Layers(8))
        plan = planner.plan(model, args, budget="min", regions="auto", solver="sqrt_n", encodings="none")
        assert plan.coverage == "several-graphs"
    with no_plan_warnings():
        plan.apply(model)
        model(*args).backward()


class _Numbered(nn.Module):
    """A layer that writes to its own place in what all layers share."""

    def __init__(self, number: int, numbered: bool) -> None:
        super().__init__()
        self.number, self.numbered = number, numbered
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor | None]) -> torch.Tensor:
        x = x + self.mlp(x)
        if self.numbered:
            cache[self.number] = x
        return x


class _Stack(nn.Module):
    def __init__(self, numbered: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Numbered(i, numbered) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache: list[torch.Tensor | None] = [None] * 4
        for layer in self.layers:
            x = layer(x, cache)
        return x.square().sum() + sum(c.sum() for c in cache if c is not None)


@pytest.mark.parametrize("numbered", [True, False])
def test_regions_that_cannot_share_a_graph_are_told(numbered: bool) -> None:
    plan = planner.plan(_Stack(numbered), (torch.randn(16, 8),), budget="100%", regions="auto")
    told = [note for note in plan.notes if "captured one by one" in note]
    assert bool(told) is numbered
    if numbered:
        assert told[0].startswith("4 regions")
        assert "use_cache = False" in told[0]


class Mixer(nn.Module):
    """A block whose size is that of what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix, self.widen = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = self.norm(x).unflatten(1, (2, -1))
        return x + self.mix(torch.nn.functional.gelu(self.widen(halves))).flatten(1, 2)


class Stage(nn.Module):
    """Blocks in a loop that does something before each, and nothing after the last."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Mixer, widths))

    def forward(self, x: torch.Tensor, skips: tuple[torch.Tensor, ...]) -> torch.Tensor:
        for block in self.blocks:
            skip, skips = skips[-1], skips[:-1]
            x = block(torch.cat([x, skip], -1))
        return x


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.first, self.second = Stage([16, 24]), Stage([32, 40])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.first(x, (x.sin(), x.cos()))[:, ::2].tanh()
        x = self.second(x, (x[..., :8].sigmoid(), x[..., :8].exp()))
        return x.square().mean()


def test_regions_of_other_sizes_in_loops_follow_the_plan() -> None:
    """What a loop does between its regions is captured, in later steps too; each size as it was planned."""
    torch.manual_seed(0)
    model, x = Pyramid().train(), torch.randn(4, 16, 8)
    names = ["first.blocks.*", "second.blocks.*"]

    def three_steps(model: nn.Module) -> list[torch.Tensor | None]:
        for _ in range(3):
            model.zero_grad()
            model(x).backward()
        return [parameter.grad for parameter in model.parameters()]

    # Recorded: an error in its place would have Dynamo's callback fail, and capture otherwise.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", planner.PlanWarning)
        plan = planner.plan(model, (x,), budget="min", regions=names, solver="sqrt_n")
        assert not any("run as written" in note for note in plan.notes)
        report = planner.verify(model, (x,), plan=plan, repeats=0)
        assert report.ok, report.problems
        assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
        planned = plan.apply(copy.deepcopy(model))
        assert_same(left_by(planned, three_steps), left_by(model, three_steps))
    assert not [w.message for w in warned if issubclass(w.category, planner.PlanWarning)]


def test_a_region_of_other_operations_is_reported_where_the_step_does_not_fit() -> None:
    """What one region allocates would fit the planned peak alone."""
    model, (x,), _ = layers()
    plan_of(model, (x,), regions=ALL, budget="90%").apply(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x.clone().requires_grad_()).backward()
    assert any("into other operations" in str(warning.message) for warning in caught)


def test_forwards_of_other_threads_switch_no_regions_off_or_on() -> None:
    model, ran = nn.Sequential(nn.Linear(2, 2)), []
    running = RunningRegions(["0"], lambda: None)
    running.put_in(model)
    begun, ends = threading.Event(), threading.Event()

    def region(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ran.append(module)
        return module.forward(*args, **kwargs)

    def wait() -> None:
        begun.set()
        ends.wait()

    other = threading.Thread(target=running.during(wait, region))
    other.start()
    begun.wait()

    def whole() -> None:
        ends.set()
        other.join()
        model(torch.ones(2, 2))

    running.during(whole, region)()
    assert len(ran) == 1
    model(torch.ones(2, 2))
    assert len(ran) == 1
