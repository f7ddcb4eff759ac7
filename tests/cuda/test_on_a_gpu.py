"""What only a GPU can show: plans made, followed and verified on it, and what is assumed of its kernels."""

import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import planner
from planner._torch import fake
from planner._torch.cuda.attention import AttentionCall, choose_attention
from planner._torch.cuda.recurrent_state import make_dropout_states
from planner._torch.layouts.elementwise_strides import ELEMENTWISE
from planner._torch.layouts.shape_functions import layouts_of_kernels
from planner.graph.replay import rng
from planner.verification.verify import Report
from tests._torch.test_layouts import _ARGUMENTS, _laid_out, _numbers_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

aten = torch.ops.aten
GPU = torch.device("cuda")


class Segments(nn.Module):
    """Convolves, upsamples few channels, and compares pixels with labels, as segmentation does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.Conv2d(32, 5, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x.to(memory_format=torch.channels_last))).relu()
        x = F.interpolate(self.last(F.dropout(x, 0.1)), size=(64, 64), mode="bilinear")
        return F.cross_entropy(x, labels)


class Layers(nn.Module):
    """Layers with dropout and normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.dropout(F.gelu(layer(norm(x))), 0.1)
        return x.square().mean()


class Attention(nn.Module):
    """Attention with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Recurrent(nn.Module):
    """A recurrent layer between others."""

    def __init__(self, kind: Any, *, packed: bool = False, **options: Any) -> None:
        super().__init__()
        self.packed, self.batch_first = packed, options.get("batch_first", False)
        self.first, self.recurrent = nn.Linear(16, 16), kind(16, 32, **options)
        width = options.get("proj_size") or 32
        self.last = nn.Linear(width * (2 if options.get("bidirectional") else 1), 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.first(x).tanh())
        if self.packed:
            lengths = torch.tensor([24, 16, 8, 5])
            given = pack_padded_sequence(x, lengths, batch_first=self.batch_first)
            x, _ = pad_packed_sequence(self.recurrent(given)[0], batch_first=self.batch_first)
        else:
            x = self.recurrent(x)[0]
        return self.last(F.gelu(x).tanh()).square().mean()


def verified(module: nn.Module, *args: torch.Tensor, budget: str = "min") -> Report:
    """A plan, made and verified on the GPU, after a step."""
    module, given = module.to(GPU), tuple(arg.to(GPU) for arg in args)
    module(*given).backward()
    module.zero_grad(set_to_none=True)
    plan = planner.plan(module, args=given, budget=budget, costs="roofline")
    report = planner.verify(module, args=given, plan=plan, repeats=0)
    assert report.ok, report.problems
    return report


@pytest.mark.parametrize("budget", ["min", "90%"])
@pytest.mark.parametrize(
    ("make", "args"),
    [
        (Segments, (torch.randn(4, 3, 32, 32), torch.randint(0, 5, (4, 64, 64)))),
        (Layers, (torch.randn(256, 128),)),
        (Attention, (torch.randn(8, 32, 64),)),
    ],
)
def test_peaks_are_as_predicted(
    make: Callable[[], nn.Module], args: tuple[torch.Tensor, ...], budget: str
) -> None:
    torch.manual_seed(0)
    try:
        report = verified(make(), *args, budget=budget)
    except planner.InfeasibleBudget:
        pytest.skip("it cannot be had")
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
    assert report.baseline_measured_dynamic_peak_bytes == report.baseline_predicted_dynamic_peak_bytes


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"num_layers": 2, "dropout": 0.3, "batch_first": True}),
        (nn.LSTM, {"bidirectional": True, "num_layers": 2}),
        (nn.LSTM, {"proj_size": 8}),
        (nn.LSTM, {"packed": True, "batch_first": True, "num_layers": 2, "dropout": 0.3}),
        (nn.GRU, {"num_layers": 2, "dropout": 0.3}),
        (nn.GRU, {"packed": True, "batch_first": True, "bidirectional": True}),
        (nn.RNN, {"nonlinearity": "relu", "num_layers": 2, "bias": False}),
    ],
)
def test_recurrent_layers_are_planned_around(kind: Any, options: dict[str, Any]) -> None:
    """Whether predictions are right to the byte was not seen since all gradients of weights are counted."""
    torch.manual_seed(0)
    sizes = (4, 24, 16) if options.get("batch_first") else (24, 4, 16)
    report = verified(Recurrent(kind, **options), torch.randn(sizes))
    for measured, predicted in (
        (report.measured_dynamic_peak_bytes, report.predicted_dynamic_peak_bytes),
        (report.baseline_measured_dynamic_peak_bytes, report.baseline_predicted_dynamic_peak_bytes),
    ):
        assert predicted / 1.1 <= measured <= predicted * 1.005, (measured, predicted)


def test_a_recurrent_layer_under_autocast_is_planned_around() -> None:
    with torch.autocast("cuda", torch.float16):
        verified(Recurrent(nn.LSTM, num_layers=2), torch.randn(24, 4, 16))


def test_dropout_between_layers_depends_on_the_generator_after_its_state_was_set() -> None:
    """That making the state before a step draws as the step would was read in PyTorch's source, not seen."""
    layer = nn.LSTM(4, 4, num_layers=2, dropout=0.5).to(GPU)
    x, before, results = torch.randn(64, 2, 4, device=GPU), torch.cuda.get_rng_state(), []
    for made_before in (False, True):
        torch.cuda.set_rng_state(before)
        if made_before:
            make_dropout_states(layer)
        drawn = torch.cuda.get_rng_state()
        results.append(layer(x)[0])
        assert torch.equal(drawn, torch.cuda.get_rng_state()) is made_before
    assert torch.equal(*results)
    assert not torch.equal(layer(x)[0], results[0])


