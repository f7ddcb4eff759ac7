"""What stands in for the recorder of CUDA graphs on the CPU: it runs the same functions on the same memory.

A recording reads and writes the memory that it was recorded with, whatever became of its owners since; and
what a recording of a pool leaves is gone once a later one has run, as memory of the pool is used again.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from planner._torch.cuda.recorder import BoxedFunction
from planner._torch.tensors import copy_elements, strided_copy
from planner.runtime import recordings


class StandIn:
    """A :class:`planner._torch.cuda.recorder.Recorder` for the CPU.

    Attributes:
        runs: How often each recording ran, in the order in which they were recorded.
        stream, recording: What it says of them.
    """

    def __init__(self) -> None:
        self.runs: list[int] = []
        self.stream, self.recording = 0, False
        self._made: list[list[torch.Tensor]] = []  # by recording, what lies in the pool

    def where(self) -> object:
        """The stream that a test chose."""
        return self.stream

    def is_recording(self) -> bool:
        """What a test chose."""
        return self.recording

    def record(self, function: BoxedFunction, args: list[Any]) -> tuple[list[Any], Callable[[], None]]:
        """Record a function: its results have no values until it runs."""
        number, given = len(self.runs), list(args)
        there = {_address(t): t for t in given if isinstance(t, torch.Tensor)}
        values, state = [(t, strided_copy(t)) for t in there.values()], torch.get_rng_state()
        made = list(function(args))
        torch.set_rng_state(state)
        for tensor, value in values:
            copy_elements(tensor.data, value)  # a recording writes nothing, and changes no version
        own = {
            id(r): strided_copy(r) for r in made if isinstance(r, torch.Tensor) and _address(r) not in there
        }
        results = [own.get(id(r), r) for r in made]
        left = {_address(r) for r in results if isinstance(r, torch.Tensor)}  # in memory of what it was given
        read = [t for earlier in self._made for t in earlier if any(t is g for g in given)]
        of_pool = [t for t in read if _address(t) not in left]
        self._made.append(list(own.values()))
        self.runs.append(0)
        _spoil(self._made[number])

        def run() -> None:
            self.runs[number] += 1
            for later in self._made[number + 1 :]:
                _spoil(later)
            with torch.no_grad():
                for result, new in zip(results, function(list(given)), strict=True):
                    if isinstance(result, torch.Tensor) and _address(result) not in there:
                        copy_elements(result, new)
            _spoil(of_pool)

        return results, run


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spoil(tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


@contextlib.contextmanager
def stand_in() -> Iterator[list[StandIn]]:
    """A context in which the CPU records by stand-ins; the list has them, in the order of their making."""
    made: list[StandIn] = []

    def make(_device: torch.device) -> StandIn:
        made.append(StandIn())
        return made[-1]

    with mock.patch.object(recordings, "recorder_for", make):
        yield made
