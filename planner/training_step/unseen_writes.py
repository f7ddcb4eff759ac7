"""Writes that change no version counter and that no dispatch mode sees: by numpy, or through an address."""

import ctypes
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from planner._torch.tensors import storage_number


class UnseenWrites:
    """Compares the bytes of storages on the CPU with those that the last operator left.

    Args:
        report: Called with the identity of a storage that was written to meanwhile.
    """

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report = report
        self._seen: dict[int, tuple[Any, int]] = {}  # by identity: a weak reference, and a digest

    def look(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Report the storages that changed since they were noted, and note them anew."""
        for storage in storages:
            if self._changed(storage):
                self._report(storage_number(storage))

    def note(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Note storages as they are now, right after an operator has read or written them."""
        for storage in storages:
            self._changed(storage)

    def look_at_all(self) -> None:
        """Look at all storages that have been noted and still exist."""
        self.look([s for reference, _ in list(self._seen.values()) if (s := reference()) is not None])

    def _changed(self, storage: torch.UntypedStorage) -> bool:
        if storage.device.type != "cpu":  # a storage without data is on "meta"
            return False
        key, now = storage_number(storage), _digest(storage)
        reference, before = self._seen.get(key, (None, now))
        known = reference is not None and reference() is not None
        self._seen[key] = (reference if known else weakref.ref(storage), now)
        return known and now != before


def in_memory_of_others(tensors: Mapping[int, torch.Tensor]) -> set[int]:
    """Keys of tensors whose storages overlap without PyTorch knowing it, as of tensors that numpy or DLPack
    hand back."""
    overlapping, end, last = set[int](), 0, (-1, -1)
    spans = []
    for key, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu" and storage.nbytes() and (address := _address(storage)):
            spans.append((address, storage.nbytes(), storage_number(storage), key))
    for start, size, number, key in sorted(spans):
        if start < end and number != last[0]:
            overlapping |= {key, last[1]}
        if start + size > end:
            end, last = start + size, (number, key)
    return overlapping


def _digest(storage: torch.UntypedStorage) -> int:
    size, address = storage.nbytes(), _address(storage)
    return zlib.crc32((ctypes.c_char * size).from_address(address)) if size and address else 0


def _address(storage: torch.UntypedStorage) -> int:
    """The address of a storage; 0 for a wrapper's, as a DTensor's, which has no memory of its own."""
    try:
        return storage.data_ptr()
    except RuntimeError:
        return 0
