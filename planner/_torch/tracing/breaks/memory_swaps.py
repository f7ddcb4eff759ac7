"""Private PyTorch APIs: tensors that are given other memory, by ``tensor.data = other`` or ``set_(other)``.

Tested with torch 2.13.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.tensor import TensorVariable

from planner._torch.compat import private, replace


@functools.cache
def break_at_swaps(ours: Callable[[Any], bool]) -> None:
    """End a graph where a tensor is given other memory; the line runs as written.

    Dynamo follows such lines, and AOTAutograd then refuses the graph if that tensor is one of its inputs.

    Args:
        ours: Whether a translator of Dynamo's works for a backend of ours.
    """
    kind = private("SetAttrBuiltinVariable")
    owner, method = (BuiltinVariable, "call_setattr") if kind is None else (kind, "_call_setattr")
    assign, set_ = getattr(owner, method), TensorVariable.method_set_

    def unless_data(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        tensor, named = isinstance(obj.realize(), TensorVariable), name.is_python_constant()
        if tensor and named and name.as_python_constant() == "data" and ours(tx):
            _end(obj)
        return assign(self, tx, obj, name, value)

    def unless_ours(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if ours(tx):
            _end(self)
        return set_(self, tx, *args, **kwargs)

    replace(owner, method, unless_data)
    replace(TensorVariable, "method_set_", unless_ours)


def _end(tensor: Any) -> None:
    unimplemented(
        gb_type="a tensor that is given other memory",
        context=str(tensor),
        explanation="A tensor is given other memory (by an assignment to its .data, or by set_).",
        hints=[],
    )
