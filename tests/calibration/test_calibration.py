"""Measured figures of a device, their file, and plans that use it; a fake stands for the GPU."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import planner.costs.devices as devices
from planner.calibration import free_memory, measurements
from planner.calibration.calibrate import as_file, calibrate, with_figures
from planner.calibration.measurements import SMALL, Measured
from planner.cli.calibrate_command import described
from planner.cli.commands import app
from planner.costs.devices import DeviceError, find_device, load_device, same_processor
from planner.costs.roofline import roofline
from planner.errors import PlanFileError

MEASURED = Measured(
    bandwidth=3e12,
    flops={"float32": 5e13, "tf32": 4e14, "bfloat16": 7e14},
    launch_seconds=3e-6,
    library_bytes=64 << 20,
    context_bytes=700 << 20,
    to_host=50e9,
    from_host=55e9,
)


def test_what_is_measured_makes_a_device_file(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    drawn = torch.get_rng_state()
    found = calibrate("cpu", path, sizes=SMALL)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert load_device(path) == found.device
    assert found.device.figures == "calibrated"
    assert found.measured.bandwidth > 0
    assert found.measured.launch_seconds > 0
    assert found.device.to_host == found.measured.to_host > 0
    assert found.device.from_host == found.measured.from_host > 0
    assert {"float64", "float32", "bfloat16"} <= found.measured.flops.keys()
    assert all(figure > 0 for figure in found.measured.flops.values())
    # What was not measured is the table's.
    assert found.device.flops["complex64"] == found.table.flops["complex64"]
    assert found.device.memory_bytes == found.table.memory_bytes
    lines = "\n".join(described(found))
    assert "TFLOP/s" in lines
    assert str(path) in lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_that_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="no CUDA device is here"):
        calibrate(path=tmp_path / "x.json")
    for device in ("cuda", "cuda:1"):
        result = CliRunner().invoke(app, ["calibrate", "--device", device, "-o", str(tmp_path / "x.json")])
        assert result.exit_code == 2
        assert "no CUDA device is here" in result.stderr
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(DeviceError, match="'cudax': expected"):
        calibrate("cudax")
    (tmp_path / "file").touch()
    monkeypatch.setattr(
        "planner.calibration.calibrate.calibrated_path", lambda _: str(tmp_path / "file" / "a" / "x.json")
    )
    with pytest.raises(PlanFileError):
        calibrate("cpu", sizes=SMALL)


def test_another_process_sees_what_this_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context is what is gone since another process looked, less what the allocator has."""
    gib = 1 << 30
    fakes: dict[str, Any] = {
        "synchronize": lambda device: None,
        "mem_get_info": lambda device: (70 * gib, 80 * gib),
        "memory_reserved": lambda device: 5 * gib,
    }
    for name, function in fakes.items():
        monkeypatch.setattr(torch.cuda, name, function)
    device = torch.device("cuda", 0)
    assert measurements._context(device, 76 * gib) == gib  # others have 4 of the 80
    assert measurements._context(device, None) == 5 * gib


def test_another_process_says_what_is_free_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> Any:
        started.append(start(*args, **kwargs))
        return started[-1]

    says = "import sys; print(len(sys.argv[1]), flush=True); sys.stdin.read()"
    monkeypatch.setattr(free_memory, "_SCRIPT", says)
    monkeypatch.setattr(subprocess, "Popen", popen)
    with free_memory.free_beside_another("cuda:1") as free_bytes:
        assert free_bytes == 6
        assert started[0].poll() is None
    assert started[0].poll() == 0


@pytest.mark.heavy
def test_without_the_device_nothing_is_said() -> None:
    with free_memory.free_beside_another("cuda:77") as free_bytes:
        assert free_bytes is None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU that is not here, and where its file would be."""
    product = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=79 << 30)
    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda index: product,
    }
    for name, function in fakes.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(devices.platformdirs, "user_cache_dir", lambda name: str(tmp_path))
    return tmp_path / "devices" / "nvidia-h100-80gb-hbm3.json"


def test_plans_for_the_gpu_that_is_here_use_the_file(gpu: Path) -> None:
    table = find_device("cuda")
    assert roofline(table).name == "roofline"
    calibrated = with_figures(table, MEASURED)
    gpu.parent.mkdir()
    gpu.write_text(json.dumps(as_file(replace(calibrated, memory_bytes=5))))
    found = find_device("cuda")
    assert found == calibrated  # its memory is what the driver says
    assert found.flops_of(torch.bfloat16) == 7e14
    assert found.flops["float8_e4m3fn"] == table.flops["float8_e4m3fn"]
    assert (found.library_bytes, found.context_bytes) == (64 << 20, 700 << 20)
    assert roofline(found).name == "roofline, calibrated"
    assert find_device("cuda", calibrated=False) == table
    # It is the H100 of the table all the same, and no other.
    assert same_processor(find_device("H100"), found)
    assert same_processor(found, find_device("H100"))
    assert not same_processor(find_device("H200"), found)
    assert not same_processor(find_device("cpu"), found)


def test_a_file_that_cannot_be_read_is_named(gpu: Path) -> None:
    gpu.parent.mkdir()
    gpu.write_text("{")
    with pytest.raises(DeviceError, match=r"nvidia-h100-80gb-hbm3\.json' cannot be read"):
        find_device("cuda")
