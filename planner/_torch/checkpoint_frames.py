"""Switches for code inside of ``torch.utils.checkpoint``, which runs it again in the backward.

By then a switch that was on in the forward is off, and PyTorch refuses a second run that saves other tensors.
"""

import inspect
import weakref
from typing import Any

import torch

from planner._torch.autograd import hooks_on_saved_tensors


class Switch:
    """A switch that a checkpoint's second run finds as its first run did."""

    def __init__(self) -> None:
        self._on: weakref.WeakSet[Any] = weakref.WeakSet()

    def here(self, on: bool) -> bool:
        """Whether it is on: now, or in the first run of the checkpoint that runs."""
        frame = _frame()
        if frame is None:
            return on
        if on:
            self._on.add(frame)
        return frame in self._on


def _frame() -> Any:
    """PyTorch's record of the innermost checkpoint that runs, first or again; None without one."""
    hooks = hooks_on_saved_tensors()
    if hooks is None or getattr(hooks[0], "__module__", None) != torch.utils.checkpoint.__name__:
        return None
    pack: Any = inspect.unwrap(hooks[0])
    held = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=False))
    cell = held.get("frame") or held.get("target_frame_ref")
    found = None if cell is None else cell.cell_contents
    return found() if isinstance(found, weakref.ref) else found
