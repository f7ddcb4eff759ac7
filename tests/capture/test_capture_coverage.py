"""How much of a forward is captured, what is said about the rest, and that what is left out is right."""

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner._torch import modules
from planner.capture.capture import capture
from planner.report.text import render
from planner.training_step.step import Step
from tests.side_by_side import assert_same, left_by
from tests.small import Built, graph_break_model, small_gpt
from tests.zoo import build


def planned(built: Built, budget: str = "min") -> planner.Plan:
    """A plan that was applied and compared: equal, and predicted to the byte."""
    model, args, kwargs = built
    plan = planner.plan(model, args, kwargs, budget=budget, solver="sqrt_n")
    report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
    assert report.ok, report.problems
    measured, predicted = report.measured_dynamic_peak_bytes, report.predicted_dynamic_peak_bytes
    assert abs(measured - predicted) <= 0.005 * predicted
    return plan


# ---- capture coverage --------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_one_graph_says_nothing_about_breaks() -> None:
    plan = planned(small_gpt(layers=1))
    assert plan.coverage == "one-graph"
    assert not any("break" in note for note in plan.notes)


@pytest.mark.graphs
@pytest.mark.heavy
def test_a_graph_break_is_named_by_its_line() -> None:
    plan = planned(graph_break_model())
    assert plan.coverage == "several-graphs"
    (note,) = [n for n in plan.notes if "break" in n]
    assert "small.py" in note
    assert "graph_break()" in note


