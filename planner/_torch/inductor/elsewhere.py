"""A GPU that is not here, for Inductor while it lowers a graph of tensors that are on ``cuda:0``.

Inductor asks for a GPU's properties, and for Triton, where it chooses what to emit. Neither has to be here to
emit a program: the kernels in it are text. Seen to work with torch 2.13, with Triton 3.7 and without it.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import device_interface
from torch._dynamo.convert_frame import compile_lock
from torch._inductor import codecache, decomposition, lowering, scheduler, utils
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _triton

from planner._torch.cuda.layouts import convolutions_of_cuda
from planner._torch.elsewhere import DEVICE, IS_CUDA
from planner._torch.patches import replaced, replaced_entries


@dataclass(frozen=True)
class Gpu:
    """What Inductor asks of an NVIDIA GPU, by the names of :func:`torch.cuda.get_device_properties`.

    Attributes:
        name: Its name.
        major, minor: Its compute capability.
        multi_processor_count: How many multiprocessors it has.
        max_threads_per_multi_processor: The most threads that one of them holds.
        total_memory: Its bytes.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    max_threads_per_multi_processor: int
    total_memory: int
    # The same since Volta (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
    regs_per_multiprocessor: int = 65536
    max_threads_per_block: int = 1024
    warp_size: int = 32


LOWERED_FOR: ContextVar[Gpu | None] = ContextVar("LOWERED_FOR", default=None)
"""The GPU that programs are emitted for now; None for what is here."""


@contextlib.contextmanager
def lowered_for(gpu: Gpu | None) -> Iterator[None]:
    """While this is open, Inductor emits programs for a GPU that is not here; None changes nothing."""
    if gpu is None:
        yield
        return

    def adds_by_a_call(dtype: torch.dtype) -> bool:
        return dtype in (torch.int64, torch.bool) or (dtype is torch.bfloat16 and gpu.major < 9)

    device_interface.get_registered_device_interfaces()  # the first question would put its own in place
    codecache.CacheBase.get_system()  # remembers what is here, for the key of Inductor's cache
    properties: Any = {"get_device_properties": lambda _device=None: gpu}
    by_dtype = {"needs_fallback_due_to_atomic_add_limitations": adds_by_a_call}
    compile_lock.acquire()  # what is replaced is seen by all threads
    token = LOWERED_FOR.set(gpu)
    try:
        _forget_devices()
        with (
            replaced_entries(
                "devices of Inductor", device_interface.device_interfaces, {"cuda": _interface(gpu)}
            ),
            replaced(torch.cuda, properties),
            replaced(FakeTensor, {"is_cuda": IS_CUDA}),
            replaced(scheduler, {"has_triton": lambda: True}),
            replaced(_triton, {"triton_hash_with_backend": lambda: "none"}),
            replaced(utils, {"is_big_gpu": lambda _device=0: False, **by_dtype}),
            replaced(lowering, by_dtype),
            replaced(decomposition, by_dtype),
            convolutions_of_cuda(cudnn=True),
        ):
            yield
    finally:
        _forget_devices()
        LOWERED_FOR.reset(token)
        compile_lock.release()


def _forget_devices() -> None:
    """Empty what Inductor remembers of the GPU that it asked last."""
    for remembered in (DeviceProperties.create, utils.get_max_num_sms, utils.using_b200):
        remembered.cache_clear()


def _interface(gpu: Gpu) -> Any:
    """What Inductor asks of a device."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: DEVICE.index,
        "get_device_properties": lambda _device=None: gpu,
        "get_compute_capability": lambda _device=None: 10 * gpu.major + gpu.minor,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or gpu.major >= 8,
    }
    methods = {name: staticmethod(answer) for name, answer in answers.items()}
    return type("Elsewhere", (device_interface.CudaInterface,), methods)
