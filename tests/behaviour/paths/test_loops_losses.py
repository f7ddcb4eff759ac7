"""Training loops with several losses, outputs without one, derivatives of gradients, with and without a plan.

What they leave is equal bit for bit.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner.errors import PlanWarning
from tests.side_by_side import (
    Layers,
    assert_same,
    assert_trains_alike,
    layers,
    left_by,
    plan_of,
)


class TwoHeads(nn.Module):
    """Two outputs, each with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Layers(3)
        self.head, self.extra = nn.Linear(32, 5), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.body.run(x)
        return {"logits": self.head(x), "extra": self.extra(x).exp().log()}


def logits_loss(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output["logits"], torch.zeros(len(output["logits"]), dtype=torch.long))


def extra_loss(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["extra"].square().mean()


def both_losses(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return logits_loss(output) + extra_loss(output)


@pytest.mark.heavy
def test_two_losses_with_a_backward_each() -> None:
    model, args, _ = layers(TwoHeads)

    def loop(model: nn.Module) -> list[Any]:
        output = model(*args)
        logits_loss(output).backward(retain_graph=True)
        between = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        extra_loss(output).backward()
        return [between, output]

    assert_trains_alike(model, args, loop, expected_runs=2, loss=both_losses)


@pytest.mark.heavy
@pytest.mark.parametrize("loss", [logits_loss, extra_loss])
def test_an_output_that_the_loss_stops_using_leaves_no_gradient(loss: Callable[..., torch.Tensor]) -> None:
    model, args, _ = layers(TwoHeads)

    def loop(model: nn.Module) -> list[Any]:
        # Weight decay tells a gradient of zeros from none at all.
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.5)
        for chosen in (both_losses, loss, both_losses):
            optimizer.zero_grad()
            chosen(model(*args)).backward()
            optimizer.step()
        loss(model(*args)).backward()
        return []

    assert_trains_alike(model, args, loop, expected_runs=4, loss=both_losses)


class HeadsBehindABreak(nn.Module):
    """Two heads; what one of them alone reads is a graph with a single result."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.logits, self.extra = nn.Linear(32, 32), nn.Linear(32, 5), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        behind = torch.tanh(self.body(x))
        torch._dynamo.graph_break()
        return {"logits": self.logits(x), "extra": self.extra(behind)}


def test_a_graph_with_one_result_that_the_loss_stops_using_leaves_no_gradient() -> None:
    model, args, _ = layers(HeadsBehindABreak)
    plan_of(model, args, loss=both_losses).apply(model)
    logits_loss(model(*args)).backward()
    assert model.body.weight.grad is None
    model.zero_grad()
    both_losses(model(*args)).backward()
    assert model.body.weight.grad is not None


@pytest.mark.heavy
def test_a_gradient_that_is_not_there_is_not_a_zero_that_meets_infinity() -> None:
    class Infinite(TwoHeads):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            output = super().forward(x)
            return {**output, "extra": (output["extra"] - output["extra"].detach()).abs().log()}

    model, args, _ = layers(Infinite)

    def loop(model: nn.Module) -> torch.Tensor:
        loss = logits_loss(model(*args))
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        return loss

    assert_trains_alike(model, args, loop, expected_runs=1, loss=both_losses)


@pytest.mark.graphs
@pytest.mark.heavy
def test_an_intermediate_loss_across_a_graph_break() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.early = Layers(3), Layers(3), nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.first.run(x)
            early = self.early(x).square().mean()
            torch._dynamo.graph_break()
            return early, self.second(x)

    model, args, _ = layers(Early)

    def loop(model: nn.Module) -> list[torch.Tensor]:
        early, late = model(*args)
        late.backward(retain_graph=True)
        (early * late).backward()
        early, late = model(*args)
        early.backward()
        return [early, late]

    plan = assert_trains_alike(model, args, loop, expected_runs=5, loss=sum)
    assert plan.coverage == "several-graphs"


@pytest.mark.heavy
def test_inputs_that_need_gradients() -> None:
    model, args, _ = layers()
    x, before = args[0].requires_grad_(), nn.Linear(32, 32)

    def loop(model: nn.Module) -> list[torch.Tensor]:
        x.grad = None
        before.zero_grad()
        losses = [model(x), model(before(x)), model(x.detach())]
        for loss in losses:
            loss.backward()
        assert x.grad is not None
        assert before.weight.grad is not None
        return [*losses, x.grad, before.weight.grad]

    assert_trains_alike(model, (x,), loop, expected_runs=3)


@pytest.mark.heavy
def test_an_input_that_needs_a_gradient_unplanned_is_said_and_right() -> None:
    model, args, _ = layers()
    twin = copy.deepcopy(model)
    plan_of(model, args).apply(model)
    x = args[0].clone().requires_grad_()

    def loop(model: nn.Module) -> list[torch.Tensor]:
        x.grad = None
        loss = model(x)
        loss.backward()
        assert x.grad is not None
        return [loss, x.grad]

    with pytest.warns(PlanWarning, match="other parameters to train"):
        ours = left_by(model, loop)
    assert_same(ours, left_by(twin, loop))


@pytest.mark.heavy
def test_autograd_grad_of_some_and_of_all_parameters() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[Any]:
        parameters = list(model.parameters())
        loss = model(*args)
        every = torch.autograd.grad(loss, parameters)
        loss = model(*args)
        some = torch.autograd.grad(loss * 2, parameters[3:5])
        assert all(p.grad is None for p in parameters)
        return [every, some]

    assert_trains_alike(model, args, loop, expected_runs=2)


@pytest.mark.heavy
def test_retain_graph() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = model(*args)
        loss.backward(retain_graph=True)
        (2 * loss).backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return loss

    assert_trains_alike(model, args, loop, expected_runs=3)


class Critic(nn.Module):
    """Smooth, without dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        body = [(nn.Linear(16, 64), nn.Softplus(), nn.Linear(64, 16), nn.Tanh()) for _ in range(4)]
        self.body = nn.Sequential(*(layer for part in body for layer in part), nn.Dropout(dropout))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def _critic(dropout: float = 0.0) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Critic(dropout), torch.randn(64, 16, requires_grad=True)
    twin = copy.deepcopy(model)
    plan = plan_of(model, (x,), loss=torch.sum)
    assert plan.graphs[0].recomputed
    return plan.apply(model), twin, x


@pytest.mark.heavy
def test_a_gradient_penalty_falls_back_to_the_original_and_says_so() -> None:
    model, twin, x = _critic()

    def loop(model: nn.Module) -> list[torch.Tensor]:
        optimizer, left = torch.optim.Adam(model.parameters(), 1e-2), []
        for _ in range(2):
            optimizer.zero_grad()
            (model(x + 1).mean() - model(x.detach()).mean()).backward()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            penalty.backward()
            optimizer.step()
            left += [slope, penalty]
        return left

    with pytest.warns(PlanWarning, match="create_graph"):
        ours = left_by(model, loop)
    assert_same(ours, left_by(twin, loop))


@pytest.mark.heavy
def test_a_second_derivative_by_what_the_output_was_multiplied_with() -> None:
    model, twin, x = _critic()
    factor = torch.ones((), requires_grad=True)

    def loop(model: nn.Module) -> list[Any]:
        factor.grad = None
        (slope,) = torch.autograd.grad(model(x).sum() * factor, x, create_graph=True)
        slope.square().sum().backward()
        return [slope, factor.grad]

    ours = left_by(model, loop)
    assert_same(ours, left_by(twin, loop))


@pytest.mark.heavy
def test_a_backward_for_each_of_several_outputs_needs_retain_graph() -> None:
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(64, 32)
    twin = copy.deepcopy(model)
    plan_of(model, (x,), loss=lambda output: output["logits"].sum() + output["extra"].sum()).apply(model)

    def loop(model: nn.Module, keep: bool = True) -> None:
        output = model(x)
        output["logits"].square().sum().backward(retain_graph=keep)
        output["extra"].square().sum().backward()

    with pytest.warns(PlanWarning, match="retain_graph=True"):
        ours = left_by(model, loop)
    assert_same(ours, left_by(twin, loop))
    with pytest.raises(planner.PlanMismatch, match=r"a second time.*\(a \+ b\)\.backward.*retain_graph=True"):
        loop(model, keep=False)


@pytest.mark.heavy
def test_a_second_derivative_through_random_numbers_is_an_error() -> None:
    model, _, x = _critic(0.5)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(planner.PlanMismatch, match=r"draws random numbers.*planner\.remove"):
        slope.square().sum().backward()
    planner.remove(model)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()


@pytest.mark.heavy
@pytest.mark.parametrize("asked", ["parameters", "leaf", "computed", "factor"])
def test_no_second_derivative_through_random_numbers_lacks_a_part(asked: str) -> None:
    """The rest of the loss has a gradient, and that of the slope would be left out without a word."""
    model, _, x = _critic(0.5)
    leaf, factor = x.detach().requires_grad_(), torch.ones((), requires_grad=True)
    computed = leaf * 1
    (slope,) = torch.autograd.grad(model(computed * 1).sum() * factor, leaf, create_graph=True)
    loss = slope.square().sum() + sum(p.sum() for p in model.parameters()) + computed.sum() + factor
    of = {"parameters": [*model.parameters()], "leaf": [leaf], "computed": [computed], "factor": [factor]}
    with pytest.raises(planner.PlanMismatch, match=r"draws random numbers.*planner\.remove"):
        torch.autograd.grad(loss, of[asked])


@pytest.mark.heavy
def test_a_second_derivative_after_the_weights_have_changed_is_an_error() -> None:
    model, _, x = _critic()
    output = model(x).sum()
    with torch.no_grad():
        model.head.bias.add_(1)  # type: ignore[operator, union-attr]
    (slope,) = torch.autograd.grad(output, x, create_graph=True)
    with pytest.raises(planner.PlanMismatch, match="have been changed since"):
        slope.square().sum().backward(retain_graph=True)
    with pytest.raises(planner.PlanMismatch, match="have been changed since"):
        torch.autograd.grad(slope.square().sum(), [*model.parameters()], allow_unused=True)


@pytest.mark.heavy
def test_a_loss_that_is_kept_does_not_keep_the_inputs() -> None:
    model, _, x = _critic()
    losses, batches = [], []
    for _ in range(2):
        batch = x.detach().clone()
        batches.append(weakref.ref(batch.untyped_storage()))
        losses.append(model(batch).sum())
        losses[-1].backward()
        del batch
    assert [batch() for batch in batches] == [None, None]
