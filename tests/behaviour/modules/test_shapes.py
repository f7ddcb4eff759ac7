"""Inputs of other shapes than planned."""

import copy
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
import planner.runtime.install
from planner._torch import dynamo
from planner.errors import PlanWarning
from planner.runtime.backend import PlanBackend
from planner.verification.measure import measure_peak
from tests.side_by_side import AfterALayer
from tests.small import classifier, layers_with_graph_breaks, logits_loss, small_gpt, small_resnet
from tests.zoo import GPT


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of inputs of every graph that Dynamo hands to a planned module's backend."""
    made: list[int] = []
    run = PlanBackend.__call__

    def counted(self, graph, example_inputs):  # type: ignore[no-untyped-def]
        made.append(len(example_inputs))
        return run(self, graph, example_inputs)

    monkeypatch.setattr(PlanBackend, "__call__", counted)
    return made


def _step(model: nn.Module, *args: torch.Tensor, seed: int = 1) -> list[torch.Tensor | None]:
    """Loss, gradients and the random state after a training step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(*args)
    loss.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [loss.detach(), torch.get_rng_state(), *[b.clone() for b in model.buffers()], *gradients]


def _assert_same_step(planned: nn.Module, twin: nn.Module, *args: torch.Tensor) -> None:
    for found, expected in zip(_step(planned, *args), _step(twin, *args), strict=True):
        assert (found is None) == (expected is None)
        assert found is None or expected is None or torch.equal(found, expected)


def _peak(model: nn.Module, *args: torch.Tensor) -> int:
    model.zero_grad(set_to_none=True)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(*args)
        loss.backward()
        return loss

    return measure_peak(step, "cpu").peak_bytes


def _words(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 50, (batch, length)), torch.randint(0, 50, (batch, length))


def _gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(words=50, width=16, heads=2, layers=2, context=128).train()


def _bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=128,
    )  # fmt: skip

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertForMaskedLM(config)

        def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.bert(input_ids=words, labels=labels).loss
            return loss

    return WithLoss().train()


@pytest.mark.heavy
@pytest.mark.parametrize("builder", [_bert])
def test_a_hundred_lengths_are_a_few_captures(builder: Callable[[], nn.Module], captures: list[int]) -> None:
    model, planned_args = builder(), _words(2, 102)
    twin = copy.deepcopy(model)
    plan = planner.plan(model, planned_args, budget="min", solver="sqrt_n")
    assert plan.graphs[0].recomputed
    plan.apply(model)
    lengths = random.Random(0).sample(range(3, 103), 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        for length in [102, *lengths]:
            args = _words(2, length)
            _assert_same_step(model, twin, *args)
    assert len(captures) <= 4
    # Sizes as symbols free what the plan frees.
    assert _peak(model, *planned_args) == plan.predicted.dynamic_peak_bytes
    shorter = [_peak(model, *_words(2, length)) for length in (100, 50, 10)]
    assert shorter == sorted(shorter, reverse=True)
    assert shorter[0] < plan.predicted.dynamic_peak_bytes


@pytest.mark.heavy
def test_batches_and_image_sizes_vary_too(captures: list[int]) -> None:
    model, args, _ = small_resnet(6)
    twin = copy.deepcopy(model)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        for batch, size in [(6, 16), (5, 16), (4, 16), (4, 12), (3, 14), (6, 16), (2, 10)]:
            images = torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))
            _assert_same_step(model, twin, *images)
    assert len(captures) <= 4
    assert _peak(model, *args) == plan.predicted.dynamic_peak_bytes


@pytest.mark.heavy
def test_graphs_around_graph_breaks_take_other_batches_by_their_own_plans(captures: list[int]) -> None:
    model, args, _ = layers_with_graph_breaks()
    twin = copy.deepcopy(model)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    plan.apply(model)
    for batch in (64, 48, 32, 17, 64):
        _assert_same_step(model, twin, torch.randn(batch, 32))
    assert len(captures) <= 2 * len(plan.graphs)
    assert _peak(model, *args) == plan.predicted.dynamic_peak_bytes


class KeepsAHidden(nn.Module):
    """Several graphs whose sizes vary, and an output that the loss leaves unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.aside = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        count = len(x) * 2
        aside = self.aside(x).tanh()
        y = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return {"loss": (self.second(y) * y).square().sum() / count, "hidden": aside}