class LoopWithBreaks(nn.Module):
    """Reads a number after every layer, as for a log."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3)
        )
        self.seen = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
            self.seen = float(x.detach().abs().mean())
        return x.square().mean()


@pytest.mark.graphs
@pytest.mark.heavy
def test_breaks_inside_a_loop_leave_graphs_that_are_planned() -> None:
    torch.manual_seed(0)
    plan = planned((LoopWithBreaks().train(), (torch.randn(64, 32),), {}))
    assert plan.coverage == "several-graphs"
    assert len(plan.graphs) == 4
    assert any(graph.recomputed for graph in plan.graphs)


class Collects(LoopWithBreaks):
    """Hands each layer's result to a container, by a method that waits until a number was read."""

    way = "append"

    def part(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x + layer(x)
        self.seen = float(x.detach().abs().mean())
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results: list[Any] = []
        named: dict[int, torch.Tensor] = {}
        for i, layer in enumerate(self.layers):
            getattr(results, self.way)([self.part(layer, x)])
            named.update({i: self.part(layer, x.sin())})
        loss = torch.zeros(())
        for result, other in zip(results, named.values(), strict=True):
            loss = loss + (result[0] * other).square().mean()  # of an extended list: of the first row
        return loss


@pytest.mark.graphs
@pytest.mark.heavy
def test_methods_of_containers_wait_while_a_graph_ends_and_are_known_again() -> None:
    torch.manual_seed(0)
    model, args = Collects().train(), (torch.randn(64, 32),)
    plan = planned((model, args, {}))
    assert plan.coverage == "several-graphs"
    apart = copy.deepcopy(model)
    plan.apply(model)

    def step(trained: nn.Module) -> None:
        trained.zero_grad()
        trained(*args).backward()

    for way in ("append", "append", "extend", "append"):
        model.way = apart.way = way
        assert_same(left_by(apart, step), left_by(model, step))


class Translates(nn.Module):
    """nn.Transformer reads from its mask whether it is causal: a graph break inside PyTorch's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(32, 2, 1, 1, 64, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.body(source, target, tgt_mask=mask).square().mean()


@pytest.mark.graphs
@pytest.mark.heavy
def test_breaks_inside_pytorchs_modules_leave_graphs_that_are_planned() -> None:
    torch.manual_seed(0)
    plan = planned((Translates().train(), (torch.randn(4, 24, 32), torch.randn(4, 16, 32)), {}))
    assert plan.coverage == "several-graphs"
    assert sum(len(graph.ops) for graph in plan.graphs) > 100


@pytest.mark.graphs
@pytest.mark.heavy
def test_what_no_graph_covers_runs_as_written_and_is_counted() -> None:
    plan = planned(build("nn_routed_experts"))
    assert plan.coverage == "partly-captured"
    assert plan.predicted.dynamic_peak_bytes < plan.no_recompute.dynamic_peak_bytes
    assert any("run as written" in note for note in plan.notes)
    assert any("difficult.py" in note and "nonzero" in note for note in plan.notes)


@pytest.mark.graphs
@pytest.mark.parametrize(("name", "words"), [("nn_sparse_gradient", "sparse=False")])
def test_what_cannot_be_planned_says_what_to_do_and_leaves_the_model_alone(name: str, words: str) -> None:
    model, args, kwargs = build(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = [set(vars(part)) for part in model.modules()]
    generator, python = torch.get_rng_state(), random.getstate()
    with pytest.raises(planner.CaptureError, match=words):
        planner.plan(model, args, kwargs, budget="min")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert [set(vars(part)) for part in model.modules()] == attributes
    assert modules.installed_call(model) is None
    assert torch.equal(torch.get_rng_state(), generator)
    assert random.getstate() == python


@pytest.mark.graphs
@pytest.mark.heavy
def test_the_coverage_is_shown() -> None:
    from rich.console import Console

    model, args, kwargs = graph_break_model()
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")))
    assert "as several graphs (2)" in console.export_text()


# ---- data decide ----------------------------------------------------------------------------------------


class LoopOverExperts(nn.Module):
    """A mixture of experts as Hugging Face's: a loop over those that are needed, numbers on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *size) / 8) for size in ((64, 32), (32, 64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        mask = F.one_hot(chosen, 5).permute(2, 1, 0)
        output = torch.zeros_like(x)
        for expert in mask.sum(dim=(-1, -2)).nonzero():
            expert = expert[0]
            if expert == 4:
                continue
            place, token = torch.where(mask[expert])
            wide = F.silu(F.linear(x[token], self.up[expert]))
            output.index_add_(0, token, F.linear(wide, self.down[expert]) * weights[token, place, None])
        return output.square().mean()


@pytest.mark.heavy
def test_a_loop_over_experts_is_replayed() -> None:
    torch.manual_seed(0)
    model, args = LoopOverExperts(), (torch.randn(48, 32),)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    assert plan.coverage == "replayed"
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


class ReadsNumbers(nn.Module):
    """Operators read a number from a tensor, as in Longformer's global attention."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        count = mask.long().sum(1).max()
        return self.global_part(F.gelu(self.before(x)), count)

    def global_part(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        globally = x.new_zeros(count, 64)
        assert list(globally.size()) == [count, 64]
        assert globally.size(0) == count
        globally = F.gelu(globally + x.narrow(0, 0, count)).cumsum(0)
        return self.after(torch.cat([globally, x], 0).tril(count)).square().mean()


@pytest.mark.heavy
def test_operators_that_read_a_number_from_a_tensor_are_planned_around() -> None:
    torch.manual_seed(0)
    model, x = ReadsNumbers(), torch.randn(48, 32)
    masks = [torch.arange(16) < length for length in (12, 7)]
    args = (x, masks[0].expand(2, 16))
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes

    def loop(module: nn.Module) -> list[torch.Tensor]:
        losses = []
        for mask in masks:
            module.zero_grad()
            losses.append(module(x, mask.expand(2, 16)))
            losses[-1].backward()
        return losses

    twin = copy.deepcopy(model)
    plan.apply(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a part of the forward that cannot be captured", planner.PlanWarning)
        assert_same(left_by(model, loop), left_by(twin, loop))


class DrawsAndCounts(nn.Module):
    """Python and PyTorch draw, data decide, and a buffer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for layer in self.layers:
            if random.random() < 0.7 and torch.rand(()).item() < 0.9:
                x = torch.tanh(layer(x))
        return x[x.mean(1) > 0].square().sum()


@pytest.mark.graphs
@pytest.mark.heavy
def test_a_run_with_data_changes_nothing_of_the_users() -> None:
    torch.manual_seed(0)
    model, x = DrawsAndCounts(), torch.randn(64, 32)
    before, inputs = {k: v.clone() for k, v in model.state_dict().items()}, x.clone()
    generator, python = torch.get_rng_state(), random.getstate()
    captured = capture(model, Step((x,)))
    assert captured.with_data
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(x, inputs)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    assert random.getstate() == python


@pytest.mark.heavy
def test_random_decisions_are_followed() -> None:
    torch.manual_seed(0)
    random.seed(3)
    planned((DrawsAndCounts().train(), (torch.randn(256, 32),), {}))


def test_without_data_what_data_decide_is_refused() -> None:
    model, args, _ = build("nn_routed_experts")
    with pytest.raises(planner.CaptureError, match="meta device"):
        planner.plan(model.to("meta"), [a.to("meta") for a in args], budget="min")


# ---- the path that eager takes --------------------------------------------------------------------------


class Asks(nn.Module):
    """Computes the same in another way where it is compiled."""

    def __init__(self, question: Callable[[], bool]) -> None:
        super().__init__()
        self.question, self.first, self.second = question, nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.first(x))
        x = x / 3.0 if self.question() else x * (1 / 3.0)
        return self.second(x).square().mean()


@pytest.mark.heavy
@pytest.mark.parametrize("question", [torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling])
def test_who_asks_whether_it_is_compiled_gets_eagers_answer(question: Callable[[], bool]) -> None:
    torch.manual_seed(0)
    assert planned((Asks(question).train(), (torch.randn(64, 64),), {})).coverage == "one-graph"


class Masked(nn.Module):
    """Skips the mask where nothing is masked, which eager finds out by looking."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = F.gelu(x) if bool(mask.all()) else torch.tanh(x) * mask[..., None]
        return self.second(x).square().mean()


@pytest.mark.graphs
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.heavy
def test_a_mask_decides_without_a_run(full: bool) -> None:
    torch.manual_seed(0)
    mask = torch.ones(64, dtype=torch.bool)
    mask[5] = full
    built: Built = (Masked().train(), (torch.randn(64, 64), mask), {})
    captured = capture(built[0], Step(built[1]))
    assert not captured.with_data
    names = {op.name for g in captured.graphs if g.joint is not None for op in g.joint.ops}
    assert ("aten.gelu.default" in names) == full
    planned(built)


def test_a_result_and_parts_of_it_without_a_gradient_need_no_data() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found = self.linear(x).exp()
            return found, found[:2].detach(), found.detach()

    captured = capture(Detached(), Step((torch.randn(4, 8),), {}))
    assert not captured.with_data
