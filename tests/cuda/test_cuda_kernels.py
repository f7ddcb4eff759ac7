"""Capturing on the CPU what a GPU would run: dropout's mask, attention's kernels."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import planner
from planner._torch.compat import version
from planner._torch.cuda.attention import AttentionCall, attend, choose_attention, prefers_cudnn
from planner._torch.cuda.kernels import dispatched_in_python, kernels_of_cuda
from planner.errors import CaptureError, PlanWarning
from planner.user_plan import Plan
from tests.small import small_gpt

V100, T4, A100, RTX4090, H100, B200, RTX5090 = (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)


class Attending(nn.Module):
    """One layer of attention, by PyTorch's function."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(64, 3 * 64)
        self.masked = masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool) if self.masked else None
        out = F.scaled_dot_product_attention(*parts, attn_mask=mask, dropout_p=0.125)
        return out.transpose(1, 2).flatten(2).float().square().mean()


def attending(dtype: torch.dtype, device: str, attention: Any = None, masked: bool = False) -> Plan:
    model = Attending(masked).to(dtype)
    x = torch.randn(2, 64, 64, dtype=dtype)
    return planner.plan(model, (x,), budget="100GiB", device=device, attention=attention, solver="none")


def operators(plan: Plan) -> set[str]:
    return {op.name.removeprefix("aten.").removesuffix(".default") for g in plan.graphs for op in g.ops}


@pytest.mark.parametrize(
    ("dtype", "device", "masked", "kernel"),
    [
        (torch.float32, "V100-32GB", False, "efficient"),
        (torch.float16, "V100-32GB", False, "efficient"),
        (torch.bfloat16, "A100-80GB", False, "flash"),
        (torch.bfloat16, "A100-80GB", True, "efficient"),
        (torch.float32, "H100", True, "efficient"),
        (torch.bfloat16, "H100", False, "cudnn"),
        (torch.bfloat16, "H100", True, "cudnn"),
        (torch.bfloat16, "MI250", False, "flash"),
    ],
)
def test_the_kernel_that_the_device_would_choose(
    dtype: torch.dtype, device: str, masked: bool, kernel: str
) -> None:
    found = operators(attending(dtype, device, masked=masked))
    assert f"_scaled_dot_product_{kernel}_attention" in found
    assert f"_scaled_dot_product_{kernel}_attention_backward" in found


@pytest.mark.heavy
def test_the_math_kernel_keeps_the_attention_matrix_and_the_others_do_not() -> None:
    peaks = {
        kernel: attending(torch.bfloat16, "A100-80GB", kernel).baseline.dynamic_peak_bytes
        for kernel in ("flash", "efficient", "math")
    }
    matrix = 2 * 4 * 64 * 64 * 2
    assert peaks["math"] >= peaks["flash"] + matrix
    assert abs(peaks["flash"] - peaks["efficient"]) < matrix


def test_a_kernel_that_the_device_does_not_have_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"attention='flash' cannot be had.*8\.0"):
        attending(torch.float16, "V100-32GB", "flash")
    with pytest.raises(CaptureError, match="takes no mask"):
        attending(torch.bfloat16, "A100-80GB", "flash", masked=True)


@pytest.mark.parametrize(
    ("capability", "dtype", "shape", "masked", "kernel"),
    [
        (A100, torch.bfloat16, (2, 4, 16, 64), False, "flash"),
        (A100, torch.bfloat16, (2, 4, 16, 512), False, "efficient"),
        (A100, torch.bfloat16, (2, 4, 16, 20), True, "math"),
        (A100, torch.float32, (2, 4, 16, 62), False, "math"),
        (A100, torch.float64, (2, 4, 16, 64), False, "math"),
        (A100, torch.bfloat16, (4, 16, 64), False, "math"),
        (T4, torch.float16, (2, 4, 16, 64), False, "efficient"),
        (V100, torch.bfloat16, (2, 4, 16, 64), False, "math"),
        (V100, torch.float32, (2, 4, 16, 62), False, "efficient"),
        (V100, torch.float16, (2, 4, 16, 60), False, "math"),
        (H100, torch.bfloat16, (2, 4, 16, 64), False, "cudnn"),
        (H100, torch.float16, (2, 4, 16, 64), True, "cudnn"),
        (B200, torch.bfloat16, (2, 4, 16, 128), True, "cudnn"),
        (H100, torch.float32, (2, 4, 16, 64), False, "efficient"),
        (H100, torch.bfloat16, (2, 4, 16, 160), False, "cudnn"),
        (H100, torch.bfloat16, (2, 4, 16, 60), False, "flash"),
        (H100, torch.bfloat16, (2, 4, 1, 64), False, "flash"),
        (RTX5090, torch.bfloat16, (2, 4, 16, 64), False, "flash"),
    ],
)
def test_what_each_kernel_takes(
    capability: tuple[int, int], dtype: torch.dtype, shape: tuple[int, ...], masked: bool, kernel: str
) -> None:
    with torch.device("meta"):
        q = torch.empty(shape, dtype=dtype)
        mask = torch.ones(shape[-2], shape[-2], dtype=torch.bool) if masked else None
    assert choose_attention(AttentionCall(capability, q, q, q, mask)) == kernel


