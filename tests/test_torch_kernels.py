"""Capturing on the CPU what a GPU would run: dropout's mask, attention's kernels."""

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner._torch_kernels import choose_attention, kernels_of_cuda
from planner.errors import CaptureError, PlanWarning
from planner.plan_file import Plan
from tests.small import small_gpt

V100, T4, A100 = (7, 0), (7, 5), (8, 0)


class Attending(nn.Module):
    """One layer of attention, by PyTorch's function."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(64, 3 * 64)
        self.masked = masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool) if self.masked else None
        out = F.scaled_dot_product_attention(*parts, attn_mask=mask, dropout_p=0.1)
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
    ],
)
def test_the_kernel_that_the_device_would_choose(
    dtype: torch.dtype, device: str, masked: bool, kernel: str
) -> None:
    found = operators(attending(dtype, device, masked=masked))
    assert f"_scaled_dot_product_{kernel}_attention" in found
    assert f"_scaled_dot_product_{kernel}_attention_backward" in found


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
    ],
)
def test_what_each_kernel_takes(
    capability: tuple[int, int], dtype: torch.dtype, shape: tuple[int, ...], masked: bool, kernel: str
) -> None:
    with torch.device("meta"):
        q = torch.empty(shape, dtype=dtype)
        mask = torch.ones(shape[-2], shape[-2], dtype=torch.bool) if masked else None
    assert choose_attention(capability, q, q, q, mask) == kernel


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
        assert "kernels of its own" in planned("A100-80GB").notes[0]
    assert planned("cpu").notes == []
