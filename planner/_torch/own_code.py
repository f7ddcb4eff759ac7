"""Which Python code is PyTorch's own, or this library's, by the file that it is in: names can be a wrapper's
copies; and which of this library's functions are in place of PyTorch's for a while."""

from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

_FOLDER = Path(torch.__file__).parent.as_posix() + "/"
_OURS = Path(__file__).parents[1].as_posix() + "/"
_STANDS_FOR = "_planner_stands_for"


def is_of_pytorch(code: CodeType) -> bool:
    """Whether code is in a file of PyTorch's."""
    return code.co_filename.startswith(_FOLDER)


def is_of_this_package(code: CodeType) -> bool:
    """Whether code is in a file of this library's."""
    return code.co_filename.startswith(_OURS)


def stand_in(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that is put in place of another for a while, as while a step is recorded.

    For a model that another thread trains meanwhile nothing has changed then.
    """
    setattr(function, _STANDS_FOR, meant(original))
    return function


def meant(function: Any) -> Any:
    """The function that one stands for; itself if it stands for none."""
    return vars(function).get(_STANDS_FOR, function) if isinstance(function, FunctionType) else function
