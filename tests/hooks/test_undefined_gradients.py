"""Steps in which some of what a part made gets no gradient, with Python's autograd functions behind it."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import planner
from planner._torch import fake
from planner._torch.autograd import leave_out_hooks_without_gradients, running_node
from planner.errors import FreedError
from tests.side_by_side import no_plan_warnings
from tests.small import both_loss, classifier

CALLED: list[torch.Tensor] = []
HOOKED: list[tuple[Any, ...]] = []
NODES: list[weakref.ref[Any]] = []


def _note(call: tuple[Any, ...]) -> None:
    """Remember a call of a hook, but for those without data: planning would look for what holds them."""
    if not any(fake.is_fake(value) for value in pytree.tree_leaves(call)):
        HOOKED.append(call)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        NODES.append(weakref.ref(ctx))
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        CALLED.append(gradients[0])
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


@torch.compiler.disable
def _function(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Squared.apply(inner(x))


@torch.compiler.disable
def _recomputed(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(inner, x, use_reentrant=True)
    return Squared.apply(result)


class Between(nn.Module):
    """Between two graphs something runs as written; the first output needs nothing of it."""

    def __init__(self, between: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.between = between
        self.body, self.inner, self.first, self.second = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.between(self.inner, torch.tanh(self.body(x)))
        torch._dynamo.graph_break()
        return self.first(x), self.second(hidden)


@pytest.mark.graphs
@pytest.mark.parametrize("between", [_function, _recomputed])
def test_functions_of_python_do_nothing_without_a_gradient(between: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Between(between).train(), torch.randn(24, 32)
    planned = copy.deepcopy(model)
    plan = planner.plan(planned, (x,), loss=lambda y: (y[0] + y[1]).sum(), budget="min", solver="sqrt_n")
    plan.apply(planned)
    for used in ([0], [0, 1], [1], [0]):
        calls = []
        for each in (model, planned):
            CALLED.clear()
            each.zero_grad()
            outputs = each(x)
            torch.stack([outputs[i].square().sum() for i in used]).sum().backward()
            calls.append(len(CALLED))
        assert calls[0] == calls[1]
        for ours, theirs in zip(planned.parameters(), model.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_a_function_that_did_nothing_goes_with_its_step() -> None:
    model, x = Between(_function).train(), torch.randn(24, 32)
    plan = planner.plan(model, (x,), loss=lambda y: (y[0] + y[1]).sum(), budget="min", solver="sqrt_n")
    plan.apply(model)(x)[0].sum().backward()
    NODES.clear()
    gc.collect()
    gc.disable()
    try:
        model(x)[0].sum().backward()
        assert len(NODES) == 1
        assert NODES[0]() is None
    finally:
        gc.enable()


@torch.compiler.disable
def _hooked(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: _note(("input", gradient)))
    result: torch.Tensor = inner(x)
    result.register_hook(lambda gradient: _note(("result", gradient)))
    return result


@pytest.mark.heavy
def test_hooks_of_modules_and_outputs_are_not_called_without_a_gradient() -> None:
    model = Between(_hooked).train()
    x = torch.randn(24, 32)
    planned = copy.deepcopy(model)
    for each in (model, planned):
        each.inner.register_full_backward_pre_hook(lambda _, outer: _note(("before", outer)))
        each.inner.register_full_backward_hook(lambda _, inner, outer: _note(("module", inner, outer)))
    plan = planner.plan(planned, (x,), loss=lambda y: (y[0] + y[1]).sum(), budget="min", solver="sqrt_n")
    plan.apply(planned)
    for used in ([0], [0, 1], [1], [0]):
        calls = []
        for each in (model, planned):
            HOOKED.clear()
            outputs = each(x)
            for i, output in enumerate(outputs):
                output.register_hook(lambda gradient, i=i: _note((str(i), gradient)))
            torch.stack([outputs[i].square().sum() for i in used]).sum().backward()
            calls.append(sorted(HOOKED, key=lambda call: call[0]))
        theirs, ours = calls
        assert [call[0] for call in ours] == [call[0] for call in theirs]
        for our, their in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
            assert our == their if isinstance(our, str) else torch.equal(our, their)


def test_a_hook_that_is_taken_from_an_output_is_not_called() -> None:
    model, x = Between(_function).train(), torch.randn(24, 32)
    plan = planner.plan(model, (x,), loss=lambda y: (y[0] + y[1]).sum(), budget="min", solver="sqrt_n")
    first, second = plan.apply(model)(x)
    called: list[torch.Tensor] = []
    handle = first.register_hook(called.append)
    second.register_hook(lambda gradient: 2 * gradient)
    handle.remove()
    (first + second).sum().backward()
    assert not called
    bias = model.second.bias.grad
    assert bias is not None
    assert torch.equal(bias, torch.full((32,), 48.0))


def test_a_backward_that_an_error_ended_decides_nothing_for_the_next() -> None:
    model, (x,), _ = classifier()
    planned = copy.deepcopy(model)
    planner.plan(planned, x, loss=both_loss, budget="min", solver="sqrt_n", backend="graph").apply(planned)
    outputs = planned(x)
    outputs["logits"].sum().backward()
    with pytest.raises(FreedError):
        outputs["extra"].sum().backward()
    for each in (model, planned):
        each.zero_grad()
        torch.manual_seed(0)
        both_loss(each(x)).backward()
    for ours, theirs in zip(planned.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_guards_do_not_add_up_on_a_leafs_node_that_something_holds() -> None:
    """As the reducer of DistributedDataParallel does."""
    weight = nn.Parameter(torch.ones(2))
    weight.register_post_accumulate_grad_hook(lambda _: None)
    held: Any = weight.expand_as(weight).grad_fn
    hooks = held.next_functions[0][0].register_prehook(lambda _: None).hooks_dict_ref()
    for _ in range(3):
        made = weight * 2
        made.grad_fn.register_prehook(lambda _: leave_out_hooks_without_gradients(running_node(), []))
        made.sum().backward()
    assert len(hooks) == 1


class _Unused(torch.autograd.Function):
    """Stands for a planned graph: its weight gets no gradient."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x + 0 * weight

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        leave_out_hooks_without_gradients(running_node(), [])
        return gradients[0], None


