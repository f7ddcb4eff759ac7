"""Ctrl-C while PyTorch calls Python back.

While a step is captured, PyTorch's C++ code calls Python for every operation. A KeyboardInterrupt that is
raised there may end in a C++ function that cannot pass it on, which aborts the process, or in a callback of a
weak reference, where it is lost. So it is raised between the stages of the work instead.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

AT_ONCE = "at_once"
"""A handler with this attribute is called at once: it ends the process and raises nothing."""

FILES = threading.RLock()
"""Held while a file is written; whoever ends the process at once waits for it."""

_IMPATIENT = 3
"""From this Ctrl-C on it is raised at once, wherever that is: the work may never come to its next stage."""


class _Held:
    """Interrupts that wait, and whose turn it is to handle them."""

    def __init__(self, handler: Handler) -> None:
        self.handler, self.count = handler, 0

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.count >= _IMPATIENT:
            self.release()

    def release(self) -> None:
        if self.count:
            self.count = 0
            self.handler(signal.SIGINT, None)


@contextlib.contextmanager
def held_interrupts() -> Iterator[None]:
    """A context in which Ctrl-C waits for the next `raise_interrupt`, or for the end of the context.

    Nothing changes outside the main thread, where signals are not handled, and for programs that ignore
    Ctrl-C or leave it to the system.
    """
    handler = signal.getsignal(signal.SIGINT)
    if (
        threading.current_thread() is not threading.main_thread()
        or not callable(handler)
        or isinstance(handler, _Held)
        or hasattr(handler, AT_ONCE)
    ):
        yield
        return
    held = _Held(handler)
    signal.signal(signal.SIGINT, held)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is held:
            signal.signal(signal.SIGINT, handler)
        held.release()


def raise_interrupt() -> None:
    """Raise a KeyboardInterrupt that waits, if one does: a place where it does no harm."""
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
        if isinstance(handler, _Held):
            handler.release()


def at_stages(progress: Callable[[str, float], None] | None) -> Callable[[str, float], None]:
    """A progress report that also raises a waiting KeyboardInterrupt: between stages that does no harm."""

    def report(text: str, fraction: float) -> None:
        raise_interrupt()
        if progress is not None:
            progress(text, fraction)

    return report
