"""Results without data have the strides of the kernels' results, also where the inputs are transposed."""

import copy
import itertools
import math
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner._torch import fake
from planner._torch.cuda.layouts import layouts_of_cuda
from planner._torch.layouts.elementwise_strides import ELEMENTWISE
from planner._torch.layouts.shape_functions import layouts_of_kernels

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


def _group_norm(_: torch.Tensor, x: torch.Tensor) -> tuple[Any, ...]:
    if not x.is_contiguous(memory_format=torch.channels_last):
        x = x.contiguous()
    return (x, None, None, len(x), x.shape[1], x[0, 0].numel(), 1, 1e-5)


def _group_norm_backward(grad: torch.Tensor, x: torch.Tensor) -> tuple[Any, ...]:
    x, _, _, *form, _ = _group_norm(grad, x)
    grad = torch.empty_like(x).copy_(grad)
    return (
        grad,
        x,
        *aten.native_group_norm(x, None, None, *form, 1e-5)[1:],
        None,
        *form,
        [True, False, False],
    )


def _batch_norm_backward(grad: torch.Tensor, x: torch.Tensor) -> tuple[Any, ...]:
    mean, deviation = aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[1:]
    return (grad, x, None, None, None, mean, deviation, True, 1e-5, [True, False, False])


@pytest.mark.parametrize(
    ("gradient", "image", "training", "expected"),
    [
        ((0, 2, 3, 1), (0, 1, 2, 3), True, (0, 1, 2, 3)),  # whatever the gradient's
        ((0, 1, 2, 3), (0, 2, 3, 1), True, (0, 2, 3, 1)),
        ((0, 2, 3, 1), (0, 2, 3, 1), True, (0, 2, 3, 1)),
        ((0, 2, 3, 1), (1, 0, 2, 3), True, (0, 1, 2, 3)),
        ((0, 2, 3, 1), (0, 2, 3, 1), False, (0, 1, 2, 3)),
    ],
)
def test_gradients_of_batch_normalisations_are_laid_out_as_cudas_source_says(
    gradient: tuple[int, ...], image: tuple[int, ...], training: bool, expected: tuple[int, ...]
) -> None:
    strides = [_laid_out((2, 3, 4, 5), order, None).stride() for order in (gradient, image, expected)]
    with fake.fake_mode(), layouts_of_kernels(), layouts_of_cuda(cudnn=True):
        grad, x = (torch.empty_strided((2, 3, 4, 5), s) for s in strides[:2])
        channels = torch.empty(3)
        found = aten.native_batch_norm_backward(
            grad, x, channels, channels, channels, channels, channels, training, 1e-5, [True, False, False]
        )
    assert found[0].stride() == strides[2]


