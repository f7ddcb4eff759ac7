"""Private PyTorch APIs: errors that depend on data, where the forward handles them.

Tested with torch 2.13.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from planner._torch.compat import replace
from planner._torch.tracing.rules import ask_handler_of

_FAIL_BY_DATA = re.compile(
    r"(linalg_)?(cholesky|inv|inverse|solve|solve_ex|eigh|eigvalsh|eig|eigvals|svd|svdvals|lstsq|pinv|pinverse"
    r"|tensorinv|tensorsolve|ldl_factor|lu_factor|lu|qr|cond)|multinomial"
)
"""Names of functions that raise an error for some data and none for others: a matrix has no inverse."""


@functools.cache
def break_where_errors_are_handled(is_ours: Callable[[Any], bool]) -> None:
    """Have what handles an error of a matrix run as written, as ``try: torch.linalg.cholesky(a)`` does.

    In a graph the operation would raise it where the graph runs, past the code that handles it.

    Args:
        is_ours: Whether an instruction translator of Dynamo's traces for a planned module.
    """
    handlers, method = TorchInGraphFunctionVariable._get_handlers(), TensorVariable.call_method

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
            ask_handler_of(function)
            handlers[function] = asking(name, handlers.get(function))

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if _FAIL_BY_DATA.fullmatch(name):
            end_if_handled(name, tx)
        return method(self, tx, name, args, kwargs)

    replace(TensorVariable, "call_method", call_method)


def _is_handled(tx: Any) -> bool:
    """Whether the code that is traced, or what calls it, has an ``except`` for what goes wrong here."""
    while tx is not None:
        entry = tx.current_instruction.exn_tab_entry
        seen = set()
        while entry is not None and id(entry.target) not in seen:
            seen.add(id(entry.target))
            if _is_except(tx.instructions, entry.target):
                return True
            entry = entry.target.exn_tab_entry
        tx = tx.parent
    return False


def _is_except(instructions: list[Any], target: Any) -> bool:
    """Whether a handler is one of ``except``, which looks at the error: not of ``with``, not ``finally``."""
    at = next(i for i, instruction in enumerate(instructions) if instruction is target)
    names = [instruction.opname for instruction in instructions[at : at + _FAR]]
    if names[:2] == ["PUSH_EXC_INFO", "POP_TOP"]:
        return True
    for name in names[1:]:
        if name == "CHECK_EXC_MATCH":
            return True
        if not name.startswith(("LOAD_", "BUILD_TUPLE", "CACHE", "EXTENDED_ARG", "NOP")):
            return False
    return False


_FAR = 24
"""So many instructions may name the errors of an ``except``."""
