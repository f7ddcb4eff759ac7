"""Results without data have the strides of the kernels' results, also where the inputs are transposed."""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner._torch import fake
from planner._torch.tracing.meta_patches import ELEMENTWISE, layouts_of_kernels

aten = torch.ops.aten


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("training", [True, False])
def test_batch_normalisations_are_laid_out_as_on_the_cpu(rank: int, training: bool) -> None:
    for order in itertools.permutations(range(rank)):
        x = torch.randn([2, 3, 4, 5][:rank]).permute(order)
        scale = torch.ones(x.shape[1])
        forward = (x, scale, scale, scale.clone(), scale.clone(), training, 0.1, 1e-5)
        results = aten.native_batch_norm.default(*forward)
        for gradient in (torch.randn(x.shape), torch.randn_like(x)):
            backward = (gradient, x, scale, scale, scale, *results[1:], training, 1e-5, [True, True, True])
            for operator, arguments in (
                (aten.native_batch_norm.default, forward),
                (aten.native_batch_norm_backward.default, backward),
            ):
                mode = fake.fake_mode()
                fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
                with mode, layouts_of_kernels():
                    found = operator(*fakes)[0]
                assert found.stride() == operator(*arguments)[0].stride(), (operator, x.stride())


def _norm_backward(grad: torch.Tensor, x: torch.Tensor) -> tuple[Any, ...]:
    scale = torch.ones(x.shape[2:])
    _, mean, deviation = aten.native_layer_norm(x, scale.shape, scale, scale, 1e-5)
    return (grad, x, scale.shape, mean, deviation, scale, scale, [True, True, True])


_ARGUMENTS: dict[Any, Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]]] = {
    aten.native_layer_norm_backward.default: _norm_backward,
    aten._log_softmax_backward_data.default: lambda grad, x: (grad, x.log_softmax(1), 1, x.dtype),
    aten.log_sigmoid_forward.default: lambda _, x: (x,),
    aten.mse_loss_backward.default: lambda grad, x: (grad.mean(), x, x.sin(), 1),
    aten.smooth_l1_loss_backward.default: lambda grad, x: (grad.mean(), x, x.sin(), 1, 1.0),
    aten.huber_loss_backward.default: lambda grad, x: (grad, x, x.sin(), 0, 1.0),
    aten.binary_cross_entropy_backward.default: lambda grad, x: (grad, x.sigmoid(), x.sigmoid()),
    aten.native_dropout_backward.default: lambda grad, x: (grad, x > 0, 2.0),
    aten.hardtanh_backward.default: lambda grad, x: (grad, x, -1.0, 1.0),
    aten.hardswish_backward.default: lambda grad, x: (grad, x),
    aten.logit_backward.default: lambda grad, x: (grad, x.sigmoid()),
}


@pytest.mark.parametrize("operator", _ARGUMENTS, ids=lambda operator: str(operator.overloadpacket))
def test_results_of_transposed_arguments_are_laid_out_as_on_the_cpu(operator: Any) -> None:
    orders = list(itertools.permutations(range(4)))[::5]
    there = [torch.randn(2, 3, 4, 5).permute(o).contiguous().permute(*map(o.index, range(4))) for o in orders]
    for grad, x in itertools.product(there, repeat=2):
        arguments, mode = _ARGUMENTS[operator](grad, x), fake.fake_mode()
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        with mode:
            operator(*fakes)  # nor does what others did before count
        with mode, layouts_of_kernels():
            found = operator(*fakes)
        made = operator(*arguments)
        for one, like in [(found, made)] if isinstance(made, torch.Tensor) else zip(found, made, strict=True):
            assert one.stride() == like.stride(), (grad.stride(), x.stride())


_MORE: dict[Any, tuple[Any, ...]] = {aten.threshold_backward.default: (0.5,), aten.pow.Tensor_Scalar: (3.0,)}
"""Arguments that follow the tensors."""


_OPERANDS = {**ELEMENTWISE, aten.threshold_backward.default: 2}


