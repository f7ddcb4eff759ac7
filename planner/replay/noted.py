"""What a followed forward notes to run its calls again: arguments, generator states, settings."""

from collections.abc import Sequence
from typing import Any

import torch

from planner._torch.tensors import alias_inside, is_wrapper, lazily, storage_number
from planner.errors import InputsChanged

Geometry = tuple[torch.Size, tuple[int, ...], int, torch.dtype, bool, bool]


def changed_error(tensor: torch.Tensor) -> InputsChanged:
    """The error for a tensor that a re-run reads and that was changed since the forward."""
    return InputsChanged(
        f"a tensor of shape {tuple(tensor.shape)} that the plan reads again in the backward was changed in "
        "place after the forward read it: change a copy, or after the backward"
    )


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Sizes, strides, offset and type of a tensor; whether it is read conjugated, and whether negated."""
    lies = tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype
    return *lies, tensor.is_conj(), tensor.is_neg()


class InSlot:
    """A noted argument that lies in a slot."""

    __slots__ = ("geometry", "slot")

    def __init__(self, slot: int, tensor: torch.Tensor) -> None:
        self.slot = slot
        self.geometry = geometry_of(tensor)


class Held:
    """A noted argument that is held itself, as a parameter is, and the version that it had."""

    __slots__ = ("memory", "owner", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.memory = storage_number(tensor.untyped_storage())
        self.version = 0 if tensor.is_inference() else tensor._version
        # Held without history. Inside of a dispatch mode ``detach()`` makes an alias with its own version
        # counter: so for a view of a leaf the leaf's counter is asked.
        self.owner = self.tensor = tensor
        if tensor.grad_fn is not None:
            if (base := tensor._base) is not None and base.grad_fn is None:
                self.owner, self.tensor = base, tensor.detach()
            else:
                self.owner = self.tensor = alias_inside(tensor)
        elif not is_wrapper(type(tensor)):
            self.tensor = alias_inside(tensor)  # keeps its memory: the user may write ``p.data = q``

    def read(self) -> torch.Tensor:
        """The tensor, if it is as it was in the forward, and has memory."""
        written = not self.owner.is_inference() and self.owner._version != self.version
        if written or storage_number(self.tensor.untyped_storage()) != self.memory:
            raise changed_error(self.tensor)
        if self.tensor.numel() and not self.tensor.untyped_storage().nbytes():
            raise InputsChanged(
                f"a tensor of shape {tuple(self.tensor.shape)} that the plan reads again in the backward has "
                "no memory by then, as a parameter that fully_shard has not gathered: shard as planned, or "
                "plan with the regions= that are sharded"
            )
        return self.tensor


class Recipe:
    """A noted call: operator, arguments, generator state and PyTorch's settings, so that it can run again."""

    __slots__ = ("args", "func", "kwargs", "settings", "state")

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Any, state: Any, settings: Any) -> None:
        self.func, self.args, self.kwargs, self.state, self.settings = func, args, kwargs, state, settings


def view_of(base: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The tensor of such a geometry in the storage of another."""
    size, stride, offset, dtype, conjugated, negated = geometry
    if base.dtype is dtype:
        view = base.as_strided(size, stride, offset)
    else:
        made = torch.empty(0, dtype=dtype, device=base.device)
        view = made.set_(base.untyped_storage(), offset, size, stride)
    return lazily(view, conjugated=conjugated, negated=negated)


def arguments_of(recipe: Recipe, kind: type) -> list[Any]:
    """The arguments of a recipe that are of one kind, in lists too."""
    found: list[Any] = []
    pending = [*recipe.args, *(recipe.kwargs or {}).values()]
    while pending:
        argument = pending.pop()
        if type(argument) is kind:
            found.append(argument)
        elif type(argument) is list:
            pending += argument
    return found
