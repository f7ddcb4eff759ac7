"""What the backward writes over what it has read: bits, bytes, and what else holds that memory."""

import copy
import json
import warnings
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import planner
from planner._torch.execution.written_over import WrittenOver, is_held_alone
from planner.errors import FreedError
from planner.verification.measure import measure_peak

pytestmark = [pytest.mark.any_torch, pytest.mark.heavy]
aten = torch.ops.aten


def _calls(gradient: Tensor, read: Tensor) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The operators that write over their second argument, on a gradient and what was saved."""
    for dim in range(read.dim()):
        likely = read.float().softmax(dim).to(read.dtype)
        for softmax in (aten._log_softmax_backward_data, aten._softmax_backward_data):
            yield softmax.default, (gradient, likely, dim, read.dtype), {}
    for approximate in ("none", "tanh"):
        yield aten.gelu_backward.default, (gradient, read), {"approximate": approximate}
    yield aten.threshold_backward.default, (gradient, read, 0), {}
    for elements in (aten.silu_backward, aten.tanh_backward, aten.sigmoid_backward):
        yield elements.default, (gradient, read), {}
    yield aten.mul.Tensor, (gradient, read), {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_results_are_written_over_what_is_read_and_have_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in ((3, 5, 37), (7, 64), (1, 3, 1), (2, 3, 1025)):
        for operator, args, named in _calls(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)):
            expected, there = operator(*args, **named), args[1].clone()
            found = operator(args[0], WrittenOver.of(there, lambda: True), *args[2:], **named)
            assert type(found) is Tensor
            assert found.data_ptr() == there.data_ptr()
            assert torch.equal(found, expected), (operator, shape)
            assert found.stride() == expected.stride()


def test_strides_of_dimensions_of_one_element_do_not_matter() -> None:
    strides = (41, 1, 7)
    for operator, args, named in _calls(torch.randn(1, 3, 1), torch.randn(3).as_strided((1, 3, 1), strides)):
        saved = args[1].clone().as_strided((1, 3, 1), strides)
        expected = operator(args[0], saved, *args[2:], **named)
        there = saved.clone().as_strided((1, 3, 1), strides)
        found = operator(args[0], WrittenOver.of(there, lambda: True), *args[2:], **named)
        assert found.data_ptr() == there.data_ptr()
        assert torch.equal(found, expected), operator
        assert found.stride() == expected.stride(), operator


def test_what_is_of_another_form_than_the_result_is_not_written_over() -> None:
    gradient, read = torch.randn(4, 5), torch.randn(4, 5)
    part = torch.randn(5, 5)[:4]
    for given, saved in (
        (gradient.t(), read.t()),
        (gradient, part),
        (gradient[:1], read),
        (gradient.double(), read),
    ):
        before = saved.clone()
        assert torch.equal(torch.mul(given, WrittenOver.of(saved, lambda: True)), given * before)
        assert torch.equal(saved, before)


def test_what_holds_memory_is_noticed() -> None:
    alone = torch.randn(4)
    assert is_held_alone(alone)
    assert is_held_alone(torch.randn(4).view(2, 2))
    for other in (torch.Tensor.detach, torch.Tensor.untyped_storage, torch.Tensor.numpy):
        held = other(alone)
        assert not is_held_alone(alone)
        del held
        assert is_held_alone(alone)


class Words(nn.Module):
    """A loss over many words, attention by way of softmax, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(512, 16), nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.up, self.down, self.head = nn.Linear(16, 128), nn.Linear(128, 16), nn.Linear(16, 512)
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
        x = x + self.down(F.silu(self.up(x)) * torch.tanh(self.up(x)))  # a product of two that are saved
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


