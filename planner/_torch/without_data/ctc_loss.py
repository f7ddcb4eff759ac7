"""A CTC loss on tensors without data that reads the lengths as numbers, as PyTorch does with data.

With data PyTorch keeps no tensor of lengths for the backward. On tensors without data, and under dispatch
modes, it calls another operator, which keeps them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from planner._torch.own_code import stand_in
from planner._torch.patches import replaced
from planner._torch.without_data.fake_values import known_integers

LENGTHS_AS_TENSORS = torch.ops.aten._ctc_loss.Tensor

_ctc_loss: Any = torch.ctc_loss


@contextlib.contextmanager
def lengths_are_read(read: bool) -> Iterator[None]:
    """A context in which ``torch.ctc_loss`` reads lengths whose values are known, if ``read``."""
    if not read:
        yield
        return
    with replaced(torch, {"ctc_loss": _reading_lengths}):
        yield


def lengths_are_tensors() -> Any:
    """A context in which they are not read, as under dispatch modes."""
    return replaced(torch, {"ctc_loss": _ctc_loss})


def _reading_lengths(*args: Any, **named: Any) -> Any:
    lengths = [length for length in args[2:4] if isinstance(length, torch.Tensor)]
    if len(lengths) == 2:
        converted = [length.to(torch.long) for length in lengths]
        read = [known_integers(length) for length in converted]
        if None not in read:
            return _ctc_loss(*args[:2], *read, *args[4:], **named)
    return _ctc_loss(*args, **named)


stand_in(_reading_lengths, _ctc_loss)