def test_another_gpu_than_the_one_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cuDNN's kernel is preferred, PyTorch puts it first for good when it first chooses one."""
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: [3, 1, 2, 0, 4])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: H100)
    assert choose_attention(attention_call(A100)) == "flash"
    assert choose_attention(attention_call(H100)) == "cudnn"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: A100)
    assert choose_attention(attention_call(A100)) == "cudnn"  # someone asked for that order


def attention_call(capability: tuple[int, int] = H100, /, **options: Any) -> AttentionCall:
    """A call in bfloat16; `heads`, `keys` and `width` are those of keys and values."""
    heads, keys, width = (options.pop(n, usual) for n, usual in (("heads", 4), ("keys", 16), ("width", 64)))
    grad = options.pop("requires_grad", True)
    query = torch.empty(2, 4, 16, options.pop("query_width", 64), dtype=torch.bfloat16, device="meta")
    key, value = (
        torch.empty(2, heads, keys, w, dtype=torch.bfloat16, device="meta") for w in (query.shape[-1], width)
    )
    parts = [part.requires_grad_(grad) for part in (query, key, value)]
    if "mask" in options:
        options["mask"] = torch.empty(options["mask"], dtype=torch.bfloat16, device="meta")
    return AttentionCall(capability, *parts, **options)


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (attention_call(heads=2, gqa=True), "cudnn"),
        (attention_call(A100, heads=2, gqa=True), "flash"),
        (attention_call(A100, heads=2, gqa=True, mask=(16, 16)), "math"),
        (attention_call(heads=2, gqa=True, mask=(16, 16)), "cudnn"),
        (attention_call(dropout=0.125), "cudnn"),
        (attention_call(dropout=0.1), "flash"),
        (attention_call(mask=(2, 1, 1, 16)), "cudnn"),
        (attention_call(mask=(4, 16, 16)), "efficient"),
        (attention_call(query_width=192, width=128), "cudnn"),
        (attention_call(A100, query_width=192, width=128), "efficient"),
        (attention_call(B200, query_width=192, width=128), "cudnn"),
        (attention_call(B200, query_width=160, width=160), "flash"),
        (attention_call(A100, query_width=160, width=160), "flash"),
        (attention_call(A100, dropout=0.1), "flash"),
        (attention_call(keys=1), "flash"),
        (attention_call(causal=True, keys=8), "cudnn"),
        (attention_call(A100, causal=True, keys=8), "efficient"),
        (attention_call(cudnn=False), "flash"),
        (attention_call(RTX4090, query_width=200, width=200), "efficient"),
        (attention_call(RTX4090, query_width=200, width=200, requires_grad=False), "flash"),
    ],
)
def test_masks_heads_and_widths_decide_too(call: AttentionCall, kernel: str) -> None:
    assert choose_attention(call) == kernel


@pytest.mark.parametrize(
    ("sizes", "strides", "padded_to"),
    [
        ((2, 1, 16, 24), None, None),
        ((2, 1, 16, 20), None, 24),
        ((2, 1, 16, 32), (16 * 100, 16 * 100, 100, 1), 40),  # by a whole 8, as PyTorch does
        ((2, 1, 16, 20), (16 * 1024, 16 * 1024, 1024, 1), None),
        ((1, 1, 16, 24), (0, 0, 24, 1), None),
    ],
)
def test_masks_of_the_memory_efficient_kernel_are_padded_by_their_strides(
    sizes: tuple[int, ...], strides: tuple[int, ...] | None, padded_to: int | None
) -> None:
    call = attention_call(A100, keys=sizes[-1])
    mask = torch.empty(sizes, dtype=torch.bfloat16, device="meta")
    if strides is not None:
        mask = torch.empty_strided(sizes, strides, dtype=torch.bfloat16, device="meta")
    with _Padded() as padded:
        attend(replace(call, mask=mask), "efficient")
    assert padded.columns == ([] if padded_to is None else [padded_to])


