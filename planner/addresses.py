"""The identity of objects, as ``id`` gives it, without calling ``id``."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class _Pointers:
    """An array of objects, whose memory NumPy reads as an array of their addresses."""

    def __init__(self, objects: npt.NDArray[np.object_]) -> None:
        self._objects = objects  # keeps the objects alive
        self.__array_interface__ = {
            "data": (objects.ctypes.data, True),
            "typestr": np.dtype(np.intp).str,
            "shape": objects.shape,
            "version": 3,
        }


identity = object.__hash__
"""A number that an object shares with no other that is alive, as ``id`` gives one, without a call of ``id``:
see :func:`addresses`."""


def addresses(objects: Sequence[object]) -> npt.NDArray[np.intp]:
    """The ids of many objects. A call of ``id`` itself raises an audit event (``sys.audit``), which takes
    time if a hook listens, as filelock's does, which Hugging Face's libraries import."""
    return np.array(_Pointers(np.fromiter(objects, np.object_, len(objects))))
