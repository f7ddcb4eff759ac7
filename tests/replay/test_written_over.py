"""Softmax's backward over what it reads: bits, bytes, and what else holds that memory."""

import copy
import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import planner
from planner._torch.execution.written_over import WrittenOver, is_held_alone
from planner.verification.measure import measure_peak

pytestmark = pytest.mark.any_torch
aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", [aten._log_softmax_backward_data, aten._softmax_backward_data])
def test_results_are_written_over_what_is_read_and_have_the_same_bits(operator: Any, dtype: Any) -> None:
    torch.manual_seed(0)
    for shape in ((3, 5, 37), (7, 64), (1, 3, 1), (2, 3, 1025)):
        for dim in range(len(shape)):
            gradient, read = torch.randn(shape).to(dtype), torch.randn(shape).softmax(dim).to(dtype)
            expected = operator.default(gradient, read, dim, dtype)
            found = operator.default(gradient, WrittenOver.of(read.clone()), dim, dtype)
            assert type(found) is Tensor
            assert torch.equal(found, expected)
            assert found.stride() == expected.stride()
            there = read.clone()
            assert (
                operator.default(gradient, WrittenOver.of(there), dim, dtype).data_ptr() == there.data_ptr()
            )
    turned = torch.randn(4, 5).to(dtype).t()  # of other strides than a result: it has memory of its own
    operator.default(turned, WrittenOver.of(there := turned.clone().t().clone().t()), 1, dtype)
    assert torch.equal(there, turned)


def test_what_holds_memory_is_noticed() -> None:
    alone = torch.randn(4)
    assert is_held_alone(alone)
    assert is_held_alone(torch.randn(4).view(2, 2))
    other = alone.detach()
    assert not is_held_alone(alone)
    del other
    assert is_held_alone(alone)


class Words(nn.Module):
    """A loss over many words, and attention by way of softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(512, 16), nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.head = nn.Linear(16, 512)
        self.hold = self.more = False
        self.held: list[Tensor] = []

    def forward(self, words: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.more):
            return self.loss(words)

    def loss(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            x = x + F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1) @ v
        scores = self.head(x).flatten(0, 1)
        likely = F.log_softmax(scores, -1)
        if self.hold:
            self.held.append(likely.detach())
        loss = F.nll_loss(likely, words.flatten())
        return loss + scores.square().mean() if self.more else loss


def _words() -> tuple[Words, Tensor]:
    torch.manual_seed(0)
    return Words(), torch.randint(0, 512, (4, 64))


def _left(model: nn.Module, step: Any) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    step(model)
    return [p.grad for p in model.parameters() if p.grad is not None] + [torch.get_rng_state()]


@pytest.mark.parametrize("more", [False, True])
def test_the_largest_moment_has_two_tensors_of_the_size_of_the_loss(more: bool) -> None:
    model, words = _words()
    model.more = more
    scores = words.numel() * 512 * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        step = planner.prepare(model, (words,), backend="replay", costs="roofline")
        as_it_is = step.plan("100%")
        assert as_it_is.predicted.dynamic_peak_bytes == as_it_is.baseline.dynamic_peak_bytes
        for budget in ("99%", "min"):
            plan, planned = step.plan(budget), copy.deepcopy(model)
            plan.apply(planned)
            assert all(
                map(torch.equal, *(_left(one, lambda one: one(words).backward()) for one in (planned, model)))
            )
            planned.zero_grad()
            measured = measure_peak(lambda one=planned: one(words).backward(), "cpu").peak_bytes
            assert measured == plan.predicted.dynamic_peak_bytes < plan.baseline.dynamic_peak_bytes
    if not more:
        assert plan.baseline.dynamic_peak_bytes > 3 * scores
        assert plan.predicted.dynamic_peak_bytes < 2.5 * scores


def test_a_backward_may_run_twice_be_differentiated_and_be_of_another_path() -> None:
    model, words = _words()
    eager = copy.deepcopy(model)
    planner.plan(model, (words,), budget="min", backend="replay", costs="roofline").apply(model)

    def twice(one: nn.Module) -> None:
        loss = one(words)
        loss.backward(retain_graph=True)
        loss.backward()

    def penalty(one: nn.Module) -> None:
        of = list(one.parameters())
        gradients = torch.autograd.grad(one(words), of, create_graph=True, retain_graph=False)
        assert all(type(gradient) is Tensor for gradient in gradients)
        for parameter, gradient in zip(of, gradients, strict=True):
            parameter.grad = gradient.detach()

    def with_more(one: Any) -> None:
        one.more = True
        one(words).backward()
        one.more = False

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", planner.PlanWarning)
        for step in (lambda one: one(words).backward(), twice, penalty, with_more):
            assert all(map(torch.equal, _left(model, step), _left(eager, step)))


def test_what_something_holds_is_not_written_over() -> None:
    model, words = _words()
    eager = copy.deepcopy(model)
    plan = planner.plan(model, (words,), budget="min", backend="replay", costs="roofline")
    forged = json.loads(plan.dumps())
    forged["replay"]["written_over"] = forged["replay"]["asked"]
    for each in (plan, planner.Plan.loads(json.dumps(forged))):
        each.apply(model)
        model.hold = eager.hold = True
        with pytest.warns(planner.PlanWarning, match="holds the result of a softmax"):
            found, expected = (_left(one, lambda one: one(words).backward()) for one in (model, eager))
        assert all(map(torch.equal, found, expected))
        assert torch.equal(model.held.pop(), eager.held.pop())
        planner.remove(model)