class _Padded(TorchDispatchMode):
    """Notes the columns of what is padded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.columns: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.constant_pad_nd.default:
            self.columns.append(made.shape[-1])
        return made


# What `torch._fused_sdp_choice` said on an H200 with torch 2.13.0+cu130 and cuDNN 9.19: for each width of the
# heads the first letters of the kernels of the eight kinds of calls below.
SINGLE, HALF, WIDE = "eeeeemme", "cccfcccf", "mmmmmmmm"
CHOICES = {
    torch.float32: dict.fromkeys((20, 64, 80, 128, 160, 192, 256, 512), SINGLE),
    torch.float64: dict.fromkeys((20, 64, 80, 128, 160, 192, 256, 512), WIDE),
    **{
        dtype: {20: "ffmfmfmf", **dict.fromkeys((64, 80, 128, 160, 192, 256), HALF), 512: SINGLE}
        for dtype in (torch.float16, torch.bfloat16)
    },
}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"masked": True},
    {"dropout": 0.1},
    {"causal": True, "keys": 64},
    {"heads": 2},
    {"heads": 2, "masked": True},
    {"keys": 1},
)


@pytest.mark.skipif(version() >= (2, 14), reason="the choices of PyTorch 2.13")
@pytest.mark.parametrize("dtype", CHOICES, ids=str)
def test_the_choices_of_an_h200(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    chosen = {
        width: "".join(choose_attention(call_of_kind(dtype, width, **kind))[0] for kind in KINDS)
        for width in CHOICES[dtype]
    }
    assert chosen == CHOICES[dtype]


def call_of_kind(
    dtype: torch.dtype,
    width: int,
    *,
    heads: int = 4,
    keys: int = 128,
    masked: bool = False,
    causal: bool = False,
    dropout: float = 0.0,
) -> AttentionCall:
    """Four heads of 128 queries, with gradients."""
    with torch.device("meta"):
        q = torch.empty(2, 4, 128, width, dtype=dtype, requires_grad=True)
        k = torch.empty(2, heads, keys, width, dtype=dtype, requires_grad=True)
        mask = torch.zeros(2, 1, 128, keys, dtype=dtype) if masked else None
    return AttentionCall(H100, q, k, k, mask, dropout, causal, gqa=heads != 4)


def test_what_is_switched_off_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    call = attention_call()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert choose_attention(call) == "efficient"
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], set_priority=True):
        assert choose_attention(call) == "flash"
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(CaptureError, match="flash: it takes no mask"),
    ):
        choose_attention(attention_call(mask=(16, 16)))
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert choose_attention(call) == "flash"


def test_cudnn_is_the_first_choice_where_it_is_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [prefers_cudnn(c) for c in (A100, RTX4090, H100, B200, RTX5090)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert not prefers_cudnn(H100)


def test_the_sums_of_cudnn_have_a_last_dimension() -> None:
    """As eager's have: what is planned to be saved is what is saved."""
    q = torch.randn(2, 4, 16, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    saved = []
    with (
        kernels_of_cuda(H100, None),
        dispatched_in_python(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        F.scaled_dot_product_attention(q, q, q)
    assert (2, 4, 16, 1) in [tuple(t.shape) for t in saved]


def test_the_mask_of_dropout_takes_a_byte_an_element_on_a_gpu() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x * self.scale, 0.1).sum()

    x = torch.randn(1024, 1024)
    on_gpu = planner.plan(Drops(), (x,), budget="100GiB", device="T4", solver="none")
    here = planner.plan(Drops(), (x,), budget="100GiB", solver="none")
    elements = 1 << 20
    # Here eager makes and keeps a mask of floats, there a mask of booleans.
    assert here.baseline.dynamic_peak_bytes - on_gpu.baseline.dynamic_peak_bytes >= 2.9 * elements
    assert "native_dropout" in operators(on_gpu)


@pytest.mark.heavy
def test_the_unplanned_step_and_the_captured_one_agree_on_a_gpu() -> None:
    model, args, _ = small_gpt()
    plan = planner.plan(model, args, budget="100GiB", device="T4", solver="none")
    assert plan.no_recompute.dynamic_peak_bytes <= plan.baseline.dynamic_peak_bytes
    assert plan.baseline.dynamic_peak_bytes < 1.05 * plan.no_recompute.dynamic_peak_bytes


def test_afterwards_everything_is_as_it_was() -> None:
    operator = torch.ops.aten.scaled_dot_product_attention.default
    before = dict(operator.py_kernels)
    with pytest.raises(RuntimeError, match="stop"), kernels_of_cuda(A100, None):
        raise RuntimeError("stop")
    assert operator.py_kernels == before
    q = torch.randn(1, 2, 8, 16)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), (q @ q.mT / 4).softmax(-1) @ q)


def test_positions_that_a_model_makes_may_decide_what_runs_without_data() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.packed = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(x.shape[0], device=x.device) + 3
            layer = self.plain if (positions.diff() == 1).all() else self.packed
            return layer(x).square().mean()

    with torch.device("meta"):
        model, x = Packed(), torch.empty(16, 8)
    plan = planner.plan(model, (x,), budget="100GiB", device="T4", solver="none")
    assert {op.module for g in plan.graphs for op in g.ops} >= {"plain"}
    assert not any(op.module == "packed" for g in plan.graphs for op in g.ops)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRUCell])
def test_recurrent_layers_of_a_gpu_are_not_known_on_the_cpu(layer: type[nn.Module]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0].square().mean()

    def planned(device: str) -> Plan:
        return planner.plan(Recurrent(), (torch.randn(3, 8),), budget="1GiB", device=device, solver="none")

    with pytest.warns(PlanWarning, match=f"a GPU has kernels of its own for {layer.__name__}"):
        note = planned("A100-80GB").notes[0]
    assert "kernels of its own" in note
    assert not any("kernels of its own" in note for note in planned("cpu").notes)
