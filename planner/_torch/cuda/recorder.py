"""Records a function's work on a GPU as a CUDA graph, and runs the recording again.

A recording reads and writes the addresses at which its tensors lay when it was made. It allocates from a pool
that nothing else allocates from, so these addresses stay its own as long as the CUDA graph exists.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from planner._torch.tensors import as_lazy_as

BoxedFunction = Callable[[list[Any]], Sequence[Any]]
"""A function that takes one list, its arguments, and empties it, so that it can free them while it runs."""


class Recorder(Protocol):
    """Records functions whose recordings run one after the other, in the order in which they were made."""

    def where(self) -> object:
        """The current device and stream, to be compared with those at another time."""

    def is_recording(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream, by this recorder or by anybody."""

    def record(self, function: BoxedFunction, args: list[Any]) -> tuple[list[Any], Callable[[], None]]:
        """Record a function without running it.

        Args:
            function: The function.
            args: Its arguments. Every run of the recording reads them at their present addresses.

        Returns:
            The results, whose memory holds no values yet, and a function that runs the recording, which
            writes the values.
        """


class CudaRecorder:
    """A :class:`Recorder` that makes CUDA graphs, all with one pool.

    Random operators draw from the device's default generator, which PyTorch registers with every CUDA graph:
    each run of a recording draws the numbers that eager would draw, and leaves the generator as eager would.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        # One for all recordings: a freed block of the pool is reused only on the stream that it was made on.
        self._stream = torch.cuda.Stream(device)

    def where(self) -> object:
        return torch.cuda.current_device(), torch.cuda.current_stream(self._device)

    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def record(self, function: BoxedFunction, args: list[Any]) -> tuple[list[Any], Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # By default CUDA calls of any thread, as ``cudaMalloc``, end a recording: here only those of its own.
        # Autograd's thread records the backward, and other threads of the program may go on meanwhile.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            results = list(function(args))
        return results, graph.replay


def recorder_for(device: torch.device) -> Recorder | None:
    """A recorder for a device; None if it is no GPU."""
    return CudaRecorder(device) if device.type == "cuda" else None


def at_same_address(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the address of another, which does not keep that memory alive: the caller's pool must."""
    held = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(held.data_ptr(), tensor.device, held.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    there = empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return as_lazy_as(tensor, there)


def holders(tensor: torch.Tensor) -> int:
    """The count of references to a tensor's storage, to be compared with an earlier count."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
