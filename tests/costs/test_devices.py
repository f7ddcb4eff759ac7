"""Devices: finding them by name, what the table promises, rounding."""

import copy
import json
import pickle
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import planner
from planner.costs.devices import (
    DEVICES,
    Device,
    DeviceError,
    described_gpu,
    find_device,
    round_bytes,
    same_processor,
)
from planner.costs.workspace import WorkspaceMeter
from planner.errors import PlannerError
from planner.planning import one_backend

GIB = 1 << 30


def test_the_reference_processor_has_the_published_cost_model() -> None:
    cpu = find_device("cpu")
    assert cpu.kind == "cpu"
    assert {cpu.flops_of(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)} == {125e9}
    assert (cpu.bandwidth, cpu.launch_seconds) == (10e9, 2e-6)
    assert round_bytes(cpu, 13) == 13


@pytest.mark.parametrize(
    ("name", "memory_gib", "bandwidth", "float16"),
    [
        ("V100-16GB", 16, 900e9, 125e12),
        ("V100-32GB", 32, 900e9, 125e12),
        ("T4", 15, 320e9, 65e12),
        ("A10", 23, 600e9, 125e12),
        ("A100-40GB", 40, 1555e9, 312e12),
        ("A100-80GB", 80, 2039e9, 312e12),
        ("L4", 23, 300e9, 121e12),
        ("L40S", 45, 864e9, 362e12),
        ("H100", 80, 3350e9, 989e12),
        ("H200", 141, 4800e9, 989e12),
        ("B200", 180, 7700e9, 2250e12),
        ("RTX3090", 24, 936e9, 71e12),
        ("RTX4090", 24, 1008e9, 165.2e12),
        ("RTX5090", 32, 1792e9, 209.5e12),
        ("MI250", 64, 1638e9, 181e12),
        ("MI300X", 192, 5300e9, 1307e12),
    ],
)
def test_named_accelerators(name: str, memory_gib: int, bandwidth: float, float16: float) -> None:
    device = find_device(name)
    assert device.name == name
    assert device.kind == "cuda"
    assert 0.95 * memory_gib * GIB < device.memory_bytes < memory_gib * GIB
    assert device.bandwidth == bandwidth
    assert device.flops_of(torch.float16) == pytest.approx(float16)
    assert device.flops["float64"] <= device.flops["float32"] <= device.flops["float16"]
    assert 0 < device.context_bytes < GIB


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        *(("V100-32GB", 8.125), ("T4", 8.125), ("A100-80GB", 8.125), ("L40S", 8.125), ("RTX4090", 8.125)),
        *(("H100", 32), ("H200", 32), ("B200", 32), ("RTX5090", 32), ("MI250", 32), ("MI300X", 128)),
    ],
)
def test_each_of_two_threads_has_a_workspace_for_matrix_products(name: str, mib: float) -> None:
    assert find_device(name).library_bytes == 2 * mib * 2**20


@pytest.mark.parametrize("written", ["A100-80GB", "a100-80gb", "A100 80GB", "a100_80gb"])
def test_names_may_be_written_loosely(written: str) -> None:
    assert find_device(written) is DEVICES["A100-80GB"]


@pytest.mark.parametrize(
    ("written", "name"), [("H100-80GB", "H100"), ("h200 141 GB", "H200"), ("L40S-48GB", "L40S")]
)
def test_a_name_may_have_its_memory_behind_it(written: str, name: str) -> None:
    assert find_device(written) is DEVICES[name]


def test_tf32_counts_only_where_it_is_allowed_and_exists() -> None:
    a100, v100 = find_device("A100-40GB"), find_device("V100-32GB")
    assert a100.flops_of(torch.float32) == 19.5e12
    assert a100.flops_of(torch.float32, tf32=True) == 156e12
    assert a100.flops_of(torch.bfloat16, tf32=True) == 312e12
    assert v100.flops_of(torch.float32, tf32=True) == v100.flops_of(torch.bfloat16) == 15.7e12


