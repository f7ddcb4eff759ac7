"""Running operators with no mode and no autograd around them."""

import contextlib
from collections.abc import Iterator

import torch

from planner._torch.fake import without_modes


@contextlib.contextmanager
def plain_execution(device_type: str) -> Iterator[None]:
    """Operators called inside run as they are: no modes, no autocast, no autograd."""
    with (
        without_modes(),
        torch._C.DisableTorchFunction(),
        torch.autocast(device_type, enabled=False),
        torch.autocast("cpu", enabled=False),
        torch.no_grad(),
    ):
        yield