_ARGUMENTS: dict[Any, Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]]] = {
    aten.native_layer_norm_backward.default: _norm_backward,
    aten._log_softmax_backward_data.default: lambda grad, x: (grad, x.log_softmax(1), 1, x.dtype),
    aten.log_sigmoid_forward.default: lambda _, x: (x,),
    aten.mse_loss_backward.default: lambda grad, x: (grad.mean(), x, x.sin(), 1),
    aten.smooth_l1_loss_backward.default: lambda grad, x: (grad.mean(), x, x.sin(), 1, 1.0),
    aten.huber_loss_backward.default: lambda grad, x: (grad, x, x.sin(), 0, 1.0),
    aten.binary_cross_entropy_backward.default: lambda grad, x: (grad, x.sigmoid(), x.sigmoid()),
    aten._prelu_kernel.default: lambda _, x: (x, torch.ones(1, 1, 1, 1)),
    aten._log_softmax.default: lambda _, x: (x, 1, False),
    aten.hardtanh.default: lambda _, x: (x,),
    aten.nan_to_num.default: lambda _, x: (x,),
    aten.masked_fill.Scalar: lambda grad, x: (grad, x > 0, 0.5),
    aten.tril.default: lambda _, x: (x,),
    aten.roll.default: lambda _, x: (x, [1]),
    aten.pow.Scalar: lambda _, x: (2.0, x),
    aten.channel_shuffle.default: lambda _, x: (x, x.shape[1]),
    aten.max_unpool2d.default: lambda _, x: (x, torch.zeros_like(x, dtype=torch.int64), x.shape[2:]),
    aten.glu_backward.default: lambda grad, x: (grad[:, :, :1], x[:, :, :2], 2),
    aten.rrelu_with_noise.default: lambda grad, x: (x, torch.empty_like(x)),
    aten.im2col.default: lambda _, x: (x, [1, 1], [1, 1], [0, 0], [1, 1]),
    aten.flip.default: lambda _, x: (x, (2,)),
    aten.zeros_like.default: lambda _, x: (x,),
    aten.rand_like.default: lambda _, x: (x,),
    aten.native_layer_norm.default: lambda _, x: (x, x.shape[2:], None, None, 1e-5),
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.native_batch_norm.default: lambda _, x: (x, None, None, None, None, True, 0.1, 1e-5),
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.upsample_nearest2d.default: lambda _, x: (x, (8, 8)),
    aten.upsample_bilinear2d.default: lambda _, x: (x, (8, 8), False),
    aten.upsample_bicubic2d.default: lambda _, x: (x, (8, 8), False),
    aten.reflection_pad2d_backward.default: lambda grad, x: (F.pad(grad, (1, 1, 0, 0)), x, (1, 1, 0, 0)),
    aten.replication_pad2d_backward.default: lambda grad, x: (F.pad(grad, (1, 1, 1, 1)), x, (1, 1, 1, 1)),
}


@pytest.mark.heavy
@pytest.mark.parametrize("operator", _ARGUMENTS, ids=lambda operator: str(operator.overloadpacket))
def test_results_of_transposed_arguments_are_laid_out_as_on_the_cpu(operator: Any) -> None:
    orders = [(0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2), (1, 0, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)]
    forms = [
        [_laid_out(sizes, order, None) for order in orders]
        for sizes in ((2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 5), (2, 3, 4, 1), (1, 1, 2, 4))
    ]
    given = _ARGUMENTS[operator]
    # What reads no gradient is the same with any.
    pairs = zip if given.__code__.co_varnames[0] == "_" else itertools.product
    for grad, x in (pair for form in forms for pair in pairs(form, form)):
        try:
            arguments, mode = given(grad, x), fake.fake_mode()
            operator(*arguments)
        except RuntimeError:
            assert min(x.shape) == 1  # too narrow for this operator
            continue
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        with mode:
            operator(*fakes)  # nor does what others did before count
        with mode, layouts_of_kernels():
            found = operator(*fakes)
        made = operator(*arguments)
        for one, like in [(found, made)] if isinstance(made, torch.Tensor) else zip(found, made, strict=True):
            if like is not None:
                assert one.stride() == like.stride(), (x.shape, grad.stride(), x.stride())


@pytest.mark.parametrize("shifts", [[1], [0], [4], [-4], [5]])
def test_what_is_rolled_is_laid_out_as_on_the_cpu(shifts: list[int]) -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    mode = fake.fake_mode()
    for dim in (2, 3):
        with mode, layouts_of_kernels():
            found = torch.roll(mode.from_tensor(image), shifts, [dim])
        assert found.stride() == torch.roll(image, shifts, [dim]).stride()


def _numbers_of(operator: Any) -> dict[int, Any]:
    """What an operator takes beside tensors, by position, where it has no default."""
    kinds = enumerate(
        str(argument.type) for argument in operator._schema.arguments if not argument.kwarg_only
    )
    given = {"number": 0.5, "float": 2.0, "int": 1, "bool": False, "Optional[number]": 0.5}
    return {i: given[kind] for i, kind in kinds if kind in given}


