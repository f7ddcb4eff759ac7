"""Captures save and restore the random generator's state without taking memory of the step.

Dynamo and AOTAutograd copy the state into tensors, three of 5,056 bytes at once. Where a part of a forward is
captured while the step is at its peak, these would raise the peak.
"""

import contextlib
import threading
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch._dynamo import convert_frame
from torch._functorch import aot_autograd

from planner._torch.patches import replaced

# Numbers that are drawn to compare states, by one thread at a time.
_LOCK = threading.Lock()
_WORDS = torch.zeros(2, dtype=torch.int64, device="cpu")
_NUMBERS = [torch.zeros(1, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64)]


class _State:
    """The state of the CPU's generator, kept in another generator."""

    def __init__(self) -> None:
        self._generator = torch.default_generator.clone_state()

    def data_ptr(self) -> int:
        """Asked for to find out whether a transform of functions is on."""
        return _WORDS.data_ptr()

    def put_back(self) -> None:
        """Restore the state, if it has changed."""
        now = torch.default_generator.clone_state()
        if _what_follows(now) != _what_follows(self._generator.clone_state()):
            torch.default_generator.set_state(self._generator.get_state())


def _what_follows(generator: torch.Generator) -> tuple[Any, ...]:
    """The next numbers of a generator, drawn into existing tensors; normal ones too: it keeps one of two."""
    with _LOCK, torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        normal = [numbers.normal_(generator=generator).tolist() for numbers in _NUMBERS]
        return generator.initial_seed(), normal, _WORDS.random_(generator=generator).tolist()


class _Random:
    """``torch.random`` for PyTorch's code that restores states."""

    get_rng_state = staticmethod(_State)

    @staticmethod
    def set_rng_state(state: _State) -> None:
        state.put_back()


class _Cuda:
    """``torch.cuda`` for them. A state that has not changed is not set: cuDNN takes that for a new seed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @staticmethod
    def set_rng_state(state: torch.Tensor) -> None:
        if not torch.equal(state, torch.cuda.get_rng_state()):
            torch.cuda.set_rng_state(state)


class _Torch:
    """``torch`` for functions that keep a state of the generator."""

    random, cuda = _Random(), _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def clone(state: Any) -> Any:
        """States are never changed; those of devices are tensors."""
        return state if isinstance(state, _State) else torch.clone(state)


def _keeping(function: Any) -> FunctionType:
    """The same function, which keeps the state elsewhere."""
    names = {**function.__globals__, "torch": _Torch()}
    kept = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    kept.__dict__.update(vars(function))
    return kept


@contextlib.contextmanager
def states_apart() -> Iterator[None]:
    """A wrapper of a function that captures: saved states of the generator take no memory that counts."""
    preserve_rng_state = _keeping(aot_autograd.preserve_rng_state.__wrapped__)  # type: ignore[attr-defined]
    with (
        replaced(convert_frame, {"trace_frame": _keeping(convert_frame.trace_frame)}),
        replaced(aot_autograd, {"preserve_rng_state": contextlib.contextmanager(preserve_rng_state)}),
    ):
        yield
