"""The command line as a process: its streams, Ctrl-C, where it imports from, and its end.

Loads nothing but the standard library: it is at work while all else is imported.
"""

import atexit
import codecs
import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TextIO

from planner.interrupts import AT_ONCE, FILES

WRONG_INPUT, INTERRUPTED = 2, 130

_PLAIN = {
    **dict.fromkeys("▁▂▃", "_"),
    **dict.fromkeys("▄▅▆", "="),
    **dict.fromkeys("▇█", "#"),
    **dict.fromkeys("·•", "."),
    **dict.fromkeys("─━–—", "-"),  # noqa: RUF001
    **dict.fromkeys("┤│", "|"),
    **dict.fromkeys("└┴", "+"),
    "…": "~",
    "×": "x",  # noqa: RUF001
}


def run(command: Callable[[], object]) -> None:
    """Run a command line and end the process with its exit code."""
    prepare_streams()
    leave_on_interrupt()
    leave_out_working_directory()
    code: object = 0
    try:
        command()
    except SystemExit as exit_:
        code = exit_.code
    end(code if isinstance(code, int) else 0 if code is None else 1)


# ---- streams -------------------------------------------------------------------------------------------


class Stream(io.TextIOWrapper):
    """Text to a file descriptor. Once nobody reads it any more, what is written goes nowhere."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            self._give_up()

    def _give_up(self) -> None:
        # Also for what C code writes there, and what is buffered and written at the end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def prepare_streams() -> None:
    """Make stdout and stderr take whatever is written, be they closed, ASCII, or pipes that nobody reads."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # the next file that is opened would be taken for the stream
            os.open(os.devnull, os.O_RDWR)
    codecs.register_error("plain", plain)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = _stream(1, sys.stdout), _stream(2, sys.stderr)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc,assignment]


def _stream(descriptor: int, before: TextIO | None) -> TextIO:
    encoding = before.encoding if before is not None else "utf-8"
    if before is not None:
        before.flush()
    file = open(descriptor, "wb", closefd=False)  # noqa: SIM115
    # stderr as Python has it: by lines.
    lines = descriptor == 2 or os.isatty(descriptor)
    return Stream(file, encoding=encoding, errors="plain", line_buffering=lines)


def plain(error: UnicodeError) -> tuple[str, int]:
    """A codec's error handler: the text for characters that the encoding of a stream does not have."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(c, "?") for c in error.object[error.start : error.end]), error.end


# ---- Ctrl-C --------------------------------------------------------------------------------------------


def leave_on_interrupt() -> None:
    """From now on Ctrl-C ends the process: exit code 130, one line, whatever it is at.

    Unwinding would go through PyTorch's C++ code, part of which cannot pass an exception on and aborts. A
    thread hears of the signal, so that it works inside long calls of C code too.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # started with Ctrl-C ignored, in the background of a shell
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait() -> None:
        while os.read(reader, 1) != bytes([signal.SIGINT]):
            pass
        interrupted()

    threading.Thread(target=wait, name="interrupted", daemon=True).start()
    signal.signal(signal.SIGINT, _interrupted)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)


def _interrupted(_number: int, _frame: FrameType | None) -> None:
    # The user's code may have taken the descriptor away, as asyncio does. In a thread, as the main one may
    # hold the lock.
    threading.Thread(target=interrupted, daemon=True).start()


setattr(_interrupted, AT_ONCE, True)


def interrupted() -> None:
    """End the process as one that was interrupted."""
    with FILES:
        # A progress bar has hidden the cursor, and stands in the line.
        bar = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""
        with contextlib.suppress(OSError):
            os.write(2, f"{bar}interrupted\n".encode())
        os._exit(INTERRUPTED)


# ---- imports -------------------------------------------------------------------------------------------


def leave_out_working_directory() -> None:
    """Take away the working directory that `python -m` puts first on the path: a folder or file of the user's
    may have the name of a package that is needed here. It comes back when the user's code is imported."""
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if sys.path and not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()) and os.getcwd() != home:
        del sys.path[0]


# ---- the end -------------------------------------------------------------------------------------------


def end(code: int) -> None:
    """End the process, without taking PyTorch and the model apart, which takes seconds."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            code = code or WRONG_INPUT
            with contextlib.suppress(OSError):
                os.write(2, f"error: the result cannot be written: {error.strerror}\n".encode())
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code says at its end is no result
        threading._shutdown()  # type: ignore[attr-defined]  # waits, and tells idle workers of pools to end
        atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
