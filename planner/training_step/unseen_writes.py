"""Writes that neither PyTorch counts nor a dispatch mode sees: by numpy, or through a borrowed address."""

import ctypes
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from planner._torch.tensors import storage_number


class UnseenWrites:
    """Compares the bytes of memory on the CPU with what they were when an operator left them.

    Args:
        found: Called with the identity of a storage that was written to meanwhile.
    """

    def __init__(self, found: Callable[[int], None]) -> None:
        self._found = found
        self._seen: dict[int, tuple[Any, int]] = {}  # by identity: a weak reference, and a digest

    def look(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Tell of those that changed since they were noted, and note them."""
        for storage in storages:
            if self._changed(storage):
                self._found(storage_number(storage))

    def note(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Note memory as it is now, as what an operator has just read or written."""
        for storage in storages:
            self._changed(storage)

    def look_at_all(self) -> None:
        """Look at all that has been noted and is still there."""
        self.look([storage for there, _ in list(self._seen.values()) if (storage := there()) is not None])

    def _changed(self, storage: torch.UntypedStorage) -> bool:
        if storage.device.type != "cpu":  # nor has memory of a tensor without data any
            return False
        key, now = storage_number(storage), _digest(storage)
        there, before = self._seen.get(key, (None, now))
        known = there is not None and there() is not None
        self._seen[key] = (there if known else weakref.ref(storage), now)
        return known and now != before


def in_memory_of_others(tensors: Mapping[int, torch.Tensor]) -> set[int]:
    """Keys of tensors that lie in memory of others' without PyTorch knowing of it, as what numpy or DLPack
    hand back does."""
    found, end, last = set[int](), 0, (-1, -1)
    spans = []
    for key, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu" and storage.nbytes() and (address := _address(storage)):
            spans.append((address, storage.nbytes(), storage_number(storage), key))
    for start, size, number, key in sorted(spans):
        if start < end and number != last[0]:
            found |= {key, last[1]}
        if start + size > end:
            end, last = start + size, (number, key)
    return found


def _digest(storage: torch.UntypedStorage) -> int:
    size, address = storage.nbytes(), _address(storage)
    return zlib.crc32((ctypes.c_char * size).from_address(address)) if size and address else 0


def _address(storage: torch.UntypedStorage) -> int:
    """Where memory begins; 0 of a wrapper's, as a DTensor's, which has none of its own."""
    try:
        return storage.data_ptr()
    except RuntimeError:
        return 0
