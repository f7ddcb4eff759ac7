"""What calls of operators take that a planned forward makes and the plan has not seen."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from planner._torch.tensors import storage_number


class Besides:
    """Whether what such calls make fits beside what the plan has in memory by then.

    Args:
        room: By the number of calls that came, the bytes that the plan leaves free, up to its peak.
        came: Says how many of the plan's calls came.

    Attributes:
        over: The most bytes by which it did not fit.
    """

    def __init__(self, room: Sequence[int], came: Callable[[], int]) -> None:
        self._room, self._came = room, came
        self._references: list[weakref.ref[torch.UntypedStorage]] = []
        self._bytes = self._at = self.over = 0
        self._ended = False

    def made(self, operands: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> None:
        """Such a call has made something."""
        there = {storage_number(tensor.untyped_storage()) for tensor in operands}
        for tensor in results:
            storage = tensor.untyped_storage()
            if storage_number(storage) in there:
                continue
            there.add(storage_number(storage))
            size = storage.nbytes()
            self._changes(size)
            self._references.append(weakref.ref(storage, self._dies(size)))
        self._changes(0)

    def finished(self) -> None:
        """The forward is over. What is still there is there in the backward too, where the peak may be."""
        self._changes(0)
        self._ended = True
        self.over = max(self.over, self._bytes)

    def _dies(self, size: int) -> Callable[[Any], None]:
        return lambda _: None if self._ended else self._changes(-size)

    def _changes(self, more: int) -> None:
        """See whether what has been there since the last change did fit."""
        now = self._came()
        self.over = max(self.over, self._bytes - min(self._room[self._at : now + 1]))
        self._at, self._bytes = now, self._bytes + more