@pytest.mark.heavy
@pytest.mark.parametrize("operator", ELEMENTWISE, ids=str)
def test_elementwise_results_of_any_strides_of_single_elements_are_laid_out_as_on_the_cpu(
    operator: Any,
) -> None:
    draw, positions = random.Random(0), [*ELEMENTWISE[operator]]
    kinds = [str(argument.type) for argument in operator._schema.arguments]
    whole = "bitwise" in str(operator)
    for _ in range(20):
        sizes = [draw.choice((1, 1, 2, 3)) for _ in range(draw.randint(2, 5))]
        orders = [draw.sample(range(len(sizes)), len(sizes)) for _ in range(draw.randint(1, 2))]
        odd = draw if draw.random() < 0.3 else None
        arguments = _numbers_of(operator)
        for position in (i for i in positions if kinds[i] == "Tensor"):
            operand = _laid_out(sizes, draw.choice(orders), odd).abs_()
            if len(positions) > 1 and "backward" not in str(operator) and draw.random() < 0.3:
                operand = draw.choice([torch.tensor(0.5), operand[:1], operand.sum(-1, keepdim=True)])
            arguments[position] = operand.int() if whole else operand
        if operator is aten.where.self:
            arguments[0] = arguments[0] > 0.5
        if operator in (getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")):
            arguments[1] = draw.choice([arguments[1], 2.0])
        mode, ordered = fake.fake_mode(), [arguments[i] for i in sorted(arguments)]
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in ordered]
        with mode, layouts_of_kernels():
            found = operator(*fakes)
        made = operator(*ordered)
        assert (found.dtype, found.shape) == (made.dtype, made.shape)
        assert found.stride() == made.stride(), [getattr(a, "stride", tuple)() for a in ordered]


def _laid_out(sizes: Sequence[int], order: Sequence[int], odd: random.Random | None) -> torch.Tensor:
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


class Masked(nn.Module):
    """Embeds, and multiplies with a mask that is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.embed(ids)
        for layer in self.layers:
            h = (layer(h) * mask.unsqueeze(-1)).tanh() * mask[..., None] + h
        return h.square().mean()


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GELU(), nn.GroupNorm(2, 4)) for _ in range(3))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y

    @staticmethod
    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()


_SLICES: dict[str, tuple[type[nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "words": (Masked, lambda: (torch.randint(50, (4, 32))[:, :8], torch.ones(4, 32).long()[:, :8])),
    "one word": (Masked, lambda: (torch.randint(50, (4, 32))[:, :1], torch.ones(4, 32)[:, :1])),
    "one sample": (Masked, lambda: (torch.randint(50, (4, 32))[:1, :8], torch.ones(1, 8).expand(1, 8))),
    "expanded": (Masked, lambda: (torch.randint(50, (1, 8)).expand(4, 8), torch.ones(1, 8).expand(4, 8))),
    "channels": (Image, lambda: (torch.randn(1, 6, 8, 8)[:, :4],)),
    "columns": (Image, lambda: (torch.randn(2, 8, 12, 4).permute(0, 3, 1, 2)[..., :8],)),
    "one image, channels last": (Image, lambda: (torch.randn(1, 8, 8, 4).permute(0, 3, 1, 2),)),
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("name", _SLICES)
def test_slices_as_inputs_are_predicted(name: str) -> None:
    torch.manual_seed(0)
    build, inputs = _SLICES[name]
    model, args = build(), inputs()
    loss = Image.loss if build is Image else None
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan = planner.plan(model, args, budget="min", loss=loss, solver="sqrt_n")
        report = planner.verify(model, args, plan=plan, loss=loss, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


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


class _LikeParts(nn.Module):
    """Makes tensors like parts of others, which are not dense."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x).tanh()
        part, repeated = made[:, ::2], made[:, :1].expand(-1, 8)
        return self.last((torch.zeros_like(part) + part.flip(0)) * torch.ones_like(repeated)).square().mean()


def test_tensors_like_parts_of_others_are_captured_at_symbolic_sizes_too() -> None:
    model = _LikeParts()
    reference = copy.deepcopy(model)
    planner.plan(model, (torch.randn(6, 8),), budget="min", solver="sqrt_n").apply(model)
    for size in (6, 10, 7):  # the second is captured with a symbol for the batch
        x = torch.randn(size, 8)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "a part of the forward that cannot be captured")
            gradients = torch.autograd.grad(model(x), list(model.parameters()))
        wanted = torch.autograd.grad(reference(x), list(reference.parameters()))
        assert all(map(torch.equal, gradients, wanted))