def test_the_model_says_where_it_is() -> None:
    assert find_device(None, torch.device("cpu")).name == "cpu"
    assert find_device(None, torch.device("meta")).name == "cpu"
    assert find_device(None).name == "cpu"
    assert find_device(torch.device("cpu")).name == "cpu"


def test_a_device_of_ones_own() -> None:
    own = replace(find_device("H100"), name="half an H100", memory_bytes=40 * GIB)
    assert find_device(own) is own
    assert hash(own) != hash(find_device("H100"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("A100", ["could be any of", "A100-40GB", "A100-80GB"]),
        ("V100-23GB", ["did you mean", "V100-32GB"]),
        ("H100-94GB", ["unknown device", "H100"]),
        ("RTX4080", ["did you mean", "RTX4090"]),
        ("abacus", ["unknown device 'abacus'", "H200", "'cuda'"]),
        ("", ["unknown device ''"]),
    ],
)
def test_an_unknown_name_is_answered_with_near_ones(name: str, words: list[str]) -> None:
    with pytest.raises(DeviceError) as caught:
        find_device(name)
    assert isinstance(caught.value, PlannerError)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_cuda_without_a_gpu_says_what_to_do() -> None:
    with pytest.raises(DeviceError, match=r"no CUDA device is here.*device='A100-80GB'"):
        find_device("cuda")
    with pytest.raises(DeviceError, match="no CUDA device is here"):
        find_device(torch.device("cuda", 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_that_is_here() -> None:
    device = find_device("cuda")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    assert (device.name, device.memory_bytes) == (properties.name, properties.total_memory)
    with pytest.raises(DeviceError, match="does not exist"):
        find_device(f"cuda:{torch.cuda.device_count()}")


@pytest.mark.parametrize(
    ("product", "gib", "listed"),
    [
        ("Tesla V100-SXM2-16GB", 15.78, "V100-16GB"),
        ("Tesla V100-SXM2-32GB", 31.75, "V100-32GB"),
        ("Tesla T4", 14.7, "T4"),
        ("NVIDIA A10", 22.1, "A10"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-40GB"),
        ("NVIDIA L4", 22, "L4"),
        ("NVIDIA L40S", 44.5, "L40S"),
        ("NVIDIA H100 80GB HBM3", 79.2, "H100"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX4090"),
        ("AMD Instinct MI300X", 191.98, "MI300X"),
    ],
)
def test_the_driver_s_name_finds_the_row(product: str, gib: float, listed: str) -> None:
    device = described_gpu(product, int(gib * GIB))
    assert device == replace(DEVICES[listed], name=product, memory_bytes=int(gib * GIB))


def test_a_gpu_that_is_not_listed_is_estimated() -> None:
    # The figures of a GeForce GTX 1080 Ti: 11.3 TFLOP/s and 484 GB/s on paper.
    properties = SimpleNamespace(
        multi_processor_count=28, clock_rate=1582000, memory_clock_rate=5505000, memory_bus_width=352
    )
    device = described_gpu("NVIDIA GeForce GTX 1080 Ti", 11 * GIB, properties)
    assert device.flops_of(torch.float32) == pytest.approx(11.3e12, rel=0.01)
    assert device.bandwidth == pytest.approx(484e9, rel=0.01)
    assert device.memory_bytes == 11 * GIB


@pytest.mark.parametrize("product", ["NVIDIA L40", "NVIDIA GH200 480GB", "Quadro RTX 5000"])
def test_a_name_that_only_looks_like_a_listed_one(product: str) -> None:
    figures = described_gpu(product, 40 * GIB).flops
    assert all(figures != listed.flops for listed in DEVICES.values())


def test_cuda_rounds_to_512_bytes() -> None:
    gpu = find_device("T4")
    assert [round_bytes(gpu, n) for n in (0, 1, 512, 513, 1 << 20)] == [0, 512, 512, 1024, 1 << 20]


def test_a_device_cannot_be_changed() -> None:
    device: Device = find_device("T4")
    with pytest.raises(AttributeError):
        device.bandwidth = 1.0  # type: ignore[misc]


def test_a_device_can_be_copied_stored_and_sent() -> None:
    device = find_device("T4")
    assert pickle.loads(pickle.dumps(device)) == copy.deepcopy(device) == device
    assert Device(**asdict(device)) == device


def test_a_device_of_ones_own_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "capped", "like": "A100-80GB", "memory_bytes": 40 * GIB}))
    device = find_device(str(path))
    assert device == replace(find_device("A100-80GB"), name="capped", memory_bytes=40 * GIB)
    whole_numbers = {"allocation_rounding_bytes": 512.0, "context_bytes": 5e8, "library_bytes": 1e7}
    path.write_text(
        json.dumps({"name": "floats", "like": "A100-80GB", "memory_bytes": 4e10, **whole_numbers})
    )
    assert type(round_bytes(find_device(str(path)), 13)) is int
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    plan = planner.plan(module, (torch.randn(4, 8),), budget="400%", device=str(path), optimizer="Adam")
    assert planner.Plan.loads(plan.dumps()).target.device == "floats"
    whole = asdict(find_device("T4"))
    path.write_text(json.dumps(whole))
    assert find_device(str(path)) == find_device("T4")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "x"}, ["missing", "kind", "'like'"]),
        ({"like": "A100-80GB", "memory": 3}, ["unknown field 'memory'", "memory_bytes"]),
        ({"like": "A100"}, ["could be any of"]),
        ({"like": "T4", "bandwidth": -1}, ["bandwidth is -1", "at least 1000"]),
        ({"like": "T4", "from_host": 1e-10}, ["from_host is 1e-10", "at least 1000"]),
        ({"like": "T4", "flops": {"float32": 1e-10}}, ["flops", "at least 1000"]),
        ({"like": "T4", "flops": {"float16": 1e12}}, ["flops", "'float32'"]),
        ({"like": "T4", "capability": [8]}, ["capability", "[8, 0]"]),
        ({"like": "T4", "kind": "tpu"}, ["kind is 'tpu'"]),
        ([1], ["a JSON object"]),
    ],
)
def test_a_device_file_that_is_wrong(given: Any, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(given))
    with pytest.raises(DeviceError) as caught:
        find_device(str(path))
    for word in words:
        assert word in str(caught.value)


