"""Views that one graph makes of an input, uses, and hands on: gradients are added up as by eager."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import transformers

import planner

pytestmark = pytest.mark.heavy

Look = Callable[[torch.Tensor], torch.Tensor]
VIEWS: dict[str, Look] = {
    "in other rows": lambda h: h.view(-1, 8),
    "itself": lambda h: h,
}


class Experts(nn.Module):
    """As a mixture of experts: four layers read one view, and each graph but the last ends behind one."""

    def __init__(self, look: Look, used_besides: int = 0) -> None:
        super().__init__()
        self.look, self.used_besides = look, used_besides
        self.before, self.up, self.gate, self.router, self.shared = (nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x).tanh()
        torch._dynamo.graph_break()
        seen = self.look(hidden)
        out = nn.functional.silu(self.gate(seen)) * self.up(seen)
        rest = sum((hidden.sin() * (i + 0.3) for i in range(self.used_besides)), torch.zeros(()))
        torch._dynamo.graph_break()
        weights = self.router(seen).softmax(-1)
        torch._dynamo.graph_break()
        return (out * weights + torch.sigmoid(self.shared(seen)) * out).square().mean() + rest.square().mean()


def compared(model: nn.Module, x: torch.Tensor) -> tuple[bool, list[str]]:
    """Whether a step is as without a plan, and what was warned of while it was planned."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plan = planner.plan(model, (x,), budget="100%", solver="sqrt_n")
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    return report.ok, [str(w.message) for w in told if w.category is planner.PlanWarning]


@pytest.mark.parametrize("name", VIEWS)
def test_gradients_of_a_view_come_to_its_uses_one_by_one(name: str) -> None:
    torch.manual_seed(0)
    exact, told = compared(Experts(VIEWS[name]).train(), torch.randn(2, 64, 8))
    assert exact
    assert not told


def test_other_uses_of_what_is_looked_at_come_in_their_order() -> None:
    torch.manual_seed(0)
    exact, told = compared(Experts(VIEWS["in other rows"], 2).train(), torch.randn(2, 64, 8))
    assert exact
    assert not told


class Part(nn.Module):
    """Hands views of its input, or of a weight, on behind a graph break, and uses them on both sides."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.b, self.c = (nn.Linear(48, 48) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(48, 48) / 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = getattr(self, f"_{self.how}")(x)
        torch._dynamo.graph_break()
        return x * (self.b(first) * second).sum(-1).mean()

    def _two_uses_of_the_first_view(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.reshape(-1, 48)
        gate = self.a(rows).sigmoid() * self.c(rows)
        return rows.unflatten(0, (-1, 2)), gate.unflatten(0, (-1, 2))

    def _uses_of_both_views(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.reshape(-1, 48)
        pairs = rows.unflatten(0, (-1, 2))
        return pairs, self.a(rows).sigmoid().unflatten(0, (-1, 2)) * self.c(pairs)

    def _used_before_the_view(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate = self.a(x).sigmoid() * self.c(x)
        rows = x.reshape(-1, 48)
        return rows, gate.reshape(-1, 48)

    def _one_of_several(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, other = x.chunk(2, 1)
        return other, one.sin() * one.cos()

    def _of_a_weight(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        used = self.weight.sin()
        turned = self.weight.t()
        return turned, used + self.a(turned)


class Residual(nn.Module):
    """What goes into a part is used once more, after it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.before, self.part = nn.Linear(16, 48), Part(how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x)
        return (hidden + self.part(hidden)).square().mean()


@pytest.mark.graphs
@pytest.mark.parametrize(
    "how",
    [
        "two_uses_of_the_first_view",
        *(
            pytest.param(how, marks=pytest.mark.heavy)
            for how in ("uses_of_both_views", "used_before_the_view", "of_a_weight")
        ),
    ],
)
def test_what_is_used_elsewhere_too_gets_the_gradient_of_a_view_in_one(how: str) -> None:
    torch.manual_seed(0)
    exact, told = compared(Residual(how).train(), torch.randn(8, 32, 16))
    assert exact
    assert not told


