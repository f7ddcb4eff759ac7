"""Errors that depend on data, where the forward handles them."""

import functools
import re
from collections.abc import Callable
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables.tensor import TensorVariable

from planner._torch.patches import replace
from planner._torch.tracing.rules import handle, handler_of

_FAIL_BY_DATA = re.compile(
    r"(linalg_)?(cholesky|inv|inverse|solve|solve_ex|eigh|eigvalsh|eig|eigvals|svd|svdvals|lstsq|pinv|pinverse"
    r"|tensorinv|tensorsolve|ldl_factor|lu_factor|lu|qr|cond)|multinomial"
)
"""Names of functions that raise an error for some data and none for others: a matrix has no inverse."""


@functools.cache
def break_where_errors_are_handled(is_ours: Callable[[Any], bool]) -> None:
    """End a graph where an error of a matrix may be handled, as by ``try: torch.linalg.cholesky(a)``.

    In a graph the operation would raise it where the graph runs, past the code that handles it.

    Args:
        is_ours: Whether an instruction translator of Dynamo's traces for a planned module.
    """
    method = TensorVariable.call_method

    def end_if_handled(name: str, tx: Any) -> None:
        if is_ours(tx) and _is_handled(tx):
            unimplemented(
                gb_type="an error that depends on data",
                context=name,
                explanation=f"{name}() may raise an error, for some data, that is handled here.",
                hints=[],
            )

    def asking(name: str, before: Callable[..., Any] | None) -> Callable[..., Any]:
        def handler(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            end_if_handled(name, tx)
            return None if before is None else before(variable, tx, *args, **kwargs)

        return handler

    for function in list(get_torch_obj_rule_map()):
        name, home = getattr(function, "__name__", ""), getattr(function, "__module__", None) or "torch"
        if _FAIL_BY_DATA.fullmatch(name) and home.partition(".")[0] == "torch":
            handle("errors by data", function, asking(name, handler_of(function)))

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if _FAIL_BY_DATA.fullmatch(name):
            end_if_handled(name, tx)
        return method(self, tx, name, args, kwargs)

    replace(TensorVariable, "call_method", call_method)


def _is_handled(tx: Any) -> bool:
    """Whether the traced code, or what calls it, is in a ``try`` or ``with``, which may handle errors."""
    while tx is not None:
        if tx.current_instruction.exn_tab_entry is not None:
            return True
        tx = tx.parent
    return False
