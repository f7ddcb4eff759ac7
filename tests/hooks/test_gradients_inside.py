"""Forwards that take gradients of their own results, by ``torch.autograd.grad`` or ``torch.func``.

What an inner gradient consists of are operations of the forward; the backward differentiates these again.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap

import planner
from tests.side_by_side import assert_same, counting_runs, left_by, no_plan_warnings, plan_of, step_of, steps

pytestmark = pytest.mark.heavy


class Network(nn.Module):
    """A small smooth network that models below differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


class InnerLoop(Network):
    """Two steps of gradient descent inside of the forward, as MAML takes them."""

    create_graph = True

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        for _ in range(2):
            loss = functional_call(self.net, weights, (x,)).square().mean()
            found = torch.autograd.grad(loss, list(weights.values()), create_graph=self.create_graph)
            weights = {k: v - 0.1 * g for (k, v), g in zip(weights.items(), found, strict=True)}
        result: Tensor = functional_call(self.net, weights, (x,)).square().mean()
        return result


class FirstOrder(InnerLoop):
    create_graph = False


class Equation(Network):
    """The residual of a differential equation, with second derivatives by the inputs."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return (first[:, 1] - second[:, 0]).square().mean()


class Forces(Network):
    """An energy and its gradients by the positions, as potentials between atoms have them; with dropout."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x.requires_grad_()
        distances = (x[:, None] - x[None]).square().sum(-1, keepdim=True) + 1
        energy = self.net(nn.functional.dropout(x[:, None] / distances, 0.1)).sum()
        forces = -torch.autograd.grad(energy, x, create_graph=True)[0]
        return {"loss": forces.square().mean() + 1e-4 * energy, "energy": energy, "forces": forces}


class Penalty(Network):
    """A critic with a gradient penalty at random points between two batches."""

    def forward(self, x: Tensor) -> Tensor:
        between = (torch.rand(len(x), 1) * x + 1).requires_grad_()
        (slope,) = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)
        return self.net(x).mean() + 10 * (slope.norm(2, 1) - 1).square().mean()  # type: ignore[no-any-return]


class Transforms(Network):
    """Gradients by ``torch.func``."""

    def forward(self, x: Tensor) -> Tensor:
        def energy(point: Tensor) -> Tensor:
            result: Tensor = self.net(point).squeeze()
            return result

        slopes = vmap(grad(energy))(x)
        _, along = jvp(self.net, (x,), (torch.ones_like(x),))
        return slopes.square().mean() + along.square().mean()


class Curvature(Network):
    """A second derivative by ``torch.func``, which runs with data alone."""

    def forward(self, x: Tensor) -> Tensor:
        return vmap(hessian(lambda point: self.net(point).squeeze()))(x).square().mean()


class Reversed(torch.autograd.Function):
    """A layer that keeps its results only; its backward computes the layer again and differentiates it."""

    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, layer: nn.Module, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.layer = layer
        left = left + layer(right)
        ctx.save_for_backward(left, right)
        return left, right.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        right = ctx.saved_tensors[1].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.layer(right)
        by = (right, *ctx.layer.parameters())
        through, *weights = torch.autograd.grad(result, by, gradients[0])
        return (gradients[0], gradients[1] + through, None, *weights)


class Reversible(nn.Module):
    """Layers whose backward takes gradients by itself, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)) for _ in "ab"
        )

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.sin(), x.cos()
        for layer in self.layers:
            right, left = Reversed.apply(left, right, layer, *layer.parameters())
        return (left * right).square().mean()


def _batch() -> tuple[Tensor]:
    torch.manual_seed(1)
    return (torch.randn(16, 2),)


def _loss(model: nn.Module) -> list[Tensor]:
    losses = []
    for _ in range(2):
        output = model(*_batch())
        losses.append(output["loss"] if isinstance(output, dict) else output)
        losses[-1].backward()
    return losses


_PLANNED = [InnerLoop, FirstOrder, Penalty, Transforms, Reversible]


@pytest.mark.graphs
@pytest.mark.parametrize("build", _PLANNED)
def test_gradients_inside_of_a_forward_are_operations_of_it(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, args = build(), _batch()
    twin = copy.deepcopy(model)
    plan = plan_of(model, args, accumulate=True)
    assert plan.coverage == "one-graph"
    assert plan.recomputed_operations or build in (FirstOrder, Reversible)
    plan.apply(model)
    with counting_runs() as runs, no_plan_warnings():
        ours = left_by(model, _loss)
    assert runs.backward == 2
    assert_same(ours, left_by(twin, _loss))


@pytest.mark.filterwarnings("ignore:PyTorch traces this model into other operations")
def test_a_second_derivative_by_functions_is_right() -> None:
    torch.manual_seed(0)
    model = Curvature()
    twin = copy.deepcopy(model)
    plan_of(model, _batch(), accumulate=True).apply(model)
    assert_same(left_by(model, _loss), left_by(twin, _loss))


@pytest.mark.graphs
@pytest.mark.parametrize("build", [Equation, Forces])
def test_the_peak_with_gradients_inside_is_the_predicted_one(build: Callable[[], nn.Module]) -> None:
    model, args = build(), _batch()
    plan = plan_of(model, args)
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


# ---- what one graph does not have -----------------------------------------------------------------------


class EndsBetween(Network):
    """A graph ends between what is differentiated and what it is differentiated by."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        hidden = self.net[:2](x)
        torch._dynamo.graph_break()
        (slope,) = torch.autograd.grad(self.net[2:](hidden).sum(), x, create_graph=True)
        return slope.square().mean()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * gradient * x.square()  # type: ignore[no-any-return]