def test_none_of_several_hooks_after_accumulation_is_called_without_a_gradient() -> None:
    x, weight, called = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), list[int]()
    for number in range(3):
        for leaf in (x, weight):
            leaf.register_post_accumulate_grad_hook(
                lambda leaf, n=number: called.append((leaf is x) * 10 + n)
            )
    for _ in range(2):
        called.clear()
        _Unused.apply(x, weight).sum().backward()
        assert called == [10, 11, 12]


class OfBoth(torch.autograd.Function):
    """Its backward makes something of a gradient that is zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * 2 * (gradients[1] + 1), None


class OfNone(torch.autograd.Function):
    """An auxiliary loss: its gradient is of no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, auxiliary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(auxiliary)
        return x * 1, x.cos().detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0] * 1, torch.ones_like(ctx.saved_tensors[0])


class Fused(torch.autograd.Function):
    """Its backward hands on a gradient that the forward computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(torch.tanh(x))
        return (x * x).sum(), x.cos().detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


class WithFunction(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function
        self.first, self.gate, self.last = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.first(x))
        y, z = self.function.apply(h, self.gate(h).sum())
        return (y if y.dim() == 0 else torch.tanh(self.last(y))), z + h


@pytest.mark.parametrize("function", [OfBoth, OfNone, Fused])
@pytest.mark.parametrize("trained_by", [0, 1])
def test_what_a_users_backward_does_without_a_gradient(
    function: type[torch.autograd.Function], trained_by: int
) -> None:
    torch.manual_seed(0)
    model, x = WithFunction(function), torch.randn(16, 8)

    def step(one: nn.Module) -> list[torch.Tensor | None]:
        one.zero_grad()
        one(x)[trained_by].sum().backward()
        return [p.grad for p in one.parameters()]

    expected = step(copy.deepcopy(model))
    options: dict[str, Any] = {"budget": "min", "loss": lambda y: y[0].sum() + y[1].sum()}
    with no_plan_warnings():
        replayed = planner.plan(model, (x,), **options)
    assert replayed.target.backend == "replay"
    replayed.apply(model)
    for wanted, found in zip(expected, step(model), strict=True):
        assert (wanted is None) is (found is None)
        assert wanted is None or torch.equal(wanted, found)  # type: ignore[arg-type]
    planner.remove(model)
    with pytest.warns(planner.PlanWarning, match=r"autograd\.Function"):
        planner.plan(model, (x,), backend="graph", **options).apply(model)
    with pytest.raises(planner.PlanMismatch, match=r"autograd\.Function"):
        step(model)


class Changing(nn.Module):
    """Returns what it was given, changed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, h: torch.Tensor, k: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h += torch.tanh(self.up(z))
        k += torch.sin(self.down(z))
        return h, k


class TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.block = nn.Linear(8, 8), nn.Linear(8, 8), Changing()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, k = self.block(self.first(x), self.second(x), x * 2)
        return h.square().mean(), k.square().mean()


@pytest.mark.graphs
def test_a_graph_that_changes_its_inputs_has_hooks_too() -> None:
    torch.manual_seed(0)
    model, x = TwoStreams(), torch.randn(16, 8)
    twin = copy.deepcopy(model)
    planner.plan(model, (x,), budget="min", regions=["block"], loss=lambda y: y[0] + y[1]).apply(model)
    for one in (model, twin):
        one(x)[0].backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.graphs
@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
def test_what_has_no_gradient_is_zeros_of_the_present_size() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = torch.tanh(self.wide(x)).chunk(2, -1)
            return torch.tanh(self.first(a)).square().sum(), torch.tanh(self.second(b)).square().sum()

    torch.manual_seed(0)
    model = Halves()
    twin = copy.deepcopy(model)
    planner.plan(model, (torch.randn(16, 8),), budget="min", loss=lambda y: y[0] + y[1]).apply(model)
    for rows in (16, 12, 20):
        x = torch.randn(rows, 8)
        for one in (model, twin):
            one.zero_grad()
            one(x)[0].backward()
        assert model.wide.weight.grad is not None
        assert twin.wide.weight.grad is not None
        assert torch.equal(model.wide.weight.grad, twin.wide.weight.grad)


@pytest.mark.graphs
def test_a_sparse_gradient_at_an_output_is_refused() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 4))

        def forward(self, scale: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.weight * scale).sin()

    model, scale = Table(), torch.ones(())
    planner.plan(model, (scale,), budget="min", loss=torch.sum).apply(model)
    looked_up = nn.functional.embedding(torch.tensor([1, 2, 1]), model(scale), sparse=True)
    with pytest.raises(planner.PlanMismatch, match="sparse gradient"):
        looked_up.sum().backward()
