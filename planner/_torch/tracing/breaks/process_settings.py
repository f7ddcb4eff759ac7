"""Calls inside a forward that set how PyTorch computes, for the whole process."""

import functools
import re
from collections.abc import Callable
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.trace_rules import get_torch_obj_rule_map

from planner._torch.tracing.rules import handle, handler_of

_SETS = re.compile(
    r"_?set_(default_(dtype|tensor_type)|deterministic|float32|fp32|mkldnn|cudnn|cublas|nnpack|blas|linalg"
    r"|math_sdp|sdp_use)\w*|set_flags|use_deterministic_algorithms|enable_\w+_sdp"
)
"""Names of functions that choose the type of new tensors, kernels, or how these round."""
_HOMES = re.compile(r"torch(\._C|\.backends\.\w+)?")


@functools.cache
def break_at_process_settings(is_ours: Callable[[Any], bool]) -> None:
    """End a graph at a call that sets how PyTorch computes; the line runs as written.

    Dynamo puts such a call into the graph, or behind it. A graph of operators has no place for it: all of it
    would run as things stand before, or after.

    Args:
        is_ours: Whether an instruction translator of Dynamo's traces for a planned module.
    """
    for function in list(get_torch_obj_rule_map()):
        name, home = getattr(function, "__name__", ""), getattr(function, "__module__", None) or ""
        if _SETS.fullmatch(name) and _HOMES.fullmatch(home):
            handle("settings", function, _end_graph(name, handler_of(function), is_ours))


def _end_graph(
    name: str, before: Callable[..., Any] | None, is_ours: Callable[[Any], bool]
) -> Callable[..., Any]:
    def handler(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(tx):
            unimplemented(
                gb_type="a setting of PyTorch's",
                context=name,
                explanation=f"{name}() sets how PyTorch computes, for the whole process.",
                hints=[],
            )
        return None if before is None else before(variable, tx, *args, **kwargs)

    return handler
