"""Calibration: measured figures of this machine's GPU, kept in a device file that plans use."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from planner.calibration.free_memory import free_beside_another
from planner.calibration.measurements import ON_A_GPU, Measured, Sizes, measure
from planner.costs.devices import Device, DeviceError, calibrated_path, find_device
from planner.planfile.atomic_file import check_writable, write_atomically
from planner.training_step.generators import generators_restored


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        device: The device with the measured figures.
        table: The device with the figures that plans use without a calibration.
        measured: The measured figures.
        path: The file that they were written to.
    """

    device: Device
    table: Device
    measured: Measured
    path: str


def calibrate(
    name: str = "cuda", path: str | os.PathLike[str] | None = None, *, sizes: Sizes = ON_A_GPU
) -> Calibration:
    """Measure a device of this machine, and write its figures to a file.

    Args:
        name: "cuda", "cuda:1", or "cpu" to try it.
        path: The file; None for the one that plans for this device take their figures from.
        sizes: The sizes of the measured operations.

    Raises:
        DeviceError: There is no such device here.
        PlanFileError: The file cannot be written.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"there is no device {name!r}: expected cuda, cuda:1 or cpu") from None
    here = device if device.type != "cuda" or device.index is not None else torch.device("cuda", _current())
    with contextlib.ExitStack() as around:
        free_before = around.enter_context(free_beside_another(str(here))) if _is_unused(here) else None
        table = find_device(str(here), calibrated=False)
        if path is None:
            path = calibrated_path(table.name)
            with contextlib.suppress(OSError):  # the check says what is wrong
                Path(path).parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
        around.enter_context(generators_restored())
        measured = measure(here, sizes, free_before)
    calibrated = with_figures(table, measured)
    write_atomically(path, json.dumps(as_file(calibrated), indent=1) + "\n")
    return Calibration(calibrated, table, measured, os.fspath(path))


def with_figures(table: Device, measured: Measured) -> Device:
    """A device whose measured figures take the place of those of the table."""
    return replace(
        table,
        bandwidth=measured.bandwidth,
        flops={**table.flops, **measured.flops},
        launch_seconds=measured.launch_seconds,
        library_bytes=measured.library_bytes,
        context_bytes=measured.context_bytes,
        to_host=measured.to_host,
        from_host=measured.from_host,
        figures="calibrated",
    )


def as_file(device: Device) -> dict[str, object]:
    """The fields of a device file."""
    fields = asdict(replace(device, flops={}))
    return {**fields, "flops": dict(device.flops)}


def _current() -> int:
    if not torch.cuda.is_available():
        raise DeviceError(
            "no CUDA device is here to calibrate: plans for devices by name, as device='A100-80GB', use "
            "published figures"
        )
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


def _is_unused(device: torch.device) -> bool:
    """Whether a device is a GPU of this machine that this process has not used."""
    if device.type != "cuda" or torch.cuda.is_initialized():
        return False
    return (device.index or 0) < torch.cuda.device_count()