@pytest.mark.parametrize("operator", _OPERANDS, ids=str)
def test_elementwise_results_of_any_strides_of_single_elements_are_laid_out_as_on_the_cpu(
    operator: Any,
) -> None:
    draw = random.Random(0)
    for _ in range(100):
        sizes = [draw.choice((1, 1, 2, 3)) for _ in range(draw.randint(2, 5))]
        orders = [draw.sample(range(len(sizes)), len(sizes)) for _ in range(draw.randint(1, 2))]
        odd = draw if draw.random() < 0.3 else None
        operands: list[Any] = [
            _laid_out(sizes, draw.choice(orders), odd).abs_() for _ in range(_OPERANDS[operator])
        ]
        if operator._overloadname == "Tensor" and draw.random() < 0.5:
            operands[1] = draw.choice([2.0, torch.tensor(2.0), operands[1][:1]])
        arguments, mode = (*operands, *_MORE.get(operator, ())), fake.fake_mode()
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        with mode, layouts_of_kernels():
            found = operator(*fakes)
        made = operator(*arguments)
        assert (found.dtype, found.shape) == (made.dtype, made.shape)
        assert found.stride() == made.stride(), operands


def _laid_out(sizes: list[int], order: list[int], odd: random.Random | None) -> torch.Tensor:
    """A tensor whose dimensions lie in memory in some order; with odd strides of those of one element."""
    strides = [math.prod(sizes[d] for d in order[order.index(i) + 1 :]) for i in range(len(sizes))]
    if odd is not None:
        strides = [odd.choice([1, 7, s]) if n == 1 else s for n, s in zip(sizes, strides, strict=True)]
    return torch.empty_strided(sizes, strides).uniform_(-1, 1)


class Mixed(nn.Module):
    """Normalises, and mixes over positions: the gradient of what is normalised comes transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(48) for _ in range(3))
        self.positions = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(3))
        self.features = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, positions, features in zip(self.norms, self.positions, self.features, strict=True):
            y = norm(positions(x)).transpose(1, 2)
            x = x + features(y).tanh().transpose(1, 2)
        return x.square().mean()


class Patches(nn.Module):
    """Normalises transposed activations, as forecasting models do, which a linear layer then has to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.ModuleList(nn.Linear(16, 32) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(3))
        self.narrow = nn.ModuleList(nn.Linear(32, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for widen, norm, narrow in zip(self.widen, self.norms, self.narrow, strict=True):
            y = norm(widen(x).transpose(1, 2)).transpose(1, 2)
            x = x + narrow(y).tanh() + (y * y)[..., :16]
        return x.square().mean()


@pytest.mark.parametrize(("solver", "budget"), [("none", "500%"), ("sqrt_n", "min")])
@pytest.mark.parametrize(("build", "shape"), [(Patches, (32, 24, 16)), (Mixed, (4, 16, 48))])
@pytest.mark.heavy
def test_copies_of_transposed_results_are_predicted(
    build: type[nn.Module], shape: tuple[int, ...], solver: str, budget: str
) -> None:
    torch.manual_seed(0)
    model, x = build().train(), torch.randn(shape)
    plan = planner.plan(model, (x,), budget=budget, solver=solver)
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    assert report.baseline_measured_dynamic_peak_bytes == plan.baseline.dynamic_peak_bytes


def test_what_pytorch_remembers_of_calls_without_data_stays_its_own() -> None:
    x, mode = torch.randn(3, 4, 5).permute(1, 2, 0), fake.fake_mode()
    operator, arguments = aten.huber_loss_backward.default, (x, x, x.sin(), 0, 1.0)

    def stride() -> tuple[int, ...]:
        with mode:
            fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            return tuple(operator(*fakes).stride())

    outside = stride()
    for _ in range(2):
        with layouts_of_kernels(), layouts_of_kernels():
            assert stride() == operator(*arguments).stride() != outside
        assert stride() == outside
