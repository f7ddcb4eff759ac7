"""Whether blocks, in this thread and now, are recomputed by a plan, by themselves, or not at all."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from planner._torch.checkpoint_frames import Switch

_T = TypeVar("_T")


class _Here(threading.local):
    by_plan = False
    switched_off = False


_here = _Here()
_plans, _off = Switch(), Switch()
_numbers = itertools.count()


@contextlib.contextmanager
def blocks_run_as_written() -> Iterator[None]:
    """A context for capturing a step and for running it by a plan: the plan recomputes, blocks do not."""
    before, _here.by_plan = _here.by_plan, True
    try:
        yield
    finally:
        _here.by_plan = before


@contextlib.contextmanager
def switched(off: bool) -> Iterator[None]:
    """A context in which the recomputation of blocks is off, or on."""
    before, _here.switched_off = _here.switched_off, off
    try:
        yield
    finally:
        _here.switched_off = before


def constant(function: Callable[[], _T]) -> Callable[[], _T]:
    """A function that Dynamo calls while it traces, taking the answer for a constant.

    That is right in a captured step: a plan keeps to the switches that it was made with.
    """
    traced: Callable[[], _T] = torch.compiler.assume_constant_result(function)
    return traced


@constant
def run_by_a_plan() -> bool:
    """Whether a plan recomputes the blocks."""
    return _plans.here(_here.by_plan)


@constant
def switched_off() -> bool:
    """Whether the recomputation of blocks is off."""
    return _off.here(_here.switched_off)


@constant
def next_number() -> int:
    """A number for one call of a block: its operations carry it."""
    return next(_numbers)
