"""The regions of autocast that code runs in, and going back to them."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Backward passes run outside of autocast, as PyTorch asks of its users.

    A user's backward runs after the region has been left, which frees the casts of weights that it
    keeps; here the caller's region goes on, so they are freed explicitly.
    """
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                torch.clear_autocast_cache()
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


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
    return [
        f"{kind}:{str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}"
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
