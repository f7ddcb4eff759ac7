"""Scratch of kernels on a GPU that is not here: formulas against bytes that an H200 allocated."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.costs.cuda_scratch import cuda_scratch
from planner.costs.cuda_scratch.processors import processor_of
from planner.costs.cudnn_workspace import CAP
from planner.costs.devices import DEVICES, find_device
from planner.errors import PlanWarning
from planner.training_step.call import Call

aten = torch.ops.aten
MIB = 1 << 20
FLOAT, HALF, LONG = torch.float32, torch.bfloat16, torch.int64


@pytest.fixture(autouse=True)
def no_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CAP, raising=False)


def meta(*shape: int, dtype: torch.dtype = FLOAT, strides: Sequence[int] | None = None) -> torch.Tensor:
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def scratch(func: Any, *args: Any, device: str = "H200", **kwargs: Any) -> int:
    meter = cuda_scratch(find_device(device))
    assert meter is not None
    (memory,) = meter.measure([Call(func, args, kwargs)])
    return memory.workspace_bytes


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((4096, 5120), FLOAT, 138936832),
        ((16384, 2560), FLOAT, 138936832),
        ((16384, 320), FLOAT, 41943552),
        ((1024, 2000), FLOAT, 16384512),
        ((1024, 256), FLOAT, 2097664),
        ((1024, 64), FLOAT, 0),
        ((512, 1024), FLOAT, 0),
        ((8192, 2304), HALF, 139198976),
        ((8192, 768), HALF, 50332160),
        ((1024, 768), HALF, 6291968),
    ],
)
def test_gradients_of_biases(shape: tuple[int, ...], dtype: torch.dtype, expected: int) -> None:
    assert scratch(aten.sum.dim_IntList, meta(*shape, dtype=dtype), [0], True) == expected


def test_multiprocessors_decide_how_sums_are_split() -> None:
    sizes = {
        name: scratch(aten.sum.dim_IntList, meta(4096, 5120), [0], True, device=name)
        for name in ("V100-32GB", "T4", "A100-80GB", "H100", "RTX4090")
    }
    # 4 bytes of 5,120 outputs, for 128 threads and so many blocks of each output.
    blocks = {"V100-32GB": 32, "T4": 8, "A100-80GB": 44, "H100": 53, "RTX4090": 39}
    assert sizes == {name: 4 * 5120 * 128 * count + 512 for name, count in blocks.items()}


@pytest.mark.parametrize(
    ("func", "args", "expected"),
    [
        (aten.sum.default, (meta(4, 32, dtype=torch.bool),), 1024),
        (aten.mean.default, (meta(4, 128, 128),), 0),
        (aten.native_layer_norm.default, (meta(8, 1024, 768), [768], meta(768), meta(768), 1e-5), 0),
        (
            aten.native_layer_norm.default,
            (meta(4, 4096, 320, strides=(1310720, 1, 4096)), [320], meta(320), meta(320), 1e-5),
            20971520,
        ),
        (
            aten.native_group_norm.default,
            (meta(4, 2560, 8, 8), meta(2560), meta(2560), 4, 2560, 64, 32, 1e-5),
            81920,
        ),
        (
            aten.native_group_norm_backward.default,
            (*(meta(4, 960, 64, 64),) * 2, *(meta(4, 32),) * 2, meta(960), 4, 960, 4096, 32, [True] * 3),
            47104,
        ),
        (aten.embedding.default, (meta(2, 256), meta(8, 128, dtype=LONG, strides=(0, 1))), 8192),
        (
            aten.embedding_dense_backward.default,
            (meta(8, 1024, 768), meta(8, 1024, dtype=LONG), 50257, -1, False),
            28082688,
        ),
        (
            aten.embedding_dense_backward.default,
            (meta(8, 128, 256), meta(8, 128, dtype=LONG), 1000, -1, False),
            0,
        ),
        (aten.index_put.default, (meta(256, 64), [meta(256, dtype=LONG)], meta(256, 64), True), 8704),
        (aten.index_put.default, (meta(256, 64), [meta(256, dtype=LONG)], meta(64), True), 8704 + 65536),
        (aten.index_put.default, (meta(256, 64), [meta(256, dtype=LONG)], meta(64), False), 0),
        (aten.sort.default, (meta(256, dtype=LONG),), 2048),
        (aten.cumsum.default, (meta(8, 1024, dtype=torch.bool), -1), 65536),
        (aten._softmax_backward_data.default, (*(meta(8, 4, 128, 128),) * 2, -1, FLOAT), 2097152),
        (aten._log_softmax.default, (meta(4, 5, 64, 64, strides=(20480, 1, 320, 5)), 1, False), 327680),
        (aten._safe_softmax.default, (meta(4, 4, 32, 32), -1), 17408),
        (aten.mse_loss.default, (meta(4, 4, 64, 64), meta(4, 4, 64, 64)), 262144),
        (
            aten.upsample_nearest2d_backward.default,
            (meta(4, 32, 64, 64, strides=(262144, 4096, 64, 1)), [64, 64], [4, 32, 32, 32], 2.0, 2.0),
            2097152,
        ),
    ],
)
def test_copies_and_partial_results(func: Any, args: tuple[Any, ...], expected: int) -> None:
    assert scratch(func, *args) == expected


def test_attention() -> None:
    heads = meta(4, 8, 4096, 40, strides=(1310720, 40, 320, 1))
    text = meta(4, 8, 77, 40, strides=(24640, 40, 320, 1))
    wide = meta(4, 8, 256, 160, strides=(327680, 160, 1280, 1))
    seeds = (torch.empty((), dtype=LONG), torch.empty((), dtype=LONG), 0.0, [True, True, True, False])
    efficient = aten._scaled_dot_product_efficient_attention_backward.default
    rows = meta(4, 8, 4096)
    assert scratch(efficient, heads, heads, text, text, None, heads, rows, *seeds) == 34111488
    assert scratch(efficient, *(wide,) * 4, None, wide, meta(4, 8, 256), *seeds) == 6327296
    query = meta(8, 12, 1024, 64, dtype=HALF, strides=(2359296, 64, 2304, 1))
    out = meta(8, 12, 1024, 64, dtype=HALF, strides=(786432, 64, 768, 1))
    flash = aten._scaled_dot_product_flash_attention_backward.default
    rest = (meta(8, 12, 1024), None, None, 1024, 1024, 0.1, True, meta(2, dtype=LONG), meta(dtype=LONG))
    assert scratch(flash, out, query, query, query, out, *rest) == 25559040
    cudnn = aten._scaled_dot_product_cudnn_attention_backward.default
    few, shared = meta(4, 4, 32, 16, dtype=HALF), meta(4, 2, 32, 16, dtype=HALF)
    rest = (meta(4, 4, 32, 1), meta(dtype=LONG), meta(dtype=LONG), None, None, None, 32, 32, 0.0, True)
    assert scratch(cudnn, few, few, shared, shared, few, *rest) == 68096


def convolved(image: torch.Tensor, weight: torch.Tensor, step: int = 1, pad: int = 0, **more: Any) -> int:
    rest = (None, [step, step], [pad, pad], [1, 1], False, [0, 0], 1)
    return scratch(aten.convolution.default, image, weight, *rest, **more)


def backward(
    grad: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, step: int = 1, pad: int = 0
) -> int:
    rest = ([0], [step, step], [pad, pad], [1, 1], False, [0, 0], 1, [True, True, False])
    return scratch(aten.convolution_backward.default, grad, image, weight, *rest)


def test_convolutions_on_hopper() -> None:
    image, weight = meta(128, 128, 28, 28), meta(128, 128, 3, 3)
    assert convolved(image, weight, pad=1) == 103350784
    assert convolved(image, weight, pad=1, device="A100-80GB") == 0  # not seen there
    assert backward(image, image, weight, pad=1) == 111608832
    point = meta(256, 512, 1, 1)
    assert convolved(meta(128, 512, 28, 28), point) == 512
    assert backward(meta(128, 256, 28, 28), meta(128, 512, 28, 28), point) in (67108864, 67109376)
    halves = meta(128, 3, 224, 224, dtype=HALF), meta(64, 3, 7, 7, dtype=HALF)
    assert convolved(*halves, step=2, pad=3) == 308332032
    assert convolved(meta(2, 32, 16, 16), meta(32, 32, 3, 3), pad=1) == 0
    last = meta(4, 32, 16, 16, strides=(8192, 1, 512, 32))
    assert convolved(last, meta(32, 32, 3, 3), pad=1) == 36864  # the weight, channels last


def test_a_cap_counts_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAP, "64")
    assert convolved(meta(2, 32, 16, 16), meta(32, 32, 3, 3), pad=1) == 64 * MIB


def test_devices_of_the_table_have_their_multiprocessors() -> None:
    listed = [d for d in DEVICES.values() if d.kind == "cuda" and d.cudnn]
    assert {processor_of(d).multiprocessors for d in listed} == {
        40,
        58,
        72,
        80,
        82,
        108,
        128,
        132,
        142,
        148,
        170,
    }
    renamed = replace(find_device("T4"), name="mine", memory_bytes=MIB)
    assert processor_of(renamed) == processor_of(find_device("T4"))


@pytest.mark.parametrize("device", ["cpu", "MI300X"])
def test_other_devices_have_no_formulas(device: str) -> None:
    assert cuda_scratch(find_device(device)) is None


DATA = Path(__file__).parents[1] / "data"
FACTS = json.loads((DATA / "cuda_scratch.json").read_text(encoding="utf-8"))


def read(value: Any) -> Any:
    """An argument as the file has it: a tensor is its dtype, sizes and, if it is not dense, strides."""
    if isinstance(value, str):
        name, *numbers = value.replace("]", "").split("[")
        sizes, *strides = [[int(n) for n in part.split(",") if n] for part in numbers] or [None]
        dtype = getattr(torch, name)
        return dtype if sizes is None else meta(*sizes, dtype=dtype, strides=strides[0] if strides else None)
    return [read(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", FACTS)
def test_measured_facts(name: str) -> None:
    """What the allocator does not split off, up to 1 MiB, may be missing where large blocks are asked for."""
    operator, overload = name.split(".")
    func = getattr(getattr(aten, operator), overload)
    for args, seen in FACTS[name]:
        predicted = scratch(func, *map(read, args))
        assert predicted == seen or (seen > MIB and 0 < seen - predicted < MIB), (args, seen, predicted)


def test_convolutions_of_float32_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an H200 asked for, by batch, channels, side, results, side of the kernel, stride and padding."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    seen = json.loads((DATA / "convolutions_without_tf32.json").read_text(encoding="utf-8"))
    right = [0, 0, 0, 0]
    for batch, channels, side, made, kernel, stride, padding, *found in seen:
        points = (side + 2 * padding - kernel) // stride + 1
        image, weight = meta(batch, channels, side, side), meta(made, channels, kernel, kernel)
        grad = meta(batch, made, points, points)
        options = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1
        predicted = [scratch(aten.convolution.default, image, weight, None, *options)] + [
            scratch(aten.convolution_backward.default, grad, image, weight, [0], *options, [*which, False])
            for which in ((True, False), (False, True), (True, True))
        ]
        right = [n + (a == b) for n, a, b in zip(right, predicted, found, strict=True)]
    assert right == [230, 227, 221, 214]


def test_a_batch_of_none_takes_no_scratch() -> None:
    heads = [meta(0, 4, 64, 256, dtype=HALF)] * 3
    assert scratch(aten._scaled_dot_product_flash_attention.default, *heads, device="A100-80GB") == 0


def test_formulas_take_microseconds() -> None:
    meter = cuda_scratch(find_device("H100"))
    assert meter is not None
    args = (meta(4096, 5120), [0], True)
    calls = [Call(aten.sum.dim_IntList, args)] * 1000
    started = time.process_time()
    meter.measure(calls)
    assert time.process_time() - started < 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(512, 1024), nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()).square().mean()


def test_a_plan_counts_scratch() -> None:
    x = torch.empty(4096, 512, device="meta")
    with torch.device("meta"):
        model = Net()
    plans = {"H100": planner.plan(model, (x,), budget="1GiB", device="H100", solver="none")}
    with pytest.warns(PlanWarning, match="AMD's libraries .* is not known for MI300X") as told:
        plans["MI300X"] = planner.plan(model, (x,), budget="1GiB", device="MI300X", solver="none")
    assert str(told[0].message) in plans["MI300X"].notes
    assert not plans["H100"].notes
    # At the gradient of the last bias, a sum of 4,096 rows in 64 parts.
    partial = scratch(aten.sum.dim_IntList, meta(4096, 512), [0], True, device="H100")
    peaks = {name: plan.baseline.dynamic_peak_bytes for name, plan in plans.items()}
    assert partial > 16 * MIB
    assert 0 < peaks["H100"] - peaks["MI300X"] <= partial
    assert plans["H100"].target.workspace == "formulas"
    assert plans["MI300X"].target.workspace == "none"