def test_a_device_file_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match="cannot be read"):
        find_device("no-such-device.json")


@pytest.mark.parametrize(
    ("product", "gib", "same", "others"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "H100", ["H200", "A100-80GB", "cpu"]),
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100-80GB", ["A100-40GB", "H100"]),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-16GB", ["T4"]),
    ],
)
def test_a_gpu_that_is_here_is_the_one_of_the_table(
    product: str, gib: float, same: str, others: list[str]
) -> None:
    here = described_gpu(product, int(gib * GIB))
    assert same_processor(find_device(same), here)
    assert same_processor(replace(find_device(same), name="capped", memory_bytes=GIB), here)
    assert not any(same_processor(find_device(other), here) for other in others)


def test_a_plan_for_the_gpu_at_hand_by_its_name_measures_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(4, 4)
    here = described_gpu("NVIDIA H100 80GB HBM3", int(79.2 * GIB))
    asked = []

    def meter(device: torch.device) -> WorkspaceMeter:
        asked.append(device.type)
        return WorkspaceMeter("cpu", None)  # which stands for it

    def find(name: Any, model_device: torch.device | None = None) -> Device:
        return here if name is None else find_device(name, model_device)

    monkeypatch.setattr(one_backend, "device_of", lambda model, step: torch.device("cuda"))
    monkeypatch.setattr(one_backend, "find_device", find)
    monkeypatch.setattr(one_backend, "WorkspaceMeter", meter)
    made = planner.plan(model, (torch.randn(2, 4),), budget="100GiB", device="H100", solver="none")
    assert asked == ["cuda"]
    assert made.target.workspace == "measured"
