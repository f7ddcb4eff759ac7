"""The place of results that are kept in the host's memory: blocks of a file that is mapped into memory.

A result that is sent is a tensor over such a block, with its shape and strides. The block is free again when
PyTorch lets go of that tensor's memory: after the backward, or with a forward that has none. So a second
backward finds what the first one read, and a second forward takes other blocks.

Copies are made in the order in which they begin, by a thread for each direction. It lets go of both tensors
before who waits for the copy goes on, so that memory is a function of the program alone.
"""

import mmap
import os
import tempfile
import weakref
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from planner.errors import PlannerError

Block = npt.NDArray[np.uint8]


class HostPlace:
    """Keeps tensors in files that have no name any more, and end with this process.

    Args:
        folder: Where the files are; None for the folder of temporary files.

    Raises:
        PlannerError: No file can be made there.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        try:
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise PlannerError(
                f"offload_folder={os.fspath(self.folder)!r}: no file can be made there ({error.strerror}): "
                "name a folder in plan.apply(model, offload_folder=) that can be written to"
            ) from error
        self.bytes = 0
        """The size of all blocks."""
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self._to_host, self._from_host = (ThreadPoolExecutor(1, "planner-offload") for _ in range(2))
        self._copies: dict[int, Future[None]] = {}  # by the tensor that they write
        self._process = os.getpid()

    def _begin_anew_in_a_fork(self) -> None:
        """A forked process has none of the threads, and its blocks are those of its parent."""
        if self._process != os.getpid():
            self._process, self._free, self.bytes = os.getpid(), defaultdict(list), 0
            self._to_host, self._from_host = (ThreadPoolExecutor(1, "planner-offload") for _ in range(2))
            self._copies = {}

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to the host, and return the copy.

        One that is not all of its memory, as planned ones are, becomes contiguous.
        """
        self._begin_anew_in_a_fork()
        count = tensor.numel() * tensor.element_size()
        if not count:
            return torch.empty_like(tensor)
        kept = torch.frombuffer(self._block(count), dtype=tensor.dtype, count=tensor.numel())
        kept = kept.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())
        return self._begin(self._to_host, kept, tensor)

    def sent(self, kept: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Wait until a tensor is on the host: until then it must be there, and its caller holds it."""
        return self._wait(kept)

    def fetch(self, kept: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor back, and return the copy."""
        self._begin_anew_in_a_fork()
        return self._begin(self._from_host, torch.empty_like(kept), kept)

    def fetched(self, tensor: torch.Tensor) -> torch.Tensor:
        """Wait until a tensor is back."""
        return self._wait(tensor)

    def _begin(self, link: ThreadPoolExecutor, into: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        self._copies[id(into)] = link.submit(_copy, [into, source])
        return into

    def _wait(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = self._copies.pop(id(tensor), None)
        if copy is not None:
            copy.result()
        return tensor

    def _block(self, count: int) -> Block:
        if not self._free[count]:  # those of other shapes would add up from shape to shape
            for size in list(self._free):  # a thread that copies may add one meanwhile
                self.bytes -= size * len(self._free.pop(size))
        free = self._free[count]
        memory = free.pop() if free else self._mapped(count)
        block = np.frombuffer(memory, np.uint8)
        weakref.finalize(block, _is_free, self._free, memory).atexit = False  # of the process that made it
        return block

    def _mapped(self, count: int) -> mmap.mmap:
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.truncate(count)
                if hasattr(os, "posix_fallocate"):  # a full disk is an error now, not a signal later
                    os.posix_fallocate(file.fileno(), 0, count)
                memory = mmap.mmap(file.fileno(), count)
        except OSError as error:
            raise PlannerError(
                f"{self.folder} has no room for {count:,} more bytes of results that the plan keeps there "
                f"({error.strerror}; {self.bytes:,} are there): name another folder in "
                "plan.apply(model, offload_folder=)"
            ) from error
        self.bytes += count
        return memory


def _is_free(free: defaultdict[int, list[mmap.mmap]], memory: mmap.mmap) -> None:
    free[len(memory)].append(memory)


def _copy(tensors: list[torch.Tensor]) -> None:
    into, source = tensors
    tensors.clear()  # the executor holds the list for longer
    with torch.no_grad():
        into.copy_(source)