@pytest.mark.graphs
@pytest.mark.heavy
def test_an_unused_output_stays_unused_at_other_batches(captures: list[int]) -> None:
    torch.manual_seed(0)
    model = KeepsAHidden().train()
    twin = copy.deepcopy(model)
    plan = planner.plan(
        model, (torch.randn(32, 16),), loss=lambda output: output["loss"], budget="min", solver="sqrt_n"
    )
    assert any(graph.unused_outputs for graph in plan.graphs)
    plan.apply(model)
    for batch in (32, 20, 24, 9):
        x = torch.randn(batch, 16)
        for each in (model, twin):
            each.zero_grad()
            each(x)["loss"].backward()
        for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
            assert (found.grad is None) == (expected.grad is None)
            assert found.grad is None or torch.equal(found.grad, expected.grad)
        assert model.aside.weight.grad is None
        with pytest.raises(planner.PlanMismatch, match="did not use"):
            model(x)["hidden"].sum().backward()
    assert len(captures) <= 2 * len(plan.graphs)  # once as planned, and once for all others


def _announced(text: str) -> int:
    found = re.search(r"([\d,]+) bytes of that are its own", text)
    assert found is not None
    return int(found[1].replace(",", ""))


@pytest.mark.heavy
def test_a_larger_shape_is_announced_with_its_peak() -> None:
    model, args, _ = small_gpt(2)
    twin = copy.deepcopy(model)
    plan = planner.plan(model, args, budget="70%", solver="sqrt_n")
    plan.apply(model)
    larger = small_gpt(5)[1]
    with pytest.warns(PlanWarning, match="larger than .* planned: words is 5x32, planned was 2x32"):
        _assert_same_step(model, twin, *larger)
    plan.apply(model)
    with pytest.warns(PlanWarning, match="over the budget") as reported:
        _step(model, *larger)
    announced = _announced(str(reported[0].message))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        assert _peak(model, *larger) == announced > plan.predicted.dynamic_peak_bytes
        _assert_same_step(model, twin, *larger)
        _assert_same_step(model, twin, *small_gpt(4)[1])  # covered by what was announced
        _assert_same_step(model, twin, *args)


@pytest.mark.heavy
def test_a_peak_is_announced_where_the_loss_is_outside() -> None:
    model, args, _ = classifier()
    planner.plan(model, args, budget="min", solver="sqrt_n", loss=logits_loss).apply(model)

    def step() -> torch.Tensor:
        loss = logits_loss(model(torch.randn(100, 16)))
        loss.backward()
        return loss

    with pytest.warns(PlanWarning, match="bytes of that are its own") as reported:
        step()
    announced = _announced(str(reported[0].message))
    model.zero_grad(set_to_none=True)
    x = torch.randn(100, 16)

    def again() -> object:
        output = model(x)
        loss = logits_loss(output)
        loss.backward()
        return output, loss

    assert measure_peak(again, "cpu").peak_bytes == announced


@pytest.mark.heavy
def test_replan_keeps_the_budget_or_says_that_it_cannot() -> None:
    model, args, _ = small_gpt(2)
    twin = copy.deepcopy(model)
    plan = planner.plan(model, args, budget="80%", solver="sqrt_n")
    plan.apply(model, on_new_shape="replan")
    budget = plan.target.budget_bytes
    assert budget is not None
    larger = small_gpt(3)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        _assert_same_step(model, twin, *larger)
        inputs = sum(x.nbytes for x in larger)
        resident = plan.resident.total - plan.resident.input_bytes + inputs
        assert resident + _peak(model, *larger) <= budget
        _assert_same_step(model, twin, *args)
        assert _peak(model, *args) == plan.predicted.dynamic_peak_bytes
    with pytest.raises(planner.InfeasibleBudget):
        model(*small_gpt(12)[1])
    _assert_same_step(model, twin, *larger)


