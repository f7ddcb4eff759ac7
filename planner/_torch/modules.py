"""How an nn.Module is called, and what is installed in place of its call."""

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.utils import parametrize

from planner._torch.patches import replace, replaced
from planner._torch.tracing.recording import leave_out_of_scripts
from planner.module_parts import named_parts, parts_of


def module_call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module as ``module(*args, **kwargs)`` does when nothing is installed: hooks and forward."""
    return module._call_impl(*args, **kwargs)


def calls_forward_as_given(module: torch.nn.Module) -> bool:
    """Whether a call of a module passes its arguments on to ``forward`` as they are: no hook comes before."""
    return type(module).__call__ is torch.nn.Module.__call__ and not (
        module._forward_pre_hooks or torch.nn.modules.module._global_forward_pre_hooks
    )


def converted(module: torch.nn.Module, conversion: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    """Convert a module's parameters and buffers, as ``module.double()`` does; returns the module."""
    made: torch.nn.Module = module._apply(conversion)
    return made


def call_with_forward(
    module: torch.nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a module as :func:`module_call` does, with ``forward(*args, **kwargs)`` in place of its own.

    While ``forward`` itself runs the module's own is back in its place.
    """
    if not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    ):
        return forward(*args, **kwargs)
    attributes = vars(module)
    own = attributes.get("forward")

    def restore() -> None:
        if own is None:
            attributes.pop("forward", None)
        else:
            attributes["forward"] = own

    def run(*inner_args: Any, **inner_kwargs: Any) -> Any:
        restore()
        return forward(*inner_args, **inner_kwargs)

    attributes["forward"] = run
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        restore()


@contextlib.contextmanager
def no_cached_parametrizations() -> Iterator[None]:
    """A context that begins as a region of ``parametrize.cached()`` does, and leaves the one around alone.

    Values that are cached have been computed already, by another run.
    """
    with replaced(parametrize, {"_cache": {}}):
        yield


def hooks_on_all_modules() -> tuple[int, ...]:
    """The hooks that are registered on all modules at once, by number; Dynamo does not notice new ones."""
    if not torch.nn.modules.module._has_any_global_hook():
        return ()
    every = torch.nn.modules.module
    kinds = (
        every._global_forward_pre_hooks, every._global_forward_hooks,
        every._global_backward_pre_hooks, every._global_backward_hooks,
    )  # fmt: skip
    return tuple(number for hooks in kinds for number in hooks)


def hooks_inside(module: torch.nn.Module) -> tuple[int, ...]:
    """The hooks on a module and its parts, by number."""
    return tuple(
        number
        for part in parts_of(module)
        for hooks in (
            part._forward_pre_hooks, part._forward_hooks, part._backward_pre_hooks, part._backward_hooks
        )
        for number in hooks
    )  # fmt: skip


def installed_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The function that runs instead of a module's call, installed by us or by ``module.compile()``."""
    return module._compiled_call_impl


def install_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Put ``call`` in place of the module's own; None takes it out. Pickle and deepcopy drop it."""
    module._compiled_call_impl = call
    leave_out_of_scripts(module, call is not None)


_FRAMES_TO_A_CALL = 8
"""Frames from an installed call up to ``_wrapped_call_impl``, which calls it, a few wrappers included."""


def called_instead_of(module: torch.nn.Module, installed: object) -> torch.nn.Module | None:
    """The module whose call runs, if it is not ``module`` but has the call that is installed in ``module``.

    This is so after a module's ``__dict__`` was copied, as for replicas of ``DataParallel``. The installed
    call does not get the module as an argument, so it is read from the frame of the caller.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES_TO_A_CALL):
        if frame.f_code is torch.nn.Module._wrapped_call_impl.__code__:
            called: torch.nn.Module = frame.f_locals["self"]
            same = called is module or vars(called).get("_compiled_call_impl") is not installed
            return None if same else called
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


@functools.cache
def after_shallow_copies(copied: Callable[[torch.nn.Module, torch.nn.Module], None]) -> None:
    """Have ``copied(module, copy)`` called after ``copy.copy(module)``, which drops what is installed.

    This holds for the process; users' classes that define their own copying are left alone.
    """
    of_graphs = torch.fx.GraphModule.__copy__

    def shallow(self: torch.nn.Module) -> torch.nn.Module:
        if (own := getattr(super(torch.nn.Module, self), "__copy__", None)) is not None:
            return cast(torch.nn.Module, own())  # of a class of the user's behind nn.Module
        made: torch.nn.Module = copy._reconstruct(self, None, *self.__reduce_ex__(4))  # type: ignore[attr-defined]
        copied(self, made)
        return made

    def shallow_graph(self: torch.fx.GraphModule) -> torch.fx.GraphModule:
        made = of_graphs(self)
        copied(self, made)
        return made

    replace(torch.nn.Module, "__copy__", shallow)
    replace(torch.fx.GraphModule, "__copy__", shallow_graph)


def is_compiled(module: object) -> bool:
    """Whether a module is what ``torch.compile(module)`` returns."""
    return isinstance(module, OptimizedModule)


def compiled_modules(model: torch.nn.Module) -> list[str]:
    """Names of the parts of a model that are compiled, by ``torch.compile(part)`` or ``part.compile()``."""
    return [
        name
        for name, part in named_parts(model).items()
        if name and (isinstance(part, OptimizedModule) or _is_wrapped(part._compiled_call_impl))
    ]


def _is_wrapped(call: object) -> bool:
    return call is not None and hasattr(call, "get_compiler_config")
