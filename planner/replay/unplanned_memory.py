"""The memory of operator calls that run in a planned forward and are not in the plan."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from planner._torch.tensors import storage_number


class UnplannedMemory:
    """Checks that what unplanned calls allocate fits beside the values that the plan holds meanwhile.

    Args:
        room: By the number of planned calls that have run, the bytes that the plan leaves below its peak.
        position: Returns that number.

    Attributes:
        excess_bytes: The most bytes by which unplanned calls held more than the room; 0 where all fitted.
    """

    def __init__(self, room: Sequence[int], position: Callable[[], int]) -> None:
        self._room, self._position = room, position
        self._references: list[weakref.ref[torch.UntypedStorage]] = []
        self._bytes = self._last_position = self.excess_bytes = 0
        self._ended = False

    def call_made(self, operands: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> None:
        """Count the storages that an unplanned call has allocated."""
        seen = {storage_number(tensor.untyped_storage()) for tensor in operands}
        for tensor in results:
            storage = tensor.untyped_storage()
            if storage_number(storage) in seen:
                continue
            seen.add(storage_number(storage))
            size = storage.nbytes()
            self._change_by(size)
            self._references.append(weakref.ref(storage, self._when_freed(size)))  # dropped, it calls nothing
        self._change_by(0)  # compares the bytes that were just added

    def finished(self) -> None:
        """End the forward. What is alive now stays alive in the backward, where the peak may be."""
        self._change_by(0)
        self._ended = True
        self.excess_bytes = max(self.excess_bytes, self._bytes)

    def _when_freed(self, size: int) -> Callable[[Any], None]:
        return lambda _: None if self._ended else self._change_by(-size)

    def _change_by(self, change: int) -> None:
        """Compare the bytes, which were the same since the last change, with the least room; change them."""
        position = max(self._position(), self._last_position)  # an error may have ended the step
        least_room = min(self._room[self._last_position : position + 1])
        self.excess_bytes = max(self.excess_bytes, self._bytes - least_room)
        self._last_position, self._bytes = position, self._bytes + change
