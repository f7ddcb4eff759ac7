"""Operators whose kernels call others, which autocast casts.

Autocast has no rule for these operators themselves, so it is still on when their kernels run. Under a
dispatch mode it is off: PyTorch excludes its keys there, and ``torch.is_autocast_enabled()`` is False. So
they get a rule here, which changes nothing, but notes that autocast is on. A dispatch mode that finds the
note runs the operator with autocast on.
"""

import re
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode

from planner._torch.autocast_state import under_autocast
from planner._torch.operators import OpOverload, is_collective, is_foreign, is_operator
from planner._torch.patches import library_row

AFFINE_GRID = torch.ops.aten.affine_grid_generator.default
"""PyTorch's only one: it multiplies matrices. Others are from outside of PyTorch."""

_PYTORCHS = re.compile(
    "_native|_quantized|_test|debug_mode_ops|debugprims|export|inductor|inductor_prims|mkl|mkldnn_prepacked|onednn|"
    "profiler|quantization|quantized|rngprims|sparse|static_runtime|symm_mem"
)
"""Namespaces of PyTorch's own, beside those of :func:`is_foreign`."""
_KINDS = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}
_BELOW = torch._C._dispatch_keyset_full_after(DispatchKey.AutocastCPU)

_libraries: list[torch.library.Library] = []  # what they register goes with them
_seen: set[str] = set()
noted_operators: set[OpOverload] = set()
"""The operators that have a rule of ours."""


class _Here(threading.local):
    noted: tuple[Any, str, torch.dtype] | None = None
    """While such an operator is dispatched: which one, and the kind of device and the type of autocast."""


_here = _Here()


def note_operators() -> None:
    """Give a rule to all such operators that are there by now."""
    names = set(torch._C._dispatch_get_all_op_names()) - _seen
    _seen.update(names)
    for name in (name for name in names if name == AFFINE_GRID.name() or not name.startswith("aten::")):
        operator = _found(name)
        if operator is not AFFINE_GRID and not may_cast_inside(operator):
            continue
        noted_operators.add(operator)
        library_row("kernels for autocast")
        library = torch.library.Library(operator.namespace, "FRAGMENT")
        _libraries.append(library)
        for kind, key in _KINDS.items():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key.name):
                library.impl(name.partition("::")[2], _rule(operator, kind), key.name, with_keyset=True)


def may_cast_inside(operator: Any) -> bool:
    """Whether an operator is from outside of PyTorch, and nobody says what autocast does to it."""
    return is_foreign(operator) and not (is_collective(operator) or _PYTORCHS.fullmatch(operator.namespace))


def _found(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)


def _rule(operator: OpOverload, kind: str) -> Callable[..., Any]:
    def noting(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        before, _here.noted = _here.noted, (operator, kind, torch.get_autocast_dtype(kind))
        try:
            return operator.redispatch(keyset & _BELOW, *args, **kwargs)
        finally:
            _here.noted = before

    return noting


def is_noted(operator: Any) -> bool:
    """For a dispatch mode that is called with such an operator: whether autocast is on."""
    return _here.noted is not None and _here.noted[0] is operator


def dispatched_casting(
    dispatch: Callable[..., Any], operator: Any, types: Any, args: Any, kwargs: Any
) -> Any:
    """What a dispatch mode does with such an operator, with autocast on as noted.

    Args:
        dispatch: What the mode does otherwise. It is given the operator, or those that this is made of.
        operator, types, args, kwargs: The arguments of ``__torch_dispatch__``.
    """
    noted, _here.noted = _here.noted, None  # for one mode and one call
    assert noted is not None
    _, kind, dtype = noted
    with under_autocast({kind: (True, dtype)}):
        if operator is not AFFINE_GRID:
            return dispatch(operator, types, args, kwargs)
        with _Passing(dispatch):
            return operator._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))


def has_rule(operator: Any) -> bool:
    """Whether autocast may cast what an operator is given."""
    known = is_operator(operator) and operator not in noted_operators
    return known and any(
        torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key.name) for key in _KINDS.values()
    )


def casts_inside(operator: Any) -> bool:
    """In a dispatch mode: whether autocast may cast what an operator calls inside."""
    on = operator in noted_operators and any(map(torch.is_autocast_enabled, _KINDS))
    return on or (may_cast_inside(operator) and operator not in noted_operators)  # loaded a moment ago


class _Passing(TorchDispatchMode):
    """Passes the operators that run to a dispatch mode that is running."""

    def __init__(self, dispatch: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dispatch = dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._dispatch(func, types, args, kwargs)
