"""The version of a tensor, which counts how often it was written to in place."""

import weakref
from collections.abc import Callable, Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor

from planner._torch import compat


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written to in place; None where PyTorch does not count."""
    return None if tensor.is_inference() else tensor._version


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version of a tensor, and of all that share its memory."""
    if compat.version() < (2, 7):
        torch._C._autograd._unsafe_set_version_counter(tensor, version)  # type: ignore[arg-type]
    else:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def check_version(tensor: torch.Tensor, version: int) -> None:
    """Raise autograd's error if a saved tensor was written to since; it checks saves without hooks alone."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version "
            f"{version} instead"
        )


class Watched:
    """The present versions of tensors, to be compared with later ones. Their memory is not held.

    Args:
        tensors: The tensors, by keys of the caller. Those without a count of writes are left out.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._seen = [
            (key, counter_of(tensor), version)
            for key, tensor in tensors.items()
            if (version := version_of(tensor)) is not None
        ]

    def written(self) -> list[int]:
        """The keys of those that were written to in place since, and are still there."""
        return [
            key
            for key, counter, version in self._seen
            if (tensor := counter()) is not None and version_of(tensor) != version
        ]


def counter_of(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """A function that returns a tensor of the same version, while there is one; it holds no memory."""
    if isinstance(tensor, torch.nn.Parameter):
        return weakref.ref(tensor)  # its module holds it
    if type(tensor) not in (torch.Tensor, FakeTensor) or tensor.layout != torch.strided:
        return weakref.ref(tensor)
    counter = tensor.detach()
    counter.data = counter.new_empty(0)
    return lambda: counter
