"""The decorators ``recompute`` and ``checkpointable``, and the switch ``no_recompute``."""

import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import torch

from planner._torch.autograd import saved_tensors_hooks_are_allowed
from planner._torch.compat import disable
from planner._torch.tracing import recording
from planner._torch.tracing.block_marks import marked
from planner.blocks.replay import Overwritten, RecomputeError, inner_function, run_recomputed
from planner.blocks.running import constant, next_number, run_by_a_plan, switched, switched_off
from planner.environment import plans_are_off

_B = TypeVar("_B", bound=Callable[..., Any])

RECOMPUTED, NAMED, SWITCHED_OFF = "recompute", "name", "off"
"""Kinds of marks. A mark is a kind and the name of a block."""
_WRAPPED = "_planner_block"
"""Attribute of a decorated function: its kind."""


@overload
def recompute(block: _B, /, *, name: str | None = None) -> _B: ...
@overload
def recompute(block: None = None, /, *, name: str | None = None) -> Callable[[_B], _B]: ...
def recompute(block: Any = None, /, *, name: str | None = None) -> Any:
    """Recompute a layer or function in backward: no value inside it is kept.

    ``@planner.recompute`` decorates a class of layers or a function; ``planner.recompute(model.layers[0])``
    changes one module, in place. It needs no plan: the block keeps its inputs only and runs again in
    backward, with the same random numbers, and without updating running statistics a second time. In a
    planned module the plan follows it: values that only the block reads are recomputed, and the plan decides
    on those that leave the block.

    ``block(x, _recompute=False)`` runs one call as it is, :func:`no_recompute` all calls inside of it, and so
    does the environment variable ``PLANNER=0``. Hooks of modules inside a block run again with it.

    Args:
        block: A subclass of ``nn.Module``, a module, or a function. Arguments may be positional, by keyword,
            nested and no tensors; results any number of tensors in containers.
        name: How ``keep=``, ``recompute=`` and ``checkpoints=`` of :func:`planner.plan` may call it; the name
            of a function if it is left out.

    Raises:
        RecomputeError: The block is none of these; or, when it is called, it writes to a parameter or to a
            tensor of an enclosing scope.
        InputsChanged: In backward: something that it computes again from was changed in place.

    Returns:
        The class or the module itself, or a function in place of the one that was given.
    """
    return _decorated(block, RECOMPUTED, name)


@overload
def checkpointable(block: _B, /, *, name: str | None = None) -> _B: ...
@overload
def checkpointable(block: str | None = None, /, *, name: str | None = None) -> Callable[[_B], _B]: ...
def checkpointable(block: Any = None, /, *, name: str | None = None) -> Any:
    """Give a layer or function a name, by which ``planner.plan`` can be told what to do with it.

    After ``@planner.checkpointable`` (or ``@planner.checkpointable("attention")``) on a function that layers
    call, ``keep=["attention"]``, ``recompute=["layers.3.attention"]`` and ``checkpoints=["*.attention"]``
    name the values that it computes. Where no option of a plan names the block, it changes nothing.

    Args:
        block: As for :func:`recompute`; or the name.
        name: The name; that of the function if it is left out.

    Raises:
        RecomputeError: The block is none of these.
    """
    if isinstance(block, str):
        block, name = None, block
    return _decorated(block, NAMED, name)


def no_recompute() -> AbstractContextManager[Any]:
    """A context in which ``planner.recompute`` recomputes nothing.

    A plan that is made inside it leaves these blocks alone, and goes on to do so.
    """
    if torch.compiler.is_compiling():
        return marked(next_number(), f"{SWITCHED_OFF} ")
    return switched(True)


def _decorated(block: Any, kind: str, name: str | None) -> Any:
    if name is not None and (not isinstance(name, str) or not name or "\n" in name):
        raise RecomputeError(f"name={name!r}: expected the name of a block, a text of one line")
    if block is None:
        return lambda block: _decorated(block, kind, name)
    if isinstance(block, torch.nn.Module):
        _change_module(block, kind, name)
        return block
    if isinstance(block, type) and issubclass(block, torch.nn.Module):
        block.forward = _wrapped(block.forward, kind, name, name or "", block.__qualname__)
        return block
    if isinstance(block, type) or not callable(block):
        what = f"the class {block.__name__}" if isinstance(block, type) else f"a {type(block).__name__}"
        raise RecomputeError(
            f"{kind}: {what} is no block: expected a class of nn.Module, a module or a function"
        )
    plain = inner_function(block)
    if inspect.iscoroutinefunction(plain) or inspect.isgeneratorfunction(plain):
        raise RecomputeError(
            f"{plain.__name__} gives its results one after another, or later: a block is a function that "
            "returns them"
        )
    known = getattr(plain, "__name__", type(plain).__name__)
    return _wrapped(block, kind, name, name or known, getattr(plain, "__qualname__", known))


@constant
def _runs_as_it_is() -> bool:
    return recording.is_recorded() or plans_are_off() or not saved_tensors_hooks_are_allowed()


def _wrapped(function: Callable[..., Any], kind: str, name: str | None, named: str, title: str) -> Any:
    if getattr(function, _WRAPPED, None) == kind and name is None:
        return function
    known: Overwritten = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def block(*args: Any, _recompute: bool = True, **kwargs: Any) -> Any:
        return _run(function, args, kwargs, kind if _recompute else NAMED, named, known, title)

    setattr(block, _WRAPPED, kind)
    return block


def _change_module(module: torch.nn.Module, kind: str, name: str | None) -> None:
    # A partial: a copy or a pickle of the module gets its own, with the copy in place of the module.
    forward = functools.partial(_forward, module, (kind, name or ""))
    own = vars(module).get("forward")
    if own is not None and not (isinstance(own, functools.partial) and own.func is _forward):
        raise RecomputeError(
            f"{type(module).__name__} has a forward of its own, set on the module: decorate what it calls"
        )
    module.forward = forward


def _forward(
    module: torch.nn.Module, told: tuple[str, str], *args: Any, _recompute: bool = True, **kwargs: Any
) -> Any:
    kind, named = told
    function = functools.partial(type(module).forward, module)  # Dynamo cannot make a bound method
    return _run(
        function, args, kwargs, kind if _recompute else NAMED, named, _OF_MODULES, type(module).__qualname__
    )


_OF_MODULES: Overwritten = weakref.WeakKeyDictionary()


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind: str,
    named: str,
    known: Overwritten,
    title: str,
) -> Any:
    if kind == RECOMPUTED and switched_off():
        kind = NAMED
    if run_by_a_plan():
        with marked(next_number(), f"{kind} {named}"):
            return function(*args, **kwargs)
    if kind == NAMED:
        return function(*args, **kwargs)
    if not torch.is_grad_enabled() or _runs_as_it_is():
        return function(*args, **kwargs)
    return _not_compiled(function, args, kwargs, known, title)


_not_compiled = disable(
    run_recomputed,
    "a block that is recomputed runs by itself, what is around it is compiled: leave fullgraph=True "
    "out, or run it under planner.no_recompute()",
)
"""Not traced by the user's ``torch.compile``: it would update running statistics once more in backward."""
