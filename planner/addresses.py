"""Which object one is: where it is in memory, which ``id`` says."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class _Pointers:
    """An array of objects, as the numbers that it is in memory."""

    def __init__(self, objects: npt.NDArray[np.object_]) -> None:
        self._objects = objects  # lives as long
        self.__array_interface__ = {
            "data": (objects.ctypes.data, True),
            "typestr": np.dtype(np.intp).str,
            "shape": objects.shape,
            "version": 3,
        }


identity = object.__hash__
"""A number that an object shares with no other that is alive, as that of ``id``; but nobody is told, see
:func:`addresses`."""


def addresses(objects: Sequence[object]) -> npt.NDArray[np.intp]:
    """The ids of objects, where there are many: every call of ``id`` tells all that listen to the
    interpreter's events, as filelock does, which Hugging Face's libraries import."""
    return np.array(_Pointers(np.fromiter(objects, np.object_, len(objects))))
