"""Methods of containers that wait on the stack while a graph ends."""

import collections
import functools
import types
from collections.abc import Callable
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, LocalSource
from torch._dynamo.variables.builder import VariableBuilder

from planner._torch.patches import replace

_CONTAINERS = frozenset(
    {list, dict, set, frozenset, tuple, str, collections.deque, collections.OrderedDict}
    | {collections.defaultdict, collections.Counter}
)


@functools.cache
def know_methods_by_name(ours: Callable[[Any], bool]) -> None:
    """Recognise a bound method by its object and its name, as ``results.append`` in ``results.append(f(x))``.

    Where a graph ends inside ``f``, the method is on the stack, and the code after the graph gets it as an
    argument. Python makes a new method object for each call, and Dynamo guards its address: that code would
    be captured again in every step.

    Args:
        ours: Whether a translator of Dynamo's works for a backend of ours.
    """
    wrap = VariableBuilder._wrap

    def by_name(self: Any, value: Any) -> Any:
        if not (_is_bound(value) and isinstance(self.source, LocalSource) and ours(self.tx)):
            return wrap(self, value)
        install = self.install_guards

        def instead(*guards: Any) -> Any:
            for guard in guards:
                if guard is GuardBuilder.ID_MATCH:
                    install(GuardBuilder.TYPE_MATCH)
                    install_guard(AttrSource(self.source, "__name__").make_guard(GuardBuilder.EQUALS_MATCH))
                else:
                    install(guard)
            return {}

        self.install_guards = instead
        try:
            return wrap(self, value)
        finally:
            del self.install_guards

    replace(VariableBuilder, "_wrap", by_name)


def _is_bound(value: Any) -> bool:
    return isinstance(value, types.BuiltinMethodType) and type(value.__self__) in _CONTAINERS
