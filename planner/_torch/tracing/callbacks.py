"""Which callback Dynamo calls for a function that is compiled, by us or by the user.

While a plan is made, parts of the model that the user compiles run uncompiled: compiled programs cannot run
on tensors without data (Inductor's end the process), and Dynamo traces the original functions.
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import eval_frame

from planner._torch.checkpoint_frames import Switch
from planner._torch.compat import of_graphs
from planner._torch.patches import replace

set_fullgraph_compiled_frame_count = of_graphs(
    "torch._C._dynamo.eval_frame", "set_fullgraph_compiled_frame_count"
)


class Callback:
    """A callback of ours, around one of Dynamo's."""

    def __init__(self, callback: Any) -> None:
        # Under this name Dynamo looks for the backend that a callback ends in.
        self._torchdynamo_orig_backend = callback


_COMPILING = ("torch._higher_order_ops.", "torch.nn.attention.flex_attention")
"""Modules of PyTorch that compile a function that they are given, as torch.cond does."""


class _Running(threading.local):
    """The functions that ran uncompiled in this thread; None while they run compiled."""

    called: list[Callable[..., Any]] | None = None


_running = _Running()
_uncompiled = Switch()


@functools.cache
def call_ours_in_any_stance() -> None:
    """Have Dynamo call our callbacks under every stance, with no other backend in their place, and no
    callback for functions that run uncompiled."""
    by_stance = eval_frame._callback_from_stance

    def callback_of(callback: Any) -> Any:
        if isinstance(callback, Callback):
            return callback
        return None if _runs_uncompiled(callback) else by_stance(callback)

    replace(eval_frame, "_callback_from_stance", callback_of)


@contextlib.contextmanager
def parts_run_uncompiled() -> Iterator[list[Callable[..., Any]]]:
    """A context in which functions that the user compiled run as written, in this thread.

    Yields:
        The functions that ran so, each once.
    """
    call_ours_in_any_stance()
    before, called = _running.called, list[Callable[..., Any]]()
    _running.called = called
    try:
        yield called
    finally:
        _running.called = before


def _runs_uncompiled(callback: object) -> bool:
    """Whether a call that a callback of the user's is about to compile should run as written."""
    called = _running.called
    if callback in (None, False) or not _uncompiled.here(called is not None):
        return False
    wrapper = sys._getframe(2)  # Dynamo's frame around the function that is compiled
    caller = wrapper.f_back
    if caller is not None and str(caller.f_globals.get("__name__")).startswith(_COMPILING):
        return False
    function = wrapper.f_locals.get("fn")
    if called is not None and function is not None and function not in called:
        called.append(function)
    set_fullgraph_compiled_frame_count(-1)  # that nothing was compiled is an error else
    return True


def name_of(function: Callable[..., Any]) -> str | None:
    """The name of a compiled function; None for a module's call."""
    function = inspect.unwrap(function)
    if isinstance(getattr(function, "__self__", function), torch.nn.Module):
        return None
    return getattr(function, "__qualname__", type(function).__qualname__)
