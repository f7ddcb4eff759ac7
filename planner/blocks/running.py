"""What blocks do here and now: run for a plan, which knows of them, or by themselves."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

_T = TypeVar("_T")


class _Here(threading.local):
    by_plan = False
    switched_off = False


_here = _Here()
_numbers = itertools.count()


@contextlib.contextmanager
def blocks_run_as_written() -> Iterator[None]:
    """While a step is captured, or runs by a plan: the plan does what the blocks ask for."""
    before, _here.by_plan = _here.by_plan, True
    try:
        yield
    finally:
        _here.by_plan = before


@contextlib.contextmanager
def switched(off: bool) -> Iterator[None]:
    """Recomputation of blocks that are called in here, on or off."""
    before, _here.switched_off = _here.switched_off, off
    try:
        yield
    finally:
        _here.switched_off = before


def constant(function: Callable[[], _T]) -> Callable[[], _T]:
    """A function that Dynamo calls while it traces, and takes the answer for a constant.

    That is right for code that it makes for a plan: a plan is made with what is switched off then.
    """
    traced: Callable[[], _T] = torch.compiler.assume_constant_result(function)
    return traced


@constant
def run_by_a_plan() -> bool:
    """Whether a plan does what blocks ask for."""
    return _here.by_plan


@constant
def switched_off() -> bool:
    """Whether blocks are not to be recomputed."""
    return _here.switched_off


@constant
def next_number() -> int:
    """A number for one call of a block, by which its operations are known."""
    return next(_numbers)
