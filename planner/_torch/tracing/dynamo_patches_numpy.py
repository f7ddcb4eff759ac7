"""Numpy inside a forward: private PyTorch APIs.

Dynamo traces numpy's functions as PyTorch's, which round differently, draws numpy's random numbers from
PyTorch's generator, and takes numpy's numbers for inputs that change. Here a number that numpy has computed,
or computes from constants as in ``np.sqrt(64)``, is that number. Anything else ends the graph: numpy does it.

Tested with torch 2.13.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.misc import NumpyVariable

NUMPY_SETTINGS: dict[str, Any] = {"trace_numpy": False, "use_numpy_random_stream": True}
"""Of Dynamo, with which it leaves numpy to numpy."""

_LIKE_PYTHON = (np.float64, np.int64)
"""Numbers that compute as Python's own do."""


@functools.cache
def numbers_of_numpy(is_ours: Callable[[Any], bool]) -> None:
    """Let Dynamo compute numbers from constants with numpy, where ``is_ours`` says so of what is traced."""
    call = NumpyVariable.call_function

    def or_number(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if is_ours(tx):
            number = _number(self.value, args, kwargs)
            if number is not None:
                return VariableTracker.build(tx, number)
        return call(self, tx, args, kwargs)

    setattr(NumpyVariable, "call_function", or_number)  # noqa: B010
    wrap = VariableBuilder._wrap

    def or_constant(self: Any, value: Any) -> Any:
        if type(value) in _LIKE_PYTHON and is_ours(self.tx):
            self.install_guards(GuardBuilder.EQUALS_MATCH)
            return ConstantVariable.create(value.item(), source=self.source)
        return wrap(self, value)

    setattr(VariableBuilder, "_wrap", or_constant)  # noqa: B010


def _number(function: Any, args: Any, kwargs: Any) -> float | int | None:
    given = [*args, *kwargs.values()]
    drawn = (getattr(function, "__module__", None) or "").startswith("numpy.random")
    if drawn or isinstance(getattr(function, "__self__", None), np.random.RandomState):
        return None
    if isinstance(function, type) or not all(v.is_python_constant() for v in given):
        return None
    result = function(
        *[v.as_python_constant() for v in args], **{k: v.as_python_constant() for k, v in kwargs.items()}
    )
    return result.item() if isinstance(result, _LIKE_PYTHON) else None
