"""Transforms, forward-mode differentiation and hooks on saved tensors, around a planned step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import planner
from tests.side_by_side import Layers, assert_same, counting_runs, layers, left_by, no_plan_warnings, plan_of

Loop = Callable[[Any, torch.Tensor], Any]


class Without(Layers):
    """Layers without dropout."""

    def __init__(self) -> None:
        super().__init__(2)
        for layer in self.layers:
            layer[2].p = 0.0  # type: ignore[index, union-attr]


def _vmap(model: Any, x: torch.Tensor) -> Any:
    return torch.vmap(model)(torch.stack([x, x + 1])).detach()


def _jvp(model: Any, x: torch.Tensor) -> Any:
    return [t.detach() for t in torch.func.jvp(model, (x,), (torch.ones_like(x),))]


def _of_each_sample(model: Any, x: torch.Tensor) -> Any:
    weights = {n: p.detach() for n, p in model.named_parameters()}

    def loss(weights: Any, one: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (one.unsqueeze(0),))

    return torch.vmap(torch.func.grad(loss), (None, 0))(weights, x)


def _dual(model: Any, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        return [result.primal.detach(), result.tangent.detach()]


def _rounded(model: Any, x: torch.Tensor) -> Any:
    with saved_tensors_hooks(lambda t: t.float().half(), lambda t: t.float()):
        loss = model(x)
    loss.backward()
    return loss.detach()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (_vmap, "torch.func.vmap is on"),
        (_jvp, "torch.func.jvp is on"),
        (_of_each_sample, "torch.func.grad is on"),
        (_dual, "forward-mode differentiation"),
        (_rounded, "saved_tensors_hooks are on"),
    ],
)
def test_the_step_runs_as_it_is_and_that_is_said(loop: Loop, said: str, lazily: bool) -> None:
    model, (x,), _ = layers(Without)
    twin = copy.deepcopy(model)
    if lazily:
        planner.auto_checkpoint(model, budget="min", solver="sqrt_n")
    else:
        plan_of(model, (x,)).apply(model)
    with pytest.warns(planner.PlanWarning, match=f"{said}.*without the plan"):
        ours = left_by(model, lambda model: loop(model, x))
    assert_same(ours, left_by(twin, lambda model: loop(model, x)))


def test_hooks_of_pytorchs_own_hand_back_what_they_were_given() -> None:
    model, (x,), _ = layers(Without)
    plan_of(model, (x,)).apply(model)
    with counting_runs() as runs, no_plan_warnings():
        with save_on_cpu():
            loss = model(x)
        loss.backward()
    assert runs.backward == 1


class Outputs(Without):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


def test_several_gradients_at_once_are_an_error_that_says_what_to_do() -> None:
    model, (x,), _ = layers(Outputs)
    plan_of(model, (x,), loss=torch.sum).apply(model)
    y = model(x)
    gradients = torch.randn(3, *y.shape)
    with pytest.raises(planner.PlanMismatch, match=r"is_grads_batched.*planner\.remove"):
        torch.autograd.grad(y, list(model.parameters()), gradients, is_grads_batched=True)


def test_a_plan_that_is_applied_between_a_forward_and_its_backward() -> None:
    model, args, _ = layers(Without)
    plan = plan_of(model, args)
    loss = model(*args)
    plan.apply(model)
    with no_plan_warnings():
        loss.backward()
    loss = model.forward(*args)
    with pytest.warns(planner.PlanWarning, match=r"not model\.forward\(x\)"):
        loss.backward()
