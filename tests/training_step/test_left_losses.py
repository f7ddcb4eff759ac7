"""Losses that a forward leaves in the module, for the training loop to add to its own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner.training_step.step import ModuleLosses
from planner.verification.measure import measure_peak

pytestmark = pytest.mark.heavy

WIDTH = 32
HEAVY = pytest.mark.heavy


class Experts(nn.Module):
    """Two experts of which each row's gate weighs both; their balance is left in an attribute."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.how = how
        self.balance: Any = [] if how == "list" else {} if how == "dict" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(-1)
        balance = shares.mean(0).square().sum()
        if self.how == "list":
            self.balance.append(balance)
        elif self.how == "dict":
            self.balance["experts"] = balance
        else:
            self.balance = balance
        x = nn.functional.dropout(x, 0.1, self.training)
        if self.how == "break":
            torch._dynamo.graph_break()
        return torch.stack([e(x).relu() for e in self.experts], -1).mul(shares.unsqueeze(-2)).sum(-1)

    def taken(self) -> torch.Tensor:
        """The loss that was left; a list is emptied."""
        if self.how == "list":
            return torch.stack([self.balance.pop() for _ in range(len(self.balance))]).sum()
        found: torch.Tensor = self.balance["experts"] if self.how == "dict" else self.balance
        return found


def model(how: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Experts(how) for _ in range(3)), nn.Linear(WIDTH, 8))


def trained(net: nn.Sequential, loss: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss(net(torch.randn(64, WIDTH))).backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()] + [p.grad for p in net.parameters()]


def same(these: list[Any], those: list[Any]) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(these, those, strict=True)
    )


def added(net: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    left = [part for part in net if isinstance(part, Experts)]
    return lambda y: y.square().mean() + sum(part.taken() for part in left)


@pytest.mark.parametrize("how", ["attribute", *(pytest.param(h, marks=HEAVY) for h in ("dict", "break"))])
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"regions": ["0", "1", "2"]}, marks=HEAVY)], ids=["whole", "regions"]
)
def test_losses_left_in_attributes_are_differentiated_by_where_none_is_given(
    how: str, options: dict[str, Any]
) -> None:
    net = model(how)
    expected = trained(unplanned := copy.deepcopy(net), added(unplanned))
    planner.auto_checkpoint(net, budget="80%", **options)
    assert same(trained(net, added(net)), expected)


@pytest.mark.parametrize("how", ["attribute", pytest.param("dict", marks=HEAVY)])
def test_a_training_loss_may_leave_them_out(how: str) -> None:
    net = model(how)
    expected = trained(copy.deepcopy(net), lambda y: y.square().mean())
    planner.auto_checkpoint(net, budget="80%")
    assert same(trained(net, lambda y: y.square().mean()), expected)


@pytest.mark.parametrize("budget", ["80%", *(pytest.param(b, marks=HEAVY) for b in ("1GiB", "min"))])
def test_their_peak_is_as_predicted(budget: str) -> None:
    net, x = model("attribute"), torch.randn(64, WIDTH)
    plan = planner.plan(net, x, budget=budget)
    assert planner.verify(net, x, plan=plan, repeats=0).ok
    plan.apply(net)

    def step() -> torch.Tensor:
        y: torch.Tensor = net(x)
        outputs = [y, *(part.balance for part in net if isinstance(part, Experts))]
        torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
        return y

    step()
    net.zero_grad(set_to_none=True)
    for part in net:
        if isinstance(part, Experts):
            part.balance = None
    assert measure_peak(step, "cpu").peak_bytes == plan.predicted.dynamic_peak_bytes


def test_one_of_an_earlier_forward_is_none_of_the_step() -> None:
    net, x = model("attribute"), torch.randn(64, WIDTH)
    with torch.random.fork_rng():
        net(x)
    first = net[0]
    assert isinstance(first, Experts)
    first.earlier = first.balance  # type: ignore[assignment]
    plan = planner.plan(net, x, budget="80%")
    assert planner.verify(net, x, plan=plan, repeats=0).ok
    first.earlier.backward()  # type: ignore[operator]
    assert first.gate.weight.grad is not None


def test_containers_may_hold_each_other() -> None:
    net, x = model("attribute"), torch.randn(64, WIDTH)
    first, around = net[0], {}  # type: ignore[var-annotated]
    assert isinstance(first, Experts)
    around["itself"] = [around]
    first.around = around  # type: ignore[assignment]
    net(x)
    assert ModuleLosses(net)() == [part.balance for part in net if isinstance(part, Experts)]
