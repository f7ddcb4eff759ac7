"""Tell PyTorch's and this library's Python code by its file, since wrappers can copy names; and mark this
library's functions that replace PyTorch's for a while."""

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
    """Mark a function that replaces another for a while, as while a step is recorded.

    A model that another thread trains meanwhile then takes nothing for changed.
    """
    setattr(function, _STANDS_FOR, meant(original))
    return function


def meant(function: Any) -> Any:
    """The function that another stands in for; the function itself if it stands in for none."""
    return vars(function).get(_STANDS_FOR, function) if isinstance(function, FunctionType) else function