def test_recurrent_dropout_goes_on_as_without_a_plan_that_runs_other_dropout_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_again, in_state = [], rng._in_state
    monkeypatch.setattr(rng, "_in_state", lambda *args: run_again.append(args) or in_state(*args))
    module = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)))
    layer, x = nn.LSTM(16, 16, num_layers=2, dropout=0.5).to(GPU), torch.randn(64, 64, 16, device=GPU)
    module.to(GPU)
    plan = planner.plan(module, args=(x,), budget="min", costs="roofline", encodings="none")

    def steps() -> torch.Tensor:
        torch.manual_seed(0)
        found = []
        for _ in range(3):
            layer.zero_grad(set_to_none=True)
            layer(module(x))[0].square().mean().backward()
            found += [parameter.grad.flatten() for parameter in layer.parameters()]
        return torch.cat([*found, torch.rand(1, device=GPU)])

    unplanned = steps()
    plan.apply(module)
    assert torch.equal(steps(), unplanned)
    assert run_again


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [20, 64, 128, 192, 256, 512])
def test_attention_is_what_pytorch_chooses(dtype: torch.dtype, width: int) -> None:
    names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
    wrong = []
    for heads, keys, masked, causal, dropout in itertools.product(
        (4, 2), (128, 64, 1), (False, True), (False, True), (0.0, 0.1, 0.125)
    ):
        if masked and causal:
            continue
        q = torch.randn(2, 4, 128, width, device=GPU, dtype=dtype, requires_grad=True)
        k = torch.randn(2, heads, keys, width, device=GPU, dtype=dtype, requires_grad=True)
        mask = torch.zeros(2, 1, 128, keys, device=GPU, dtype=dtype) if masked else None
        gqa = heads != 4
        chosen = names[torch._fused_sdp_choice(q, k, k, mask, dropout, causal, enable_gqa=gqa)]
        call = AttentionCall(torch.cuda.get_device_capability(), q, k, k, mask, dropout, causal, None, gqa)
        if choose_attention(call) != chosen:
            wrong.append((heads, keys, masked, causal, dropout, chosen, choose_attention(call)))
    assert not wrong


_ORDERS = [(0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2), (1, 0, 2, 3)]


@pytest.mark.parametrize("operator", _ARGUMENTS, ids=lambda operator: str(operator.overloadpacket))
def test_results_of_transposed_arguments_are_laid_out_as_on_the_gpu(operator: Any) -> None:
    forms = [_laid_out((2, 3, 4, 5), order, None).to(GPU) for order in _ORDERS]
    forms += [_laid_out((2, 32, 4, 5), order, None).to(GPU) for order in _ORDERS]
    wrong = []
    for grad, x in itertools.product(forms, repeat=2):
        if grad.shape != x.shape:
            continue
        try:
            made = operator(*(arguments := _on_gpu(_ARGUMENTS[operator](grad, x))))
        except RuntimeError:
            continue
        wrong += _differences(operator, arguments, made)
    assert not wrong


