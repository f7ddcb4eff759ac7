"""Whether Inductor emits programs for a GPU on a machine without one, and what such a program takes.

    python benchmarks/inductor_elsewhere.py [--device H100] [--program]

A multilayer perceptron's forward and backward, as one graph of tensors without data that are on "cuda", is
lowered by the code that plans with ``backend="inductor"`` use. Its program is run on tensors without data,
and what it allocates is counted. Neither CUDA nor Triton is needed: four names are replaced, and no kernel is
compiled. ``docs/internals/inductor.md`` says what plans for a GPU need beyond that.
"""

import argparse
import contextlib
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._dynamo import device_interface
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planner._torch.inductor import compiling
from planner.costs.cuda_scratch.processors import processor_of
from planner.costs.devices import Device, find_device


@contextlib.contextmanager
def gpu_of(device: Device) -> Iterator[None]:
    """A context in which Inductor takes a GPU of the table of devices for the one that is here."""
    processor = processor_of(device)
    major, minor = processor.capability
    properties = SimpleNamespace(
        name=device.name,
        major=major,
        minor=minor,
        multi_processor_count=processor.multiprocessors,
        max_threads_per_multi_processor=processor.threads,
        regs_per_multiprocessor=65536,
        warp_size=32,
        total_memory=device.memory_bytes,
    )

    class Elsewhere(device_interface.CudaInterface):
        """What Inductor asks of a device."""

        is_available = staticmethod(lambda: True)
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda _device=None: properties)
        get_compute_capability = staticmethod(lambda _device=None: 10 * major + minor)

    device_interface.get_registered_device_interfaces()  # or the first question would put its own in place
    DeviceProperties.create.cache_clear()
    with (
        mock.patch.dict(device_interface.device_interfaces, {"cuda": Elsewhere}),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch("torch._inductor.scheduler.has_triton", return_value=True),
        mock.patch("torch.utils._triton.triton_hash_with_backend", return_value="none"),
    ):
        yield
    DeviceProperties.create.cache_clear()


class Program:
    """A program that Inductor emitted, and what it held when it ran on tensors without data.

    Attributes:
        source: Its source.
        peak_bytes: The most that it held at once of what it allocated.
    """

    def __init__(self) -> None:
        self.source, self.peak_bytes, self._bytes = "", 0, 0

    def empty(self, device: str, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """Allocate."""
        made = torch.empty_strided(size, stride, dtype=dtype, device=device)
        taken = -(-made.untyped_storage().nbytes() // 512) * 512
        self._bytes += taken
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        weakref.finalize(made.untyped_storage(), self._free, taken)
        return made

    def _free(self, taken: int) -> None:
        self._bytes -= taken


def step(x: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of two layers with a ReLU between them and the sum of squares behind them."""
    hidden = x @ first
    active = hidden.relu()
    out = active @ last
    grad = 2 * out
    to_hidden = (grad @ last.t()) * (hidden > 0)
    return [x.t() @ to_hidden, active.t() @ grad]


def emitted_for(device: Device, rows: int = 1024, width: int = 256, inner: int = 1024) -> Program:
    """The program of that step for a GPU, run once."""
    mode = FakeTensorMode()
    with gpu_of(device):
        with mode:
            sizes = ((rows, width), (width, inner), (inner, width))
            inputs = [torch.empty(*size, device="cuda:0") for size in sizes]
        graph, program = compiling.retrace(step, inputs, mode), Program()
        with mock.patch.object(compiling, "_empty", program.empty):
            found = compiling.emitted(graph, inputs, mode, backward=False, fusion="anywhere", options={})
        program.source = found.source
        with mode:
            found.run(inputs)
    return program


def main(arguments: list[str] | None = None) -> None:
    """Print what the program takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="H100", help="of the table of devices (H100)")
    parser.add_argument("--program", action="store_true", help="print it, too")
    options = parser.parse_args(arguments)
    program = emitted_for(find_device(options.device))
    if options.program:
        print(program.source)
    kernels = program.source.count("async_compile.triton")
    print(f"{kernels} kernels, peak {program.peak_bytes:,} bytes")


if __name__ == "__main__":
    main()
