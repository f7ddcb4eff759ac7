"""Which Python code is PyTorch's own, or this library's, by the file that it is in: names can be a wrapper's
copies."""

from pathlib import Path
from types import CodeType

import torch

_FOLDER = Path(torch.__file__).parent.as_posix() + "/"
_OURS = Path(__file__).parents[1].as_posix() + "/"


def is_of_pytorch(code: CodeType) -> bool:
    """Whether code is in a file of PyTorch's."""
    return code.co_filename.startswith(_FOLDER)


def is_of_this_package(code: CodeType) -> bool:
    """Whether code is in a file of this library's."""
    return code.co_filename.startswith(_OURS)