@pytest.mark.parametrize("operator", ELEMENTWISE, ids=str)
def test_elementwise_results_are_laid_out_as_on_the_gpu(operator: Any) -> None:
    draw, wrong = random.Random(0), []
    kinds = [str(argument.type) for argument in operator._schema.arguments]
    for _ in range(20):
        sizes = [draw.choice((1, 1, 2, 3)) for _ in range(draw.randint(2, 5))]
        arguments = _numbers_of(operator)
        for position in (i for i in ELEMENTWISE[operator] if kinds[i] == "Tensor"):
            operand = _laid_out(sizes, draw.sample(range(len(sizes)), len(sizes)), None).abs_().to(GPU)
            arguments[position] = operand.int() if "bitwise" in str(operator) else operand
        if operator is aten.where.self or (operator is aten.native_dropout_backward.default):
            at = 0 if operator is aten.where.self else 1
            arguments[at] = arguments[at] > 0.5
        ordered = [arguments[i] for i in sorted(arguments)]
        wrong += _differences(operator, ordered, operator(*ordered))
    assert not wrong


def _on_gpu(arguments: tuple[Any, ...]) -> list[Any]:
    return [a.to(GPU) if isinstance(a, torch.Tensor) else a for a in arguments]


def _differences(operator: Any, arguments: list[Any], made: Any) -> list[str]:
    """Where results without data lie otherwise than those that the kernel made."""
    mode = fake.fake_mode()
    fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    with mode, layouts_of_kernels():
        found = operator(*fakes)
    pairs = [(found, made)] if isinstance(made, torch.Tensor) else zip(found, made, strict=True)
    given = [f"{tuple(a.shape)} {a.stride()}" for a in arguments if isinstance(a, torch.Tensor)]
    return [
        f"{given}: {one.stride()}, made {like.stride()}"
        for one, like in pairs
        if like is not None and like.numel() and one.stride() != like.stride()
    ]


def _selected(x: torch.Tensor) -> torch.Tensor:
    return torch.masked_select(x, x > 0.5).square().sum()


def _scattered(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).masked_scatter(x > 0.5, x.flatten()[: int(x.numel() * 0.9)]).square().mean()


@pytest.mark.parametrize("function", [_selected, _scattered])
def test_made_up_data_stop_no_kernel(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self.layer(x).tanh())

    with GPU:
        model, x = Chosen(), torch.randn(32, 64)
    report = planner.verify(model, args=(x,), plan=planner.plan(model, args=(x,), budget="min"), repeats=0)
    assert report.ok, report.problems


def test_what_a_plan_reserves_is_its_arena() -> None:
    layers = [nn.Linear(512 + 64 * (i % 3), 512 + 64 * ((i + 1) % 3)) for i in range(9)]
    model = nn.Sequential(*(nn.Sequential(layer, nn.GELU()) for layer in layers)).to(GPU)
    x = torch.randn(20_000, 512, device=GPU)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return torch.cuda.max_memory_reserved()

    plan = planner.plan(model, args=(x,), budget="70%", optimizer=optimizer, loss=mean_square)
    whole = plan.whole_step
    assert whole is not None
    assert whole.arena
    plan.apply(model, arena=False)
    train()  # which makes the state, and what libraries keep
    without = train()
    plan.apply(model)
    with_ = train()
    assert with_ < without
    allocated = torch.cuda.max_memory_allocated()
    assert allocated <= with_ <= 1.05 * allocated + 64 * 2**20
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert train() <= reserved  # what the device was given back was reserved again


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def test_inductor_emits_elsewhere_what_it_emits_here() -> None:
    options: Any = {"budget": "min", "backend": "inductor", "unproven": True, "solver": "sqrt_n"}
    options |= {"device": "cuda", "costs": "roofline"}
    model, x = Layers().train(), torch.randn(4096, 128)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", planner.PlanWarning)
        here, elsewhere = (
            planner.plan(model.to(device), x.to(device), **options) for device in ("cuda", "meta")
        )
    assert here.graphs[0].emitted == elsewhere.graphs[0].emitted
    assert here.predicted.dynamic_peak_bytes == elsewhere.predicted.dynamic_peak_bytes
