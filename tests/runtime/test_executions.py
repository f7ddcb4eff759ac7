"""A graph that runs several times in a step: every execution keeps and recomputes as the plan says of it."""

import copy
import json
import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner.errors import PlanFileError, PlanWarning
from planner.planfile.simulated import simulated
from planner.user_plan import Plan
from planner.verification.measure import measure_peak
from tests.plans import layered_plan
from tests.side_by_side import assert_same, assert_trains_alike, left_by, plan_of

pytestmark = pytest.mark.heavy

X = torch.linspace(-1, 1, 64 * 32).reshape(64, 32)


class Block(nn.Module):
    """Breaks at both ends, so that all blocks run one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        x = x + self.inside(x)
        torch._dynamo.graph_break()
        return x

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.down(F.gelu(self.up(x)).tanh()), 0.1, self.training)


class Blocks(nn.Module):
    """Blocks one after the other, ``times`` over: the second time each is used again."""

    def __init__(self, count: int = 4, times: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.times = times
        self.scale = nn.Parameter(torch.ones(32))  # the first block's input has a gradient, too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return x.square().mean()


class Numbered(Block):
    """Reads a number that is another one in each block: Dynamo captures the second anew, for any number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return super().inside(x) if self.number >= 0 else x


class NumberedBlocks(Blocks):
    """Such blocks."""

    def __init__(self, count: int = 4, times: int = 1) -> None:
        super().__init__(count, times)
        self.blocks = nn.ModuleList(Numbered(i) for i in range(count))


def blocks(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Blocks(**options).train()


def loop(model: nn.Module) -> list[torch.Tensor]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(model(X))
        losses[-1].backward()
        optimizer.step()
    return losses


def of_blocks(plan: Plan) -> Any:
    (graph,) = [graph for graph in plan.graphs if len(graph.executions) > 1]
    return graph


def measured_peak(model: nn.Module) -> int:
    def step() -> torch.Tensor:
        loss = model(X)
        loss.backward()
        return loss

    for _ in range(2):
        model.zero_grad()
        step()
    model.zero_grad()
    return measure_peak(step, "cpu").peak_bytes


@pytest.mark.graphs
@pytest.mark.parametrize("times", [1, 2])
def test_executions_follow_programs_of_their_own(times: int) -> None:
    model = blocks(count=4 // times, times=times)
    plan = assert_trains_alike(
        model, (X,), loop, expected_runs=None, budget="84%", solver="auto", time_limit=2
    )
    assert len(of_blocks(plan).executions) == 4
    assert len(set(of_blocks(plan).executions)) > 1
    assert len({tuple(run.recomputed) for run in of_blocks(plan).by_execution}) > 1
    assert measured_peak(model) == plan.predicted.dynamic_peak_bytes
    again = sum(len(run.recomputed) - len(run.packed) for graph in plan.graphs for run in graph.by_execution)
    assert f"re-runs {again} of" in repr(plan)
    assert len({tuple(run.kept) for run in of_blocks(plan).by_execution}) > 1
    again = Plan.loads(plan.dumps())
    assert again == plan
    assert simulated(again).timeline.seconds == plan.predicted.seconds  # and the peak, or it is refused


def test_blocks_that_break_need_little_more_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = plan_of(blocks(), (X,))
    monkeypatch.setattr(torch._dynamo, "graph_break", lambda: None)
    whole = plan_of(blocks(), (X,))
    assert whole.coverage == "one-graph"
    assert broken.predicted.dynamic_peak_bytes < 1.15 * whole.predicted.dynamic_peak_bytes


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("executions", [0, 1], r"graphs\[0\].executions\[1\]: 1 is none of the 1 programs"),
        ("executions", [], r"graphs\[0\].executions: "),
        (
            "other_programs",
            [{"backward": [0]}],
            r"other_programs\[0\].backward: .* 10 is never",
        ),
        (
            "other_programs",
            [{"backward": [99]}],
            r"other_programs\[0\].backward\[0\]: operation 99",
        ),
    ],
)
def test_programs_in_files_are_checked(field: str, value: Any, words: str) -> None:
    data = json.loads(layered_plan(layers=1, kept_layers=1).dumps())
    data["graphs"][0][field] = value
    with pytest.raises(PlanFileError, match=words):
        Plan.loads(json.dumps(data))


def test_files_of_a_release_without_executions_are_read() -> None:
    plan = layered_plan(layers=1)
    data = json.loads(plan.dumps())
    for field in ("executions", "other_programs"):
        del data["graphs"][0][field]
    assert Plan.loads(json.dumps(data)) == plan


@pytest.mark.graphs
def test_fewer_executions_than_planned_are_silent_and_more_are_warned_of_and_exact() -> None:
    model = blocks(count=1, times=2)
    plan = plan_of(model, (X,), solver="checkpoint_all")
    plan.apply(model)

    def run(model: nn.Module) -> list[torch.Tensor]:
        losses = []
        for model.times in (2, 1, 4):
            model.zero_grad()
            losses.append(model(X))
            losses[-1].backward()
        return losses

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = left_by(model, run)
    words = [str(w.message) for w in caught if issubclass(w.category, PlanWarning)]
    assert len(words) == 1
    assert "more often in this step than the 2 times that were planned" in words[0]
    assert_same(ours, left_by(blocks(count=1), run))


