"""Let go of what was captured of a user's code, which Dynamo keeps as long as that.

What follows a break is code of the user's, or of a library's: what Dynamo compiles of it hangs on that code,
with the graphs of the plan in it, and would stay until the process ends.
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
    """What was captured through one callback, which is let go of with the callback."""

    def __init__(self, callback: object) -> None:
        self._guards: list[Guards] = []
        weakref.finalize(callback, _let_go, self._guards).atexit = False

    def add(self, result: Any) -> None:
        """Note what Dynamo's callback has returned."""
        code = result.guarded_code
        if code is not None:
            self._guards.append(weakref.ref(code.guard_manager))
        # For an error message Dynamo keeps each place where it noted a time, with its code, for good.
        timed = get_metrics_context()
        if not timed.in_progress():
            timed._edits.clear()


def forget_what_was_looked_up() -> None:
    """Forget what Dynamo was looking up for a guard when a capture was interrupted, as by Ctrl-C.

    It puts values that are on their way into variables named tmp, tmp0 and so on, which it deletes then.
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
    # Guards know where in the code they are from. They wait for the end of what they guard, as of classes.
    # Names alone are listed in one go: a pair made for each could start the collector, which ends others.
    registry: dict[Any, Any] = weakref.finalize._registry  # type: ignore[attr-defined]
    for waiting in list(registry):
        info = registry.get(waiting)
        told = info.func if info is not None else None
        method = told.func if isinstance(told, functools.partial) else None
        checks = method.__self__ if isinstance(method, MethodType) else None
        if isinstance(checks, CheckFunctionManager):
            manager = getattr(checks, "guard_manager", None)  # of a capture that failed there is none
            if id(manager) in managers:
                waiting.detach()
