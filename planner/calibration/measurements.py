"""Measurements of a device: bandwidth, arithmetic, launches, its link, and the memory that libraries take.

They run on any device, with sizes that suit it. So all but the driver's figures can be tried on the CPU.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from planner._torch.execution.host_place import HostPlace

GIB = 1 << 30
REPEATS = 7


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measured operations.

    Attributes:
        copied_bytes: Bytes of the copy that measures bandwidth.
        product: Rows and columns of the matrix products, by dtype.
        launches: The number of kernels of one element that run one after the other.
    """

    copied_bytes: int
    product: Mapping[torch.dtype, int]
    launches: int


ON_A_GPU = Sizes(
    GIB,
    {torch.float64: 4096, torch.float32: 8192, torch.float16: 8192, torch.bfloat16: 8192},
    2000,
)
SMALL = Sizes(1 << 20, dict.fromkeys((torch.float64, torch.float32, torch.bfloat16), 64), 50)


@dataclass(frozen=True)
class Measured:
    """The measured figures.

    Attributes:
        bandwidth: Bytes a second, read and written.
        flops: FLOP/s of matrix products by dtype name; ``"tf32"`` where the device has it.
        launch_seconds: The time of a kernel that does next to nothing.
        library_bytes: Bytes that matrix libraries keep, for the thread of the forward and for autograd's.
        context_bytes: Bytes of the device's memory in use besides those that the caching allocator reserves.
        to_host, from_host: Bytes a second of the link to the host's memory; of the CPU, to a file and back.
        convolution_bytes: Scratch of a convolution and its backward, for information.
        notes: The figures that could not be measured, and why.
    """

    bandwidth: float
    flops: Mapping[str, float]
    launch_seconds: float
    library_bytes: int
    context_bytes: int
    to_host: float
    from_host: float
    convolution_bytes: int = 0
    notes: list[str] = field(default_factory=list)


def measure(device: torch.device, sizes: Sizes, free_before: int | None = None) -> Measured:
    """Measure a device, in a process that has not used it yet: libraries take their memory once.

    Args:
        device: The device.
        sizes: The sizes of the measured operations.
        free_before: Bytes of its memory that were free before this process used it; None where that is not
            known, and other processes' memory counts with the context.
    """
    notes: list[str] = []
    library, convolution = 0, 0
    if device.type == "cuda":
        library = _libraries(device)
        convolution = _convolution(device, notes)
    bandwidth = _bandwidth(device, sizes.copied_bytes)
    flops = dict(_flops(device, sizes, notes))
    launch = _launch(device, sizes.launches)
    context = 0
    if device.type == "cuda":
        context = _context(device, free_before)
        if free_before is None:
            notes.append(
                "the memory of other processes could not be told apart and counts with the context: "
                "calibrate while nothing else uses the device"
            )
    link = _link(device, sizes.copied_bytes)
    return Measured(bandwidth, flops, launch, library, context, *link, convolution, notes)


def _seconds(device: torch.device, run: Callable[[], object], times: int) -> float:
    """The seconds of one run, the median of several."""
    run()
    taken = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(times):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - start) / times)
    return max(statistics.median(taken), 1e-9)


def _bandwidth(device: torch.device, size: int) -> float:
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(device, lambda: target.copy_(source), 4)


def _link(device: torch.device, size: int) -> tuple[float, float]:
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    if device.type != "cuda":
        place = HostPlace()
        kept = place.sent(place.send(here), here)
        out = _seconds(device, lambda: place.sent(place.send(here), here), 1)
        return size / out, size / _seconds(device, lambda: place.fetched(place.fetch(kept)), 1)
    there = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    out = _seconds(device, lambda: there.copy_(here, non_blocking=True), 4)
    return size / out, size / _seconds(device, lambda: here.copy_(there, non_blocking=True), 4)


def _flops(device: torch.device, sizes: Sizes, notes: list[str]) -> Iterator[tuple[str, float]]:
    for dtype, side in sizes.product.items():
        name = str(dtype).removeprefix("torch.")
        for label, high in ((name, False), *((("tf32", True),) if _has_tf32(device, dtype) else ())):
            try:
                with _tf32(high):
                    left = torch.randn(side, side, device=device, dtype=torch.float32).to(dtype)
                    right, out = left.clone(), torch.empty_like(left)
                    taken = _seconds(device, lambda: torch.mm(left, right, out=out), 4)  # noqa: B023
            except RuntimeError as error:
                notes.append(f"no products in {label}: {str(error).splitlines()[0][:100]}")
                continue
            yield label, 2 * float(side) ** 3 / taken


def _has_tf32(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype is not torch.float32 or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def _tf32(high: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if high else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _launch(device: torch.device, launches: int) -> float:
    one = torch.zeros(1, device=device)
    return _seconds(device, lambda: one.add_(1.0), launches)


def _libraries(device: torch.device) -> int:
    """Bytes that stay allocated after a product and its backward, once their tensors are freed."""
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    left = torch.randn(256, 256, device=device, requires_grad=True)
    (left @ left).sum().backward()
    torch.cuda.synchronize(device)
    del left
    gc.collect()
    return max(torch.cuda.memory_allocated(device) - before, 0)


def _convolution(device: torch.device, notes: list[str]) -> int:
    """The most bytes that a convolution and its backward hold beyond its tensors."""
    try:
        image = torch.randn(32, 64, 56, 56, device=device, requires_grad=True)
        weight = torch.randn(64, 64, 3, 3, device=device, requires_grad=True)
        out = torch.nn.functional.conv2d(image, weight, padding=1)
        out.sum().backward()
        image.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        again = torch.nn.functional.conv2d(image, weight, padding=1)
        again.backward(out.detach())
        most = torch.cuda.max_memory_allocated(device) - before
        return max(most - image.nbytes - weight.nbytes - again.nbytes, 0)
    except RuntimeError as error:
        notes.append(f"no convolution: {str(error).splitlines()[0][:100]}")
        return 0


def _context(device: torch.device, free_before: int | None) -> int:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    before = total if free_before is None else free_before
    in_use = before - free - torch.cuda.memory_reserved(device)
    return max(math.ceil(in_use / (1 << 20)) << 20, 0)
