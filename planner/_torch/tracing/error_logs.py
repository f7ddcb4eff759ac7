"""Do not print errors of tracing that are handled, or that an error of ours reports."""

import contextlib
import logging
import threading
from collections.abc import Iterator

from torch import _guards
from torch._subclasses import fake_tensor

_LOGS = (_guards.log, fake_tensor.log)
"""Loggers of errors of guards and shape functions, which PyTorch logs with their stack, and raises too."""


@contextlib.contextmanager
def not_logged_as_well() -> Iterator[None]:
    """A context in which they log nothing in this thread, unless ``TORCH_LOGS`` asks for it."""
    thread = threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno != logging.ERROR

    quiet = [log for log in _LOGS if not log.isEnabledFor(logging.INFO)]
    for log in quiet:
        log.addFilter(of_others)
    try:
        yield
    finally:
        for log in quiet:
            log.removeFilter(of_others)