class WithAFunction(Network):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(Cube.apply(x)).sum(), x, create_graph=True)
        return slope.square().mean()


class FunctionTransformed(Network):
    """A gradient by ``torch.func`` of a function that has a backward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return grad(lambda x: self.net(Cube.apply(x)).sum())(x).square().mean()  # type: ignore[no-any-return]


class BackwardInside(Network):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        self.net(x).sum().backward(inputs=[x], create_graph=True)
        assert x.grad is not None
        return x.grad.square().mean()


class Related(nn.Module):
    """Differentiates by one of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 32), nn.Linear(2, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        energy = torch.tanh(self.first(x) + self.second(y)).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return slope.square().mean() + energy


class RelatesThem(nn.Module):
    """The other argument was computed from that one, in a graph before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Related()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = torch.sin(x)
        torch._dynamo.graph_break()
        result: Tensor = self.inner(x, y)
        return result


_REFUSED = [EndsBetween, WithAFunction, pytest.param(BackwardInside, marks=pytest.mark.heavy), RelatesThem]


@pytest.mark.graphs
@pytest.mark.parametrize("build", _REFUSED)
def test_gradients_that_no_graph_has_whole_are_refused(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(planner.CaptureError, match=r"takes gradients of its own results.*or submodules"):
        planner.plan(build(), args=_batch(), budget="150%")


@pytest.mark.graphs
@pytest.mark.parametrize("build", [EndsBetween, RelatesThem])
def test_a_training_loop_goes_on_without_such_a_plan(build: Callable[[], nn.Module]) -> None:
    model = build()
    twin = copy.deepcopy(model)
    planner.auto_checkpoint(model, budget="150%")
    with pytest.warns(planner.PlanWarning, match=r"cannot be planned.*without the plan") as caught:
        ours = left_by(model, steps(_batch()))
    assert sum(issubclass(w.category, planner.PlanWarning) for w in caught) == 1
    assert_same(ours, left_by(twin, steps(_batch())))


def test_arguments_that_come_from_each_other_run_as_written() -> None:
    torch.manual_seed(0)
    model, (x,) = Related(), _batch()
    y = torch.randn(16, 2, requires_grad=True)
    x.requires_grad_()
    twin = copy.deepcopy(model)
    plan_of(model, (x, y)).apply(model)
    with counting_runs() as runs, no_plan_warnings():
        for made in (lambda: (x, y), lambda: (2 * x, y)):
            assert_same(_left(model, made, x, y), _left(twin, made, x, y))
    assert runs.backward == 2
    with pytest.warns(planner.PlanWarning, match="which may have used that tensor"):
        ours = _left(model, lambda: (x, torch.sin(x)), x, y)
    assert_same(ours, _left(twin, lambda: (x, torch.sin(x)), x, y))


def _left(model: nn.Module, made: Callable[[], tuple[Tensor, Tensor]], *inputs: Tensor) -> dict[str, Any]:
    for tensor in [*inputs, *model.parameters()]:
        tensor.grad = None
    left = left_by(model, lambda model: step_of(model, made()))
    return {**left, **{f"gradient {i}": t.grad for i, t in enumerate(inputs) if t.grad is not None}}


def test_a_function_that_torch_func_transforms_is_refused() -> None:
    with pytest.raises(planner.CaptureError, match=r"Take these gradients by torch\.autograd\.grad"):
        planner.plan(FunctionTransformed(), args=_batch(), budget="150%")


def test_a_gradient_of_a_planned_function_is_differentiated_once() -> None:
    class Model(Network):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.net(Cube.apply(x))
            return result

    model, (x,) = Model(), _batch()
    x.requires_grad_()
    plan_of(model, (x,), loss=torch.sum).apply(model)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(planner.PlanMismatch, match=r"autograd\.Function"):
        slope.square().sum().backward()
