"""Private PyTorch APIs: the version of a tensor, which counts how often it was written to in place.

Tested with torch 2.13.
"""

import torch


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written to in place; None where PyTorch does not count."""
    return None if tensor.is_inference() else tensor._version


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Let a tensor, and all that share its memory, count from there."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
