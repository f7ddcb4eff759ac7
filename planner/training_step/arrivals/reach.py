"""The objects that a function of the user's can reach, and whether they can be copied and put back."""

import builtins
import functools
from collections import Counter
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from planner.addresses import identity
from planner.training_step.generators import is_generator
from planner.training_step.python_state import (
    CONTAINERS,
    MOST_ELEMENTS,
    belongs_to,
    codes,
    globals_named_in,
    is_of_users,
    is_stepping,
    referred,
    written_by_function,
)

_HARMLESS = ("torch", "math", "numpy", "functools", "itertools", "operator", "copy", "collections", "time")
"""Libraries that change nothing but their arguments, except by the names in ``_CHANGES``."""
_CHANGES = frozenset(
    (
        *("open", "exec", "eval", "input", "__import__", "compile", "breakpoint"),
        *("distributed", "save", "all_reduce", "reduce_scatter", "all_gather", "tofile", "savez", "itemset"),
    )
)
"""Names by which a function reaches files, other ranks and more that cannot be copied."""
_MOST_OBJECTS = 200_000
_PLAIN = (type(None), bool, int, float, complex, str, bytes, slice, torch.dtype, torch.device, torch.Size)


class Reach:
    """The objects that functions refer to: in enclosing scopes, defaults and globals, and inside of these.

    Args:
        functions: The functions, methods and partial functions.

    Attributes:
        objects: Objects with a state: tensors, containers, modules, optimizers, arrays, functions.
        variables: Global variables that the functions write to, each with its value.
        opaque: The first object that can be neither copied nor put back, in words; None where there is none.
    """

    def __init__(self, *functions: Any) -> None:
        self.objects: list[Any] = []
        self.variables: list[tuple[dict[str, Any], str, Any]] = []
        self.opaque: str | None = None
        self._seen: dict[int, Any] = {}
        pending = [(function, "") for function in functions]
        while pending:
            value, name = pending.pop()
            if isinstance(value, _PLAIN) or identity(value) in self._seen:
                continue
            if len(self._seen) > _MOST_OBJECTS:
                self._cannot("more objects than are looked through")
                break
            self._seen[identity(value)] = value
            pending += self._into(value, name)

    def __contains__(self, value: Any) -> bool:
        return identity(value) in self._seen

    def _into(self, value: Any, name: str) -> Iterator[tuple[Any, str]]:
        kind = type(value)
        if isinstance(value, FunctionType):
            yield from self._into_function(value)
        elif isinstance(value, MethodType | functools.partial):
            self.objects.append(value)
            yield from ((one, name) for one in referred(value))
        elif isinstance(value, BuiltinFunctionType):
            holder = value.__self__
            if holder is None or isinstance(holder, ModuleType | type):
                self._is_of_a_library(value, name)
            else:  # a method, as that of a list
                yield holder, name
        elif isinstance(value, ModuleType | type):
            self._is_of_a_library(value, name)
        elif isinstance(value, torch.Tensor | nn.Module) or is_generator(value):
            self.objects.append(value)
        elif kind in CONTAINERS or kind in (tuple, Counter):
            self.objects.append(value)
            if len(value) > MOST_ELEMENTS:
                self._cannot(f"{name or 'a container'}, which holds {len(value):,} objects")
                return
            members = [*value, *value.values()] if isinstance(value, dict) else value
            yield from ((one, name) for one in members)
        elif (kind is np.ndarray and value.dtype != object) or is_stepping(value):
            self.objects.append(value)
        elif is_of_users(value):
            self.objects.append(value)
            yield vars(value), name
            for base in kind.__mro__:
                if base.__module__ != "builtins":
                    yield from ((f, name) for f in vars(base).values() if isinstance(f, FunctionType))
        else:
            self._cannot(f"{name or 'something'}, a {kind.__module__}.{kind.__qualname__}")

    def _into_function(self, function: FunctionType) -> Iterator[tuple[Any, str]]:
        if belongs_to(function.__module__, "planner"):  # the planner puts its own state back
            return
        if belongs_to(function.__module__, *_HARMLESS):
            self._is_of_a_library(function, function.__name__)
            return
        self.objects.append(function)
        self.variables += [
            (function.__globals__, n, function.__globals__[n])
            for n in written_by_function(function)
            if n in function.__globals__
        ]
        names = {name for code in codes(function.__code__) for name in code.co_names}
        if changing := sorted(names & _CHANGES):
            self._cannot(f"{changing[0]}()")
        for name, value in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                yield value.cell_contents, name
            except ValueError:  # nothing yet
                continue
        for value in [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]:
            yield value, function.__name__
        for name, value in globals_named_in(function).items():
            yield value, name

    def _is_of_a_library(self, value: Any, name: str) -> None:
        module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if module is None and getattr(builtins, getattr(value, "__name__", ""), None) is value:
            module = "builtins"
        by_name = getattr(value, "__name__", "").rpartition(".")[2] in _CHANGES
        if by_name or not belongs_to(module, *_HARMLESS, "builtins") or is_of_distributed(module):
            self._cannot(name or str(module))

    def _cannot(self, opaque: str) -> None:
        """Note an object that can be neither copied nor put back."""
        self.opaque = self.opaque or opaque


def is_of_distributed(module: str | None) -> bool:
    return (module or "").startswith("torch.distributed")
