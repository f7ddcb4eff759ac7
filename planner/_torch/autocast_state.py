"""The regions of autocast that code runs in, and going back to them."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner._torch import fake


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """A context for a backward outside of autocast, as PyTorch asks of its users.

    A user leaves the region before the backward, which frees the kept casts of weights. Here the caller's
    region continues, so they are freed explicitly. The notes on that region stay.
    """
    with notes_on_region_stay(), contextlib.ExitStack() as stack:
        for kind in _enabled():
            torch.clear_autocast_cache()
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def notes_on_region_stay() -> Iterator[None]:
    """A context that restores the notes on the caller's region at its end, even if casts were freed."""
    noted = {kind: notes for kind in _enabled() if (notes := notes_of_region(kind))}
    try:
        yield
    finally:
        for kind, notes in noted.items():
            again = notes_of_region(kind)
            if again is not None:
                again.update(notes)


@contextlib.contextmanager
def region_of_its_own() -> Iterator[None]:
    """A context that begins without earlier casts of autocast and without notes on the region."""
    with notes_on_region_stay():
        torch.clear_autocast_cache()
        yield


def _enabled() -> list[str]:
    return [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]


def notes_of_region(kind: str) -> dict[str, Any] | None:
    """A dictionary that lasts as long as autocast keeps casts on a kind of device; None where it keeps none.

    Autocast keeps the cast of an empty tensor with those of parameters, and the autograd node of that can
    be written on. No kernel runs.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        return None
    with fake.without_modes():
        empty = _empty_parameter(kind)
        used = torch.mm(empty, empty).grad_fn
    node: Any = None if used is None else used.next_functions[0][0]
    return node.metadata if node is not None and node.name() == "ToCopyBackward0" else None


@functools.cache
def _empty_parameter(kind: str) -> torch.Tensor:
    with torch.inference_mode(False):  # one for all, wherever it is first asked for
        return torch.empty((0, 0), device=kind, dtype=torch.float32, requires_grad=True)


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """A context in which operators run as below autograd in the forward: without saves and autocast."""
    kinds = _enabled()
    if not kinds and not torch.is_grad_enabled():
        return contextlib.nullcontext()  # as in most backwards
    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


AutocastState = dict[str, tuple[bool, torch.dtype]]
"""By kind of device, whether autocast is on, and what it casts to."""


def autocast_state() -> AutocastState:
    """The state of autocast here."""
    return {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
    }


def set_autocast_state(state: AutocastState) -> None:
    """Put autocast into a state, without entering or leaving a region."""
    for kind, (enabled, dtype) in state.items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


@contextlib.contextmanager
def under_autocast(state: AutocastState) -> Iterator[None]:
    """A context in which autocast is in a state."""
    before = autocast_state()
    try:
        set_autocast_state(state)
        yield
    finally:
        set_autocast_state(before)


def autocast_regions() -> list[str]:
    """The autocast regions that are on here, as in ``cuda:bfloat16``."""
    return [f"{kind}:{str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}" for kind in _enabled()]


def casts(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autocast, in its present state, casts arguments of an operator; they are without data."""
    called: list[Any] = []
    with fake.without_modes(), torch.no_grad(), _Called(called):
        operator(*args, **kwargs)
    return torch.ops.aten._to_copy.default in called


class _Called(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self, called: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._called = called

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._called.append(func)
        return func(*args, **(kwargs or {}))