def test_views_are_handed_on_at_other_sizes() -> None:
    torch.manual_seed(0)
    model, x = Residual("one_of_several").train(), torch.randn(4, 14, 16)
    unplanned = copy.deepcopy(model)
    planner.plan(model, (x,), budget="100%", solver="none").apply(model)
    for rows in (8, 6, 10, 12):
        x = torch.randn(3, rows, 16)
        with warnings.catch_warnings():
            warnings.simplefilter("error", planner.PlanWarning)
            model(x).backward()
        unplanned(x).backward()
        for planned, other in zip(model.parameters(), unplanned.parameters(), strict=True):
            assert (planned.grad is None) == (other.grad is None)
            assert planned.grad is None or torch.equal(planned.grad, other.grad)
        model.zero_grad()
        unplanned.zero_grad()


class UsedTwice(nn.Module):
    """Multiplies what it is given by itself, before it hands a view of it on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squared = x * x
        rows = x.flatten(0, 1)
        torch._dynamo.graph_break()
        return rows.sin().view_as(x) + squared


@pytest.mark.graphs
def test_an_operation_that_uses_twice_what_it_is_handed_on_a_view_of_is_warned_of() -> None:
    model = nn.Sequential(nn.Linear(8, 8), UsedTwice())
    with pytest.warns(planner.PlanWarning, match="added up in another order"):
        planner.plan(model, (torch.randn(4, 6, 8),), budget="100%", solver="none")


class ChangesIt(nn.Module):
    """Writes to what it is given before it hands a view of it on, and uses that itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        rows = x.flatten(0, 1)
        used = rows.sin() * rows.cos()
        torch._dynamo.graph_break()
        return (rows.exp() + used).view_as(x)


def test_a_view_of_what_is_changed_in_place_is_exact_or_warned_of() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), ChangesIt())
    exact, told = compared(model, torch.randn(32, 32, 8))
    assert exact or any("added up in another order" in text for text in told)


def test_a_mixture_of_experts_with_a_shared_one() -> None:
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, output_router_logits=True,
    )  # fmt: skip
    model = transformers.Qwen2MoeForCausalLM(config).train()
    words = torch.randint(0, 64, (4, 32))
    given = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}
    plan = planner.plan(model, kwargs=given, budget="min", solver="sqrt_n")
    report = planner.verify(model, kwargs=given, plan=plan, repeats=0)
    assert report.ok, report.problems


class Halves(nn.Module):
    """One graph hands on both halves of what it makes, and needs one of them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = (self.before(x) + 1).chunk(2)
        made = self.inner(left)
        torch._dynamo.graph_break()
        joined = left * 2 + right * 3 - made
        torch._dynamo.graph_break()
        return joined.square().mean()


@pytest.mark.graphs
def test_parts_that_are_handed_on_are_not_taken_for_their_gradients() -> None:
    model, x = Halves().train(), torch.randn(512, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan = planner.plan(model, x, budget="100%", solver="sqrt_n")
    report = planner.verify(model, x, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


class Pooled(nn.Module):
    """As encoders of images do, returns states and one of them by itself, or apart from the others."""

    def __init__(self, look: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.look, self.before, self.norm = look, nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.look(self.norm(self.before(x).tanh()))


@pytest.mark.parametrize("apart", [False, True])
def test_the_gradient_of_a_part_lies_as_the_whole(apart: bool) -> None:
    torch.manual_seed(0)
    model = Pooled((lambda h: (h[:, 0], h[:, 1:])) if apart else (lambda h: (h, h[:, 0]))).train()
    weight = torch.linspace(-1, 1, 32).view(4, 8)

    def loss(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return sum((weight[:, None] * r.view(4, -1, 8)).square().mean() for r in results)

    x = torch.randn(4, 6, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan = planner.plan(model, x, budget="min", loss=loss, solver="sqrt_n")
    report = planner.verify(model, x, plan=plan, loss=loss, repeats=0)
    assert report.ok, report.problems


@pytest.mark.graphs
def test_the_gradient_of_what_is_turned_may_lie_otherwise() -> None:
    model, weight = Pooled(lambda h: (h, h.transpose(1, 2))).train(), torch.randn(4, 8, 6)

    def loss(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return results[0].square().mean() + (results[1] * weight).mean()

    with pytest.warns(planner.PlanWarning, match="last bits"):
        planner.plan(model, torch.randn(4, 6, 8), budget="100%", loss=loss, solver="sqrt_n")
