"""Files for people and programs: JSON that can be read, written whole or not at all."""

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from typing import BinaryIO

from planner.errors import PlanFileError
from planner.interrupts import FILES


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file, whole or not at all; as `replace_atomically`.

    Raises:
        PlanFileError: the file cannot be written.
    """
    content = text.encode()
    replace_atomically(path, lambda file: file.write(content))


def replace_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Write a file, whole or not at all: other readers see the old content or the new.

    The content is written to a new file in the same directory, flushed to disk, and renamed to the path. A
    failure on the way leaves what was there before, and no other file.

    Args:
        path: the file.
        write: writes the content to the open file that it is given.

    Raises:
        PlanFileError: the file cannot be written.
    """
    check_writable(path)
    shown = os.fspath(path)
    # A link keeps pointing to the file that it points to.
    target = os.path.realpath(shown)
    directory, name = os.path.split(target)
    temporary = os.path.join(directory, f".{name[:56]}.{secrets.token_hex(6)}.tmp")  # < 255 bytes
    try:
        try:
            with FILES:
                with open(temporary, "xb") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise PlanFileError(f"{shown}: cannot be written: {reason(error)}") from error


def check_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder, and check before long work that files can be written into it.

    Raises:
        PlanFileError: it cannot be made, or takes no new file.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise PlanFileError(f"{os.fspath(path)}: cannot be made: {reason(error)}") from error
    check_writable(os.path.join(path, "plan.json"))


def check_writable(path: str | os.PathLike[str]) -> None:
    """Find out before long work whether a file could be written after it.

    Raises:
        PlanFileError: its directory does not exist or takes no new file, or the name is taken by something
            that is not a file.
    """
    shown = os.fspath(path)
    if not shown:
        raise PlanFileError("the name of the file to write is empty")
    try:
        if _is_link_of_others(shown):
            raise PlanFileError(
                f"{shown}: cannot be written: it is a link that another user made, in a folder that is "
                "open to all; write to another place"
            )
        target = os.path.realpath(shown)
        directory = os.path.dirname(target)
        if os.path.lexists(target) and not stat.S_ISREG(os.stat(target).st_mode):
            # Replacing would put a file in the place of a device such as /dev/null.
            raise PlanFileError(f"{shown}: cannot be written: it is there and is not a file")
        if not os.path.isdir(directory):
            raise PlanFileError(f"{shown}: cannot be written: there is no directory {directory}")
        # Permission bits do not tell of read-only file systems; making a file does.
        probe = os.path.join(directory, f".{secrets.token_hex(8)}.tmp")
        with FILES:
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            os.unlink(probe)
    except PlanFileError:
        raise
    except (OSError, ValueError) as error:
        raise PlanFileError(f"{shown}: cannot be written: {reason(error)}") from error


def _is_link_of_others(path: str) -> bool:
    """Whether a path is a link that Linux would not follow (``protected_symlinks``)."""
    if not os.path.islink(path) or not hasattr(os, "geteuid"):
        return False
    folder = os.stat(os.path.dirname(path) or ".")
    open_to_all = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
    return bool(open_to_all) and os.lstat(path).st_uid not in (os.geteuid(), folder.st_uid)


def reason(error: Exception) -> str:
    """Say why a file operation failed, without the path, which the caller names."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
