"""A planned module is exported, traced and scripted as the module that it is."""

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from planner._torch import compat

_IGNORED = "__jit_ignored_attributes__"
_CALL = "_compiled_call_impl"


def is_recorded() -> bool:
    """Whether what runs here is being recorded: by ``torch.jit.trace``, ``torch.export``, ``make_fx``, or by
    AOTAutograd, which looks at what it records once before."""
    return (
        torch._C._get_tracing_state() is not None
        or compat.is_exporting()
        or get_proxy_mode() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None
    )


def leave_out_of_scripts(module: torch.nn.Module, installed: bool) -> None:
    """Let ``torch.jit.script`` ignore what is installed in place of a module's call, for which
    TorchScript has no type; put things back once nothing is installed."""
    # Not the module: what its `__getattr__` asks may not be there yet, as in a copy that is being made.
    of_class = getattr(type(module), _IGNORED, ())
    named = [name for name in vars(module).get(_IGNORED, of_class) if name != _CALL]
    if installed:
        vars(module)[_IGNORED] = [*named, _CALL]
    elif _IGNORED in vars(module):
        del vars(module)[_IGNORED]
        if named != list(of_class):
            vars(module)[_IGNORED] = named
