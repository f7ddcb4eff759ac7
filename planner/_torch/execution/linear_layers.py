"""The sum of a linear layer's bias, which PyTorch makes in place on plain tensors only."""

import sys
from types import FrameType
from typing import Any

import torch
import torch._dynamo.eval_frame

from planner._torch import fake
from planner._torch.autograd import DISPATCH

aten = torch.ops.aten


class Product:
    """The product of a linear layer whose input has three dimensions or more and is not contiguous.

    PyTorch adds the bias to it in place, but not for tensor subclasses, nor under dispatch modes. One of
    these is to tell this of each operator that it runs.
    """

    def __init__(self) -> None:
        self._made: tuple[Any, int, tuple[int, int] | None] | None = None

    def note(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Note an operation that has run."""
        before, self._made = self._made, None
        if func is aten.mm.default and out.layout is torch.strided:
            self._made = func, fake.storage_key(out), None
        elif func is aten._unsafe_view.default and before is not None:
            product, key, _ = before
            if product is aten.mm.default and key == fake.storage_key(args[0]):
                self._made = func, key, _call_site()

    def is_followed_by_its_bias(self, args: tuple[Any, ...]) -> bool:
        """Whether an addition is that of the bias: the call that made the product makes it."""
        if self._made is None or self._made[2] is None or len(args) != 2:
            return False
        product, bias = args
        if not isinstance(bias, torch.Tensor) or bias.dim() != 1 or bias.dtype != product.dtype:
            return False
        return self._made[1:] == (fake.storage_key(product), _call_site())


_PLUMBING = frozenset({torch._dynamo.eval_frame.__file__, torch._compile.__file__})
"""Files of wrappers around what a dispatch mode does."""


def _call_site() -> tuple[int, int] | None:
    """The Python frame, and the place in its code, that called the operator that a dispatch mode is handed:
    the same for all operators that one call into C++ runs. To be called by the mode."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != DISPATCH:
        frame = frame.f_back
    while frame is not None and (frame.f_code.co_name == DISPATCH or frame.f_code.co_filename in _PLUMBING):
        frame = frame.f_back
    return None if frame is None else (id(frame), frame.f_lasti)
