"""Errors of tracing that are handled, or told by one of ours, are not printed as well."""

import contextlib
import logging
import threading
from collections.abc import Iterator

from torch import _guards
from torch._subclasses import fake_tensor

_LOGS = (_guards.log, fake_tensor.log)
"""These log an error, with all that PyTorch called, and raise it: one of a guard, or of a shape function."""


@contextlib.contextmanager
def not_logged_as_well() -> Iterator[None]:
    """Within this, in this thread, they only raise it, unless ``TORCH_LOGS`` asks for what they log."""
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
