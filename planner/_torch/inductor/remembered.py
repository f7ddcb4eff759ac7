"""Larger caches for Inductor while it lowers a program.

A program that recomputes much has many kernels with the same indexing. Inductor simplifies the same
expressions for each, since it caches only the last 128, and makes the rules of types anew for each operation.
The cached functions depend on nothing but their arguments, so that programs are the same.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch._inductor import sizevars
from torch._inductor.codegen import cpp
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

from planner._torch.patches import replaced

_MOST = 1 << 15
"""Expressions that are cached for each function; most programs have a few thousand."""


@functools.cache
def _remembering(function: Any) -> Any:
    """The same function, which forgets what it returned later; itself if it remembers nothing now."""
    plain = getattr(function, "__wrapped__", None)
    return function if plain is None else functools.lru_cache(_MOST)(plain)


class _RulesOfTypes:
    """In the place of a method that makes the rules of all operators again for the one object there is."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._made: Any = None

    def __get__(self, instance: Any, _owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self._once, instance)

    def _once(self, instance: Any) -> None:
        if self._made is not instance:
            self._make(instance)
            self._made = instance


@contextlib.contextmanager
def work_remembered() -> Iterator[None]:
    """While this is open, Inductor remembers more; what it remembers outlives that."""
    names = ("stride_at", "simplify_index_in_vec_range", "stride_at_vec_range")
    remembering = {name: _remembering(getattr(sizevars, name)) for name in names}
    with (
        replaced(sizevars, remembering),
        replaced(cpp, {name: function for name, function in remembering.items() if hasattr(cpp, name)}),
        replaced(
            DtypePropagationOpsHandler, {"__init__": _RulesOfTypes(DtypePropagationOpsHandler.__init__)}
        ),
    ):
        yield
