"""Which Python code is PyTorch's own, by the file that it is in: names can be a wrapper's copies."""

from pathlib import Path
from types import CodeType

import torch

_FOLDER = Path(torch.__file__).parent.as_posix() + "/"


def is_of_pytorch(code: CodeType) -> bool:
    """Whether code is in a file of PyTorch's."""
    return code.co_filename.startswith(_FOLDER)