@pytest.mark.heavy
def test_error_refuses_before_anything_is_computed() -> None:
    model, args, _ = small_gpt(4)
    twin = copy.deepcopy(model)
    planner.auto_checkpoint(model, args, budget="min", solver="sqrt_n", on_new_shape="error")
    called: list[int] = []
    model.get_submodule("words").register_forward_pre_hook(lambda *_: called.append(1))
    for batch in (3, 5):
        other = _words(batch, 32)
        state = torch.get_rng_state()
        with pytest.raises(planner.PlanMismatch, match=f"words is {batch}x32, planned was 4x32"):
            model(*other)
        assert torch.equal(torch.get_rng_state(), state)
    assert not called
    _assert_same_step(model, twin, *args)
    assert model(words=args[0], targets=args[1]).requires_grad  # by name or position, it is the same shape
    model.eval()
    assert isinstance(model(*small_gpt(3)[1]), torch.Tensor)


@pytest.mark.heavy
def test_policies_are_distinguished() -> None:
    model, args, _ = small_gpt(2)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    with pytest.raises(ValueError, match="'bucket'; expected one of reapply, replan, error"):
        plan.apply(model, on_new_shape="bucket")  # type: ignore[arg-type]
    assert planner.runtime.install.installed_plan(model) is None


def test_a_module_that_changes_with_every_call_is_given_up_aloud(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mode = nn.Linear(8, 8), "a"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).tanh().sum() if self.mode else x.sum()

    monkeypatch.setitem(dynamo._DYNAMO_CONFIG, "recompile_limit", 2)
    torch.manual_seed(0)
    model, x = Changing(), torch.randn(4, 8)
    planner.plan(model, (x,), budget="200%", solver="none").apply(model)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        for model.mode in ("a", "b"):
            model(x)
    model.mode = "c"
    with pytest.warns(PlanWarning, match="PyTorch gives up"):
        _assert_same_step(model, twin, x)


@pytest.mark.heavy
def test_what_cannot_be_traced_at_symbolic_sizes_is_compiled_for_a_few_shapes(
    captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(8, 8, num_layers=2, dropout=0.1, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.layers(x)[0].tanh().square().mean()
            return loss

    monkeypatch.setattr("planner.runtime.shapes.per_shape.MOST_SHAPES", 3)
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(12, 5, 8)
    twin = copy.deepcopy(model)
    plan = planner.plan(model, (x,), budget="min", solver="sqrt_n")
    plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        for batch in (12, 8, 7, 6, 7):
            _assert_same_step(model, twin, torch.randn(batch, 5, 8))
    smaller = [_peak(model, torch.randn(batch, 5, 8)) for batch in (8, 7, 6)]
    assert smaller == sorted(smaller, reverse=True)
    with pytest.warns(PlanWarning, match="sizes 5 run without the plan"):
        _assert_same_step(model, twin, torch.randn(5, 5, 8))
    assert len(captures) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        _assert_same_step(model, twin, x)


def test_new_shapes_count_gradients_that_the_plan_counts() -> None:
    """As at the first of several micro-batches, where they are not there yet."""
    model = AfterALayer(torch.tanh)
    _step(model, torch.randn(8, 64))
    planner.plan(model, torch.randn(8, 64), budget="100%").apply(model, on_new_shape="replan")
    model.zero_grad()
    with pytest.raises(planner.InfeasibleBudget):
        model(torch.randn(16, 64))


class OfSeveral(nn.Module):
    """Takes one by position alone, some in a mapping, some in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, /, y: torch.Tensor, *, named: Any = None, listed: Any = ()
    ) -> torch.Tensor:
        others = [*(named or {}).values(), *listed]
        loss: torch.Tensor = self.layer(x).sum() + sum(t.sum() for t in (y, *others) if t is not None)
        return loss


def test_all_that_differs_is_refused() -> None:
    model, x, y = OfSeveral(), torch.randn(4, 8), torch.randn(4)
    planner.plan(
        model, (x,), {"y": y, "named": {"a": y, "b": y}, "listed": [y, None]}, budget="1GiB", backend="graph"
    ).apply(model, on_new_shape="error")
    named, listed = {"a": y, "b": y}, [y, None]
    model(x, y=y, named=named, listed=listed)
    for args, kwargs, text in (
        ((torch.randn(5, 8),), {"named": named, "listed": listed}, "is 5x8, planned was 4x8"),
        ((x,), {"named": {"a": y, "c": y}, "listed": listed}, r"named\['c'\] is 4, not planned"),
        ((x,), {"named": named, "listed": [None, y]}, r"listed\[1\] is 4, not planned"),
    ):
        with pytest.raises(planner.PlanMismatch, match=text):
            model(*args, y=y, **kwargs)
