"""The line of the user's code at which an error arose, or that an operation comes from."""

import functools
import re
import traceback
from pathlib import Path

import torch

import solvers

_OURS = Path(__file__).parent.parent
_NOT_THE_USERS = (f"{_OURS}/", *(f"{Path(p.__file__ or '').parent}/" for p in (torch, solvers)))
_IN_TEXT = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)\n\s*(?P<code>\S[^\n]*)?')


def line_of(error: BaseException) -> str | None:
    """The line where an error arose, as in ``net.py:12 (y = self.linear(x))``; None where none is known.

    It is the innermost line that is neither PyTorch's nor this library's. Tracebacks of Dynamo's errors do
    not go through the user's code; their texts quote it.
    """
    place = None
    for frame in traceback.extract_tb(error.__traceback__):
        if is_users_file(frame.filename):
            place = (frame.filename, str(frame.lineno), frame.line or frame.name)
    quoted = str(error).partition("from user code")[2]
    for match in _IN_TEXT.finditer(quoted):
        if is_users_file(match["file"]):
            place = (match["file"], match["line"], match["code"] or match["name"])
    if place is None:
        return None
    file, number, code = place
    return f"{file}:{number} ({code.strip()})"


@functools.lru_cache(maxsize=4096)  # the operations of all layers that share code have the same stacks
def users_line(stack: str | None) -> str | None:
    """The innermost line of a stack, as text, that is neither PyTorch's nor ours, as in ``net.py:12``.

    A stack may have PyTorch's lines only, as that of a layer of `torch.nn` that is planned by itself: then it
    is the innermost of these. None where all lines are ours.
    """
    lines = [(match["file"], match["line"]) for match in _IN_TEXT.finditer(stack or "")]
    lines = [line for line in lines if not line[0].startswith(f"{_OURS}/")]
    users = [line for line in lines if is_users_file(line[0])]
    return ":".join((users or lines)[-1]) if lines else None


@functools.cache
def is_users_file(file: str) -> bool:
    """Whether a file of Python code is neither PyTorch's nor ours."""
    return not file.startswith((*_NOT_THE_USERS, "<")) and Path(file).suffix == ".py"


def short_line(line: str | None) -> str | None:
    """The line by its file as it is imported, as in models/net.py:12: the same on other machines."""
    if line is None:
        return None
    file, _, number = line.rpartition(":")
    return f"{_imported(file)}:{number}"


@functools.lru_cache(maxsize=4096)
def _imported(file: str) -> str:
    path = Path(file)
    folder = path.parent
    while (folder / "__init__.py").exists() and folder != folder.parent:
        folder = folder.parent
    return path.relative_to(folder).as_posix()
