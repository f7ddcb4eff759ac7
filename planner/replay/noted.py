"""What a followed step notes of its forward, to run calls of it again: arguments, states, masks as bits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch

from planner._torch.execution import noise_operators
from planner._torch.tensors import storage_number
from planner.errors import InputsChanged
from planner.graph.replay.rng import generator_state
from planner.replay.calls import operands_of

Geometry = tuple[torch.Size, tuple[int, ...], int, torch.dtype]


def changed(tensor: torch.Tensor) -> InputsChanged:
    """The error where what a plan reads again was changed since the forward."""
    return InputsChanged(
        f"a tensor of shape {tuple(tensor.shape)} that the plan reads again in the backward was changed in "
        "place after the forward read it: change a copy, or after the backward"
    )


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """How a tensor lies in its storage."""
    return tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype


class Look:
    """How a tensor lies in a slot."""

    __slots__ = ("geometry", "slot")

    def __init__(self, slot: int, tensor: torch.Tensor) -> None:
        self.slot = slot
        self.geometry = geometry_of(tensor)


class Held:
    """A tensor that a call reads and that is there throughout, at the version that it had."""

    __slots__ = ("memory", "owner", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.memory = storage_number(tensor.untyped_storage())
        self.version = 0 if tensor.is_inference() else tensor._version
        # Inside of a dispatch mode an alias counts its writes by itself, but for one of a leaf.
        self.owner = self.tensor = tensor
        if tensor.grad_fn is not None:
            base = tensor._base
            if base is not None and base.grad_fn is None:
                self.owner, self.tensor = base, tensor.detach()
            else:
                self.owner = self.tensor = alias(tensor)

    def there(self) -> torch.Tensor:
        written = not self.owner.is_inference() and self.owner._version != self.version
        if written or storage_number(self.tensor.untyped_storage()) != self.memory:
            raise changed(self.tensor)
        if self.tensor.numel() and not self.tensor.untyped_storage().nbytes():
            raise InputsChanged(
                f"a tensor of shape {tuple(self.tensor.shape)} that the plan reads again in the backward has "
                "no memory by then, as a parameter that fully_shard has not gathered: shard as planned, or "
                "plan with the regions= that are sharded"
            )
        return self.tensor


class Recipe:
    """A call with its arguments, the state of generators, and how PyTorch was set: it can run again."""

    __slots__ = ("args", "func", "kwargs", "settings", "state")

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Any, state: Any, settings: Any) -> None:
        self.func, self.args, self.kwargs, self.state, self.settings = func, args, kwargs, state, settings


class Mask:
    """A mask that is kept as bits, and what its elements are that are not zero."""

    __slots__ = ("count", "dtype", "kept")

    def __init__(self, mask: torch.Tensor, kept: float) -> None:
        self.count, self.dtype, self.kept = mask.numel(), mask.dtype, kept

    def unpacked(self, bits: torch.Tensor) -> torch.Tensor:
        return noise_operators.unpack(bits, self.count, self.dtype, self.kept)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without history, with the same count of writes; inside of a dispatch mode."""
    with enable_reentrant_dispatch(), torch.no_grad():
        return tensor.detach()


def look_at(base: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    size, stride, offset, dtype = geometry
    if base.dtype is dtype:
        return base.as_strided(size, stride, offset)
    made = torch.empty(0, dtype=dtype, device=base.device)
    return made.set_(base.untyped_storage(), offset, size, stride)


def among(recipe: Recipe, kind: type) -> list[Any]:
    """The noted arguments of a kind."""
    found: list[Any] = []
    pending = [*recipe.args, *(recipe.kwargs or {}).values()]
    while pending:
        one = pending.pop()
        if type(one) is kind:
            found.append(one)
        elif type(one) is list:
            pending += one
    return found


def state_of_generators(args: Any, kwargs: Any) -> tuple[torch.Tensor, str, int | None]:
    """The state of the generators that an operator draws from, and whose they are."""
    tensor = next(operands_of(args, kwargs), None)
    device = torch.device("cpu") if tensor is None else tensor.device
    return generator_state(device.type, device.index), device.type, device.index


class Plain:
    """A context in which operators run as below autograd in the forward: nothing is saved or cast."""

    def __enter__(self) -> None:
        self._grad = torch.no_grad()
        self._grad.__enter__()
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        self._autocast = [torch.autocast(kind, enabled=False) for kind in kinds]
        for region in self._autocast:
            region.__enter__()

    def __exit__(self, *error: Any) -> None:
        for region in reversed(self._autocast):
            region.__exit__(*error)
        self._grad.__exit__(*error)