def test_other_shapes_follow_the_programs_too() -> None:
    model = blocks()
    plan = planner.plan(model, (X,), budget="75%", time_limit=2)
    plan.apply(model)
    twin = blocks()

    def other(model: nn.Module) -> list[torch.Tensor]:
        losses = []
        for rows in (64, 40, 24):
            model.zero_grad()
            losses.append(model(X[:rows]))
            losses[-1].backward()
        return losses

    assert_same(left_by(model, other), left_by(twin, other))


@pytest.mark.graphs
@pytest.mark.parametrize(("where", "times"), [("here", 2), ("elsewhere", 1), ("in an older file", 2)])
def test_what_is_captured_for_one_block_follows_the_plan_for_others_too(times: int, where: str) -> None:
    def built() -> nn.Module:
        torch.manual_seed(0)
        return NumberedBlocks(4 // times, times).train()

    torch._dynamo.reset()  # what Dynamo knows of numbers that vary
    plan = planner.plan(built(), (X,), budget="84%", time_limit=2)
    alike = [g for g in plan.graphs if g.occurrences > 1]
    assert len({tuple(run.recomputed) for graph in alike for run in graph.by_execution}) > 1
    if where != "here":
        torch._dynamo.reset()
        data = json.loads(plan.dumps())
        for graph in data["graphs"] if where == "in an older file" else []:
            del graph["occurrence"], graph["occurrences"]
        plan = Plan.loads(json.dumps(data))
    planned, twin = built(), built()
    plan.apply(planned)

    def step(model: nn.Module) -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(X)
        loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PlanWarning)
        for _ in range(3):
            assert_same(left_by(planned, step), left_by(twin, step))
        peaks = [measure_peak(lambda: step(planned), "cpu").peak_bytes for _ in range(2)]
    assert peaks == [plan.predicted.dynamic_peak_bytes] * 2
    strayed = [w for w in told if "each other's part of the plan" in str(w.message)]
    assert len(told) == len(strayed) <= (where == "elsewhere" or times > 1)


class Some(nn.Module):
    """Runs those of its layers that it is told to: each is captured by itself, when it runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.scale = nn.Parameter(torch.ones(32))
        self.chosen: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for i in range(6):
            torch._dynamo.graph_break()
            if i in self.chosen:
                x = x + self.layers[i].inside(x)
        return x.square().mean()


def some(planned: tuple[int, ...]) -> tuple[Some, torch.Tensor, Plan]:
    torch.manual_seed(0)
    model, x = Some().train(), X.repeat(8, 1)
    model.chosen = planned
    plan = plan_of(model, (x,), budget="80%")
    assert len({tuple(g.backward) for g in plan.graphs if g.occurrences == len(planned)}) > 1
    plan.apply(model)
    return model, x, plan


@pytest.mark.graphs
def test_more_layers_than_planned_that_are_captured_one_by_one() -> None:
    model, x, plan = some((0, 1))
    model.chosen = (0, 1, 2, 3)
    with pytest.warns(PlanWarning, match="runs more often in this step than the 2 times") as warned:
        assert measure_peak(lambda: model(x).backward(), "cpu").peak_bytes > plan.predicted.dynamic_peak_bytes
    assert len(warned) == 1


@pytest.mark.graphs
def test_layers_that_first_steps_left_out_follow_the_order_of_the_step() -> None:
    """Captured after those behind them, they would follow what is planned for the end."""
    model, x, plan = some((0, 1, 2, 3))
    for model.chosen in ((0, 2), (3,)):
        model(x).backward()
        model.zero_grad()
    model.chosen = (0, 1, 2, 3)
    with pytest.warns(PlanWarning, match="some layers followed each other's part of the plan"):
        model(x).backward()
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        measured = measure_peak(lambda: model(x).backward(), "cpu").peak_bytes
    assert measured == plan.predicted.dynamic_peak_bytes


class Parted(nn.Module):
    """Takes queries, keys and values apart by lengths that data tell, each in a graph of views alone."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).reshape(-1, 3, 4, 8).permute(1, 2, 0, 3).unbind(0)
        parts = [torch.split(tensor, lengths.tolist(), dim=1) for tensor in heads]
        mixed = [(q @ k.transpose(1, 2)).softmax(-1) @ v for q, k, v in zip(*parts, strict=True)]
        return x + self.out(torch.cat(mixed, 1).transpose(0, 1).reshape(x.shape))


class PartedLayers(nn.Module):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Parted() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = (x > 0).any(1).sum() // 2 + 8
        lengths = torch.stack([first, len(x) - first])
        for layer in self.layers:
            x = layer(x, lengths)
        return x.square().mean()


@pytest.mark.graphs
def test_graphs_of_views_run_in_the_order_of_the_forward() -> None:
    """What takes views at sizes that are numbers of data runs without the plan where these vary."""
    torch.manual_seed(0)
    model = PartedLayers().train()
    twin = copy.deepcopy(model)
    plan = plan_of(model, (X,))
    views = [graph for graph in plan.graphs if graph.structure == plan.graphs[0].structure]
    assert [graph.occurrence for graph in views] == [0, 1]
    plan.apply(model)
    with pytest.warns(planner.PlanWarning, match="without the plan|has not seen"):
        ours = left_by(model, loop)
    assert_same(ours, left_by(twin, loop))
