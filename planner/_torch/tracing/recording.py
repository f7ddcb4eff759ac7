"""Export, tracing and scripting see a planned module as the module without a plan."""

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from planner._torch import compat

_IGNORED = "__jit_ignored_attributes__"
_CALL = "_compiled_call_impl"


def is_recorded() -> bool:
    """Whether the running code is being recorded: by ``torch.jit.trace``, ``torch.export``, ``make_fx``, or
    by AOTAutograd, also in its first pass, which collects metadata."""
    return (
        torch._C._get_tracing_state() is not None
        or compat.is_exporting()
        or get_proxy_mode() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None
    )


def leave_out_of_scripts(module: torch.nn.Module, installed: bool) -> None:
    """Let ``torch.jit.script`` ignore the call that is installed in a module, for which TorchScript has no
    type; undo that once none is installed."""
    # Do not ask the module: in a copy that is being made, attributes that `__getattr__` uses may be missing.
    of_class = getattr(type(module), _IGNORED, ())
    named = [name for name in vars(module).get(_IGNORED, of_class) if name != _CALL]
    if installed:
        vars(module)[_IGNORED] = [*named, _CALL]
    elif _IGNORED in vars(module):
        del vars(module)[_IGNORED]
        if named != list(of_class):
            vars(module)[_IGNORED] = named
