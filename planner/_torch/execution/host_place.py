"""The place of results that are kept in the host's memory: blocks of a file that is mapped into memory.

A result that is sent is a tensor over such a block, with its shape and strides. The block is free again when
PyTorch lets go of that tensor's memory: after the backward, or with a forward that has none. So a second
backward finds what the first one read, and a second forward takes other blocks.
"""

import mmap
import os
import tempfile
import weakref
from collections import defaultdict
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
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self.bytes = 0
        """The size of all blocks."""
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host. One that is not all of its memory, as planned ones are, becomes contiguous."""
        count = tensor.numel() * tensor.element_size()
        if not count:
            return tensor.clone()
        kept = torch.frombuffer(self._block(count), dtype=tensor.dtype, count=tensor.numel())
        return _like(kept, tensor).copy_(tensor)

    def fetch(self, kept: torch.Tensor) -> torch.Tensor:
        """The tensor that was sent."""
        return kept.clone()

    def _block(self, count: int) -> Block:
        free = self._free[count]
        memory = free.pop() if free else self._mapped(count)
        block = np.frombuffer(memory, np.uint8)
        weakref.finalize(block, free.append, memory).atexit = False
        return block

    def _mapped(self, count: int) -> mmap.mmap:
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, count)  # a full disk is an error now, not a signal later
                memory = mmap.mmap(file.fileno(), count)
        except OSError as error:
            raise PlannerError(
                f"{self.folder} has no room for {count:,} more bytes of results that the plan keeps there "
                f"({error.strerror}; {self.bytes:,} are there): name another folder in "
                "plan.apply(model, offload_folder=)"
            ) from error
        self.bytes += count
        return memory


def _like(kept: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Memory in the shape of a tensor, with its strides where these are of a whole memory."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return kept.as_strided(tensor.shape, strides)
