"""Hindrances: they keep Dynamo from tracing a frame, or from running the captured code.

Users switch their own ``torch.compile`` off, or tell it what to do with new code
(``torch.compiler.set_stance``, ``TORCH_COMPILE_DISABLE=1``, ``TORCHDYNAMO_DISABLE=1``). Plans use Dynamo to
trace only, so they are followed all the same. Real hindrances are frames that cannot be captured, dispatch
modes, and other threads that trace.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch._dynamo import eval_frame
from torch._dynamo.convert_frame import compile_lock
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from planner._torch.autograd import hooks_on_saved_tensors
from planner._torch.compat import of_graphs
from planner._torch.patches import replaced
from planner._torch.tracing.callbacks import Callback
from planner._torch.tracing.error_logs import not_logged_as_well
from planner.heap import garbage_let_go
from planner.module_parts import parts_of

is_fx_symbolic_tracing = of_graphs("torch.fx._symbolic_trace", "is_fx_symbolic_tracing")
ConvertFrameReturn = of_graphs("torch._dynamo.types", "ConvertFrameReturn")
_FrameAction, _FrameExecStrategy, set_code_exec_strategy = of_graphs(
    "torch._C._dynamo.eval_frame", "_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy"
)

_SWITCH = "TORCHDYNAMO_DISABLE"


class RunsAsItIs(Callback):
    """A callback for Dynamo with which a frame that cannot be captured runs as it is.

    Where a graph ends inside the frame, Dynamo leaves a reference cycle that holds an error. The error holds
    all callers, and these their tensors, until garbage is collected.

    Args:
        callback: The callback that captures.
        failed: Called with the error; raises it, or another one, if the user should see it.
    """

    def __init__(self, callback: Any, failed: Callable[[Exception], None]) -> None:
        super().__init__(callback)
        self._failed = failed

    def __call__(self, *frame: Any) -> Any:
        with compile_lock, garbage_let_go():  # another thread may be planning
            try:
                return self._torchdynamo_orig_backend(*frame)
            except Exception as error:
                self._failed(error)
        # The next call is captured again: the error may be of the user's own code, which raises it as it
        # runs, and may not raise it the next time.
        return left_alone()


def left_alone() -> Any:
    """The result of a callback that lets a frame run as it is, with all calls in it, this time only."""
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    return ConvertFrameReturn(frame_exec_strategy=skip, apply_to_code=False)


def guarded(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; the captured code that runs is the one whose guards hold.

    Guards are checked even where the user's stance says that any code fits, and after a trace in another
    thread has ended: while that runs, PyTorch takes this thread for tracing too.
    """

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        stance = eval_frame._stance
        if not (stance.skip_guard_eval_unsafe or is_fx_symbolic_tracing()):
            return compiled(*args, **kwargs)
        asking = {"_stance": replace(stance, skip_guard_eval_unsafe=False)}
        with compile_lock, replaced(eval_frame, asking):
            return compiled(*args, **kwargs)

    return call


def trace_methods_of(module: torch.nn.Module) -> None:
    """Have Dynamo look again at the methods of a module and its parts.

    After a break in a loop it skips the method that has the loop, for good and for all who compile. Our
    captures go on inside such loops, but the user's own ``torch.compile`` may have broken there before.
    """
    look = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT)
    kinds = {kind for part in parts_of(module) for kind in type(part).__mro__}
    for kind in kinds - set(torch.nn.Module.__mro__):
        for method in vars(kind).values():
            if isinstance(method, FunctionType) and not hasattr(method, "_torchdynamo_disable"):
                set_code_exec_strategy(method.__code__, look)


@contextlib.contextmanager
def switched_on() -> Iterator[None]:
    """While a function is compiled, Dynamo is not switched off by the environment."""
    switch = os.environ.pop(_SWITCH, None)
    try:
        yield
    finally:
        if switch is not None:
            os.environ[_SWITCH] = switch


@contextlib.contextmanager
def no_other_thread_traces() -> Iterator[None]:
    """Let no other thread plan or compile meanwhile: both change settings and functions of PyTorch's for the
    whole process. Usable as a decorator."""
    with (
        compile_lock,
        replaced(torch.compiler, {"_compile_session_context": _compiling_here}),
        not_logged_as_well(),
    ):
        yield


class _InThisThread:
    """An object that is true in the thread that made it, and false in all others."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread


@contextlib.contextmanager
def _compiling_here() -> Iterator[None]:
    """Have ``torch.compiler.is_compiling()`` be true in this thread alone.

    PyTorch makes it true in every thread. Optimizers that step meanwhile would keep their counts of steps in
    single precision, as in compiled code, and round differently.
    """
    with replaced(torch.compiler, {"_is_compiling_flag": _InThisThread()}):
        yield


END_IT = "Call the planned module outside of it, or use planner.remove(model) for as long as it is on"
"""The next step where a mode of the user's hinders."""


def hindering_mode() -> str | None:
    """Describe an active mode of the user's under which no step runs by a plan; None if there is none.

    Under dispatch modes, as ``FlopCounterMode``, Dynamo leaves all frames alone. Transforms of functions and
    forward-mode differentiation go through operations one by one. Hooks on saved tensors are made for the
    tensors that the step saves without a plan; only PyTorch's own do no harm, which return what they get.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return f"{_transform()} is on, and plans do not go through transforms of functions"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation (dual_level) is on, and plans have backwards alone"
    if is_inside_a_replay():
        return "a module around it is followed by replaying, which saves other tensors"
    if saved_tensors_are_changed():
        return "saved_tensors_hooks are on, and plans save other tensors than the step does without"
    if not torch._C._len_torch_dispatch_stack():
        return None
    for mode in reversed(_get_current_dispatch_mode_stack()):
        kind = type(mode)
        if not (
            mode.is_infra_mode() or mode.ignore_compile_internals() or kind.__module__.startswith("planner.")
        ):
            return f"{kind.__qualname__} is on, and under a dispatch mode PyTorch captures nothing"
    return None


def _transform() -> str:
    key = torch._C._functorch.peek_interpreter_stack().key()
    return f"torch.func.{key.name.lower()}"


def is_inside_a_replay() -> bool:
    """Whether a module around this call is followed by replaying: its hooks on saved tensors are on.

    PyTorch does not tell of hooks before 2.7; there the dispatch mode says so.
    """
    if (hooks := hooks_on_saved_tensors()) is not None:
        return str(getattr(hooks[0], "__module__", "")).startswith("planner.replay.")
    return bool(torch._C._len_torch_dispatch_stack()) and any(
        type(mode).__module__ == "planner.replay.follow" for mode in _get_current_dispatch_mode_stack()
    )


def saved_tensors_are_changed() -> bool:
    """Whether hooks of the user's are active that may return other tensors than the saved ones."""
    hooks = hooks_on_saved_tensors()
    return hooks is not None and not _is_of_torch(hooks[0])


def checkpoint_that_is_on() -> object:
    """An object that identifies the innermost running ``torch.utils.checkpoint``; None without one.

    One with ``use_reentrant=True`` does not count: it runs its part without gradients.
    """
    hooks = hooks_on_saved_tensors()
    is_one = hooks is not None and getattr(hooks[0], "__module__", None) == torch.utils.checkpoint.__name__
    return hooks if is_one else None


def _is_of_torch(hook: Any) -> bool:
    module: str = getattr(hook, "__module__", None) or type(hook).__module__
    return module.partition(".")[0] == "torch"
