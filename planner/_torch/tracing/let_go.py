"""Free captures of code that lives longer than the plan.

After a break Dynamo captures code of the user's, or of a library's. It attaches the compiled code, with the
graphs of the plan in it, to that code object, where it would stay until the process ends.
"""

import functools
import weakref
from types import MethodType
from typing import Any

from torch._dynamo import guards as dynamo_guards
from torch._dynamo.guards import CheckFunctionManager, DeletedGuardManagerWrapper
from torch._dynamo.utils import get_metrics_context

Guards = weakref.ref[Any]

_GONE = "what it was compiled for is gone"


class Captured:
    """The captures of one callback, which are freed together with the callback."""

    def __init__(self, callback: object) -> None:
        self._guards: list[Guards] = []
        weakref.finalize(callback, _let_go, self._guards).atexit = False

    def add(self, result: Any) -> None:
        """Note the result of Dynamo's callback."""
        code = result.guarded_code
        if code is not None:
            self._guards.append(weakref.ref(code.guard_manager))
        # Dynamo keeps each place where it noted a time, with its code, for good: for an error message.
        timed = get_metrics_context()
        if not timed.in_progress():
            timed._edits.clear()


def forget_what_was_looked_up() -> None:
    """Forget the values that Dynamo was looking up for a guard when a capture was interrupted, as by Ctrl-C.

    It puts intermediate values into variables named tmp, tmp0 and so on, and deletes them at the end.
    """
    variables = dynamo_guards._CLOSURE_VARS or {}
    for name in [name for name in variables if name.startswith("tmp")]:
        del variables[name]


def _let_go(guards: list[Guards]) -> None:
    managers = {id(manager): manager for reference in guards if (manager := reference()) is not None}
    guards.clear()
    for manager in managers.values():
        if manager.cache_entry is not None and manager.extra_state is not None:
            manager.extra_state.invalidate(manager.cache_entry, DeletedGuardManagerWrapper(_GONE))
    # Finalizers of guards wait for the end of the guarded object, as of a class, and hold the user's code.
    # List the keys at once: making a pair for each could start the garbage collector, which runs finalizers.
    registry: dict[Any, Any] = weakref.finalize._registry  # type: ignore[attr-defined]
    for waiting in list(registry):
        info = registry.get(waiting)
        callback = info.func if info is not None else None
        method = callback.func if isinstance(callback, functools.partial) else None
        checks = method.__self__ if isinstance(method, MethodType) else None
        if isinstance(checks, CheckFunctionManager):
            manager = getattr(checks, "guard_manager", None)  # a failed capture has none
            if id(manager) in managers:
                waiting.detach()
