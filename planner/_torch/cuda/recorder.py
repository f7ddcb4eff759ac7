"""Recording a function's work on a GPU as a CUDA graph, and running that again.

What is recorded reads and writes the addresses that it was recorded with. All that it allocates lies in a
pool that nothing else allocates from, so these addresses stay its own for as long as the graph is there.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

BoxedFunction = Callable[[list[Any]], Sequence[Any]]


class Recorder(Protocol):
    """Records functions that run one after the other, in the order in which they were recorded."""

    def where(self) -> object:
        """The device and the stream that work goes to now."""

    def is_recording(self) -> bool:
        """Whether somebody records what is done now."""

    def record(self, function: BoxedFunction, args: list[Any]) -> tuple[list[Any], Callable[[], None]]:
        """Record a function without running it.

        Args:
            function: Takes a list of arguments, which it empties.
            args: They are read where they lie now, whenever the recording runs.

        Returns:
            The results, without values yet, and what runs the recording: it writes them.
        """


class CudaRecorder:
    """A :class:`Recorder` by CUDA graphs of one pool.

    Random operators draw from the device's default generator, which PyTorch registers with every graph: each
    run of the recording takes the numbers that eager would, and moves it as far.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        # The pool gives blocks that were freed to the stream alone that they were made on.
        self._stream = torch.cuda.Stream(device)

    def where(self) -> object:
        return torch.cuda.current_device(), torch.cuda.current_stream(self._device)

    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def record(self, function: BoxedFunction, args: list[Any]) -> tuple[list[Any], Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # Autograd records a backward in a thread of its own, and other threads may go on meanwhile.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            results = list(function(args))
        return results, graph.replay


def recorder_for(device: torch.device) -> Recorder | None:
    """What records on a device; None where nothing can."""
    return CudaRecorder(device) if device.type == "cuda" else None


def at_same_address(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that lies where another does, and does not hold its memory."""
    held = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(held.data_ptr(), tensor.device, held.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def holders(tensor: torch.Tensor) -> int:
    """How many hold the memory of a tensor: to be compared with an earlier count."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
