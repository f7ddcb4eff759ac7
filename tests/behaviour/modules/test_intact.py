"""The user's objects are the same after planning as before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import planner
from planner.errors import CaptureError

Tensor = torch.Tensor


def squares(y: Tensor) -> Tensor:
    return y.square().mean()


class Scripted(nn.Module):
    """A layer in C++ between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle = torch.jit.script(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        return self.last(self.middle(y).tanh()).tanh()


class Outside(nn.Module):
    """Refers to layers that are no submodules, through a function."""

    def __init__(self, norm: nn.Module, decide: bool = False) -> None:
        super().__init__()
        self.first, self.decide = nn.Linear(8, 8), decide
        self.after = lambda x: norm(x)

    def forward(self, x: Tensor) -> Tensor:
        y = self.after(self.first(x)).tanh()
        return y * 2 if self.decide and y.sum() > 1000 else y


class Shared(nn.Linear):
    """Its copies are itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shared":
        return self


WEIGHT = nn.Parameter(torch.eye(8))
SEEN: dict[str, Any] = {}
LAST: Any = None


class Global(nn.Module):
    """Uses, and leaves tensors in, variables of its file and class."""

    seen: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        global LAST
        y = self.first(x) @ WEIGHT
        type(self).seen = LAST = SEEN["y"] = y
        return y.tanh()


def state(tensors: list[Tensor]) -> list[Any]:
    return [(t, t.grad, t.requires_grad, t._version, t.detach().clone()) for t in tensors]


def assert_same(then: list[Any]) -> None:
    for tensor, gradient, requires_grad, version, data in then:
        assert tensor.grad is gradient
        assert not isinstance(tensor.grad, FakeTensor)
        assert (tensor.requires_grad, tensor._version) == (requires_grad, version)
        assert torch.equal(tensor, data)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("gradients", [False, True])
def test_a_scripted_module_keeps_its_gradients(gradients: bool) -> None:
    models, x = [], torch.randn(4, 8)
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Scripted())
        if gradients:
            squares(models[-1](x)).backward()
    model, reference = models
    then = state(list(model.parameters()))
    plan = planner.plan(model, (x,), loss=squares, budget="min")
    assert_same(then)
    for m in (plan.apply(model), reference):
        m.zero_grad()
        squares(m(x)).backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.graphs
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_so_it_does_where_planning_fails() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), torch.jit.script(nn.Linear(8, 8)))
    then = state(list(model.parameters()))
    with pytest.raises(CaptureError):
        planner.plan(model, (torch.randn(4, 8),), loss=squares, budget="min")
    assert_same(then)


@pytest.mark.parametrize("decide", [False, True])  # if data decide, the step runs with data
def test_modules_from_around_a_function_are_left_alone(decide: bool) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8)
    norm.weight.grad = torch.ones(8)
    model, then = Outside(norm, decide), state([*norm.parameters(), *norm.buffers(), norm.weight.grad])
    plan = planner.plan(model, (torch.randn(4, 8),), loss=squares, budget="min")
    assert_same(then)
    assert plan.graphs


def test_a_module_whose_copy_is_itself_is_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Shared(8, 8), nn.Tanh())
    model[1].weight.grad = torch.ones(8, 8)
    then = state([*model.parameters(), model[1].weight.grad])
    planner.plan(model, (torch.randn(4, 8),), loss=squares, budget="min")
    assert_same(then)


def test_variables_of_files_and_classes_are_left_alone() -> None:
    torch.manual_seed(0)
    then = state([WEIGHT])
    planner.plan(Global(), (torch.randn(4, 8),), loss=squares, budget="min")
    assert_same(then)
    assert (Global.seen, LAST, SEEN) == (None, None, {})


def _histories() -> tuple[Callable[[Tensor], Tensor], nn.Module, list[Tensor]]:
    history: list[Tensor] = []
    head = nn.Linear(8, 1)

    def loss(y: Tensor) -> Tensor:
        result = head(y).square().mean()
        history.append(result.detach())
        return result

    return loss, head, history


def test_what_a_loss_refers_to_is_left_alone() -> None:
    torch.manual_seed(0)
    loss, head, history = _histories()
    then = state(list(head.parameters()))
    planner.plan(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (torch.randn(4, 8),), loss=loss, budget="min")
    assert_same(then)
    assert history == []
