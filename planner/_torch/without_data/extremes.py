"""The gradients of the largest, the least and the middle one of all elements (``max()``, ``median()``).

PyTorch fills what it shares out among equal elements into zeros. For tensors without data, and under dispatch
modes, it multiplies, which takes less memory. Here its operators run, since C++ code calls them, and those of
the other form are recorded.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten

EXTREMES = frozenset({"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"})
"""The nodes that do so."""


class GradientsOfExtremes:
    """Follows these backwards on tensors without data; :meth:`instead` is called for each operator."""

    def __init__(self, record: Callable[..., torch.Tensor], pause: Callable[[], Any]) -> None:
        """
        Args:
            record: Runs an operator with its arguments, and records it.
            pause: A context in which nothing is recorded.
        """
        self._record, self._pause, self._recording = record, pause, False
        self._compared: tuple[Any, Any] | None = None
        self._shared: Any = None

    def instead(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any] | None:
        """The result that an operator of one of :data:`EXTREMES` returns; None if it is recorded as usual."""
        if self._recording or torch.is_grad_enabled():
            return None
        if func is aten.eq.Tensor:
            self._compared = args[0], args[1]
        if func is aten.div.Tensor:
            self._shared = args[0]
        if func is not aten.mul.Tensor or self._compared is None:
            with self._pause():
                return (func(*args, **kwargs),)
        self._recording = True
        try:
            return (self._filled(*self._compared, self._shared),)
        finally:
            self._recording, self._compared, self._shared = False, None, None

    def _filled(self, elements: torch.Tensor, extreme: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        record = self._record
        unknown = record(aten.isnan.default, extreme)
        chosen = record(aten.eq.Tensor, elements, extreme)
        del unknown
        filled = record(aten.new_zeros.default, gradient, list(elements.shape))
        share = record(aten.div.Tensor, gradient, record(aten.sum.default, chosen))
        return record(aten.masked_fill_.Tensor, filled, chosen, share)