class _Twice(TorchDispatchMode):
    """Runs what writes nothing twice, and returns the second result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


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


def test_a_backward_may_run_otherwise_than_planned() -> None:
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

    def batched(one: nn.Module) -> None:
        of, loss = list(one.parameters()), one(words)
        both = torch.autograd.grad(loss, of, torch.tensor([1.0, 2.0]), is_grads_batched=True)
        for parameter, gradients in zip(of, both, strict=True):
            parameter.grad = gradients[1]

    def with_a_mode(one: nn.Module) -> None:
        loss = one(words)
        with _Twice():  # type: ignore[no-untyped-call]
            loss.backward()

    def with_more(one: Any) -> None:
        one.more = True
        one(words).backward()
        one.more = False

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", planner.PlanWarning)
        for step in (lambda one: one(words).backward(), twice, penalty, batched, with_a_mode, with_more):
            assert all(map(torch.equal, _left(model, step), _left(eager, step))), step.__name__


def test_what_something_holds_is_not_written_over() -> None:
    model, words = _words()
    eager = copy.deepcopy(model)
    plan = planner.plan(model, (words,), budget="min", backend="replay", costs="roofline")
    forged = json.loads(plan.dumps())
    forged["replay"]["written_over"] = forged["replay"]["asked"]
    for each in (plan, planner.Plan.loads(json.dumps(forged))):
        each.apply(model)
        model.hold = eager.hold = True
        with pytest.warns(planner.PlanWarning, match="holds a result over which"):
            found, expected = (_left(one, lambda one: one(words).backward()) for one in (model, eager))
        assert all(map(torch.equal, found, expected))
        assert torch.equal(model.held.pop(), eager.held.pop())
        planner.remove(model)


class Frozen(nn.Module):
    """Gates that nothing is trained of: tensors without history, which somebody may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(64, 64).requires_grad_(False) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.held: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for frozen, layer in zip(self.frozen, self.layers, strict=True):
            gate = torch.tanh(frozen(x))
            if self.held is not None:
                self.held.append(gate)
            total = total + layer(x) * gate
        return F.log_softmax(total, -1).square().mean()


@pytest.mark.parametrize("budget", ["95%", "75%"])
def test_what_has_no_history_and_is_held_is_not_written_over(budget: str) -> None:
    torch.manual_seed(0)
    model, x = Frozen().train(), torch.randn(512, 64)
    eager = copy.deepcopy(model)
    plan = planner.plan(model, (x,), budget=budget, backend="replay", costs="roofline")
    assert json.loads(plan.dumps())["replay"]["written_over"]
    plan.apply(model)
    model.held, eager.held = [], []
    with pytest.warns(planner.PlanWarning, match="holds a result over which"):
        found, expected = (_left(one, lambda one: one(x).backward()) for one in (model, eager))
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, model.held, eager.held))


class _Doubled(torch.autograd.Function):
    """A backward in Python, which may read what was saved more often than it did when the plan was made."""

    more = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return 2 * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        assert type(y) is Tensor
        found = gradient * y
        return found + y if _Doubled.more else found


class InPython(nn.Module):
    """Python code that asks for what was saved: a backward, and a hook right before a node's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.looks, self.seen = False, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        y: Any = torch.tanh(self.first(_Doubled.apply(x @ self.last.weight)))
        if self.looks:
            y.grad_fn.register_prehook(self.look)
        return self.last(y).square().mean()

    def look(self, gradients: tuple[Tensor, ...]) -> None:
        node: Any = torch._C._current_autograd_node()
        self.seen.append((gradients[0] * node._saved_result).sum())


def test_what_python_code_asks_for_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = InPython(), torch.randn(512, 64)
    eager = copy.deepcopy(model)
    plan = planner.plan(model, (x,), budget="95%", backend="replay", costs="roofline")
    assert len(json.loads(plan.dumps())["replay"]["written_over"]) == 1  # that of the node in C++
    plan.apply(model)
    monkeypatch.setattr(_Doubled, "more", True)
    assert all(map(torch.equal, *(_left(one, lambda one: one(x).backward()) for one in (model, eager))))
    model.looks = eager.looks = True
    with pytest.warns(planner.PlanWarning, match="Python code asks for it"):
        found = _left(model, lambda one: one(x).backward())
    assert all(map(torch.equal, found, _left(eager, lambda one: one(x).backward())))
    assert torch.equal(*model.seen, *eager.seen)
    planner.remove(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", planner.PlanWarning)
        model.looks = eager.looks = False
        plan = planner.plan(model, (x,), budget="min", backend="replay", costs="roofline")
        plan.apply(model)
        model.looks = eager.looks = True  # it is made again, and asked for twice
        assert all(map(torch.equal, *(_left(one, lambda one: one(x).backward()) for one in (model, eager))))


def test_what_was_written_over_before_an_error_is_not_read_again() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(512, 64)
    saved: list[Tensor] = []

    def fails(*_: Any) -> None:
        raise KeyError

    def loss(out: Tensor) -> Tensor:
        return out.square().mean()

    for budget in ("99%", "min"):
        planner.plan(model, (x,), budget=budget, backend="replay", costs="roofline", loss=loss).apply(model)
        with model[1].register_forward_hook(lambda *call: saved.append(call[2])):
            out = model(x)
        hook = cast(Any, saved[0].grad_fn).register_hook(fails)
        other = saved.pop().sum()
        with pytest.raises(KeyError):
            out.square().mean().backward()
        hook.remove()
        with pytest.raises(FreedError, match="wrote its result"):
            other.backward()
        planner.remove(model)
