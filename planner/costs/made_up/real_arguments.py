"""Real arguments of a call that is known without data: tensors with made-up elements, on a device."""

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from planner._torch.fake import concrete_size, whole_storage
from planner._torch.operators import is_foreign
from planner._torch.tensors import as_lazy_as, call_tensors
from planner.costs.host_tensors import read_on_host
from planner.costs.made_up.arguments import make_valid
from planner.costs.made_up.found_elements import give
from planner.training_step.call import Call


class RealArguments:
    """Makes the arguments of one call after the other.

    Args:
        device: Where the tensors are made that have no device of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last_made: list[torch.Tensor] = []

    def let_go(self) -> None:
        """Free the memory of the last call's arguments, which is kept for the next."""
        self._last_made = []

    def of(self, call: Call, *, masks: bool) -> tuple[list[Any], dict[str, Any], list[torch.Tensor]]:
        """The arguments of a call with real tensors in the place of fake ones, and those tensors.

        Args:
            call: The call.
            masks: The value of booleans.

        Raises:
            Exception: The call must not be run, or no such tensors can be made.
        """
        if is_foreign(call.func):  # may have effects, or may not survive made-up inputs
            raise ValueError("not run: operators from outside PyTorch may have effects")
        tensors, whole = call_tensors([call.args, call.kwargs]), whole_storage(call.func, call.args)
        needed = 2 * sum(_storage_length(t) * t.element_size() for t in tensors)
        if whole is not None:
            needed += 2 * whole[0] * call.args[0].element_size()
        if needed > (available := _available_bytes(self._device)):
            raise MemoryError(f"not run: it needs about {needed} bytes and {available} are free")
        # New memory of the system's takes longer to fill than memory that is there: sizes are often the same.
        spare, self._last_made = self._last_made, []
        on_host = read_on_host(call.func, call.args, call.kwargs)
        made = {id(t): torch.zeros(_concrete(t.shape), dtype=t.dtype) for t in on_host}
        # Factorisations and solvers need matrices that are well conditioned.
        matrices = "linalg" in str(call.func) or "cholesky" in str(call.func)

        def real(nest: Any) -> Any:
            if isinstance(nest, torch.Tensor):
                if id(nest) not in made:
                    inside = whole if whole is not None and nest is call.args[0] else None
                    made[id(nest)] = self._tensor(nest, matrices, masks, inside, spare)
                return made[id(nest)]
            if isinstance(nest, (list, tuple)):
                return type(nest)(real(item) for item in nest)
            if isinstance(nest, torch.SymInt):
                return concrete_size(nest)
            if isinstance(nest, torch.device) and nest.type == "meta":
                return self._device
            return nest

        args = [real(argument) for argument in call.args]
        kwargs = {name: real(argument) for name, argument in call.kwargs.items()}
        make_valid(call.func.overloadpacket, args)
        give(call, args, kwargs)
        return args, kwargs, list(made.values())

    def _tensor(
        self,
        like: torch.Tensor,
        matrix: bool,
        masks: bool,
        inside: tuple[int, int] | None,
        spare: list[torch.Tensor],
    ) -> torch.Tensor:
        """A tensor of the same shape, strides and dtype.

        Floats are about 1, which is valid as a variance and a probability too, and integers 0, which is valid
        as an index. On a CPU floats differ: the time to find a maximum depends on it.

        Args:
            like: The tensor.
            matrix: Whether square matrices must be well conditioned.
            masks: The value of booleans.
            inside: The number of elements of its storage, and its offset; None for the smallest storage.
            spare: Memory of tensors that are no longer needed; what is used is taken out.
        """
        if like.layout is not torch.strided:
            raise ValueError(f"not run: an input has layout {like.layout}")
        device = self._device if like.device.type == "meta" else like.device
        floating = like.is_floating_point() or like.is_complex()
        length, start = inside or (_storage_length(like), 0)
        ones = masks if like.dtype is torch.bool else floating
        if like.is_floating_point() and device.type == "cpu" and not matrix:
            fits = (n for n, old in enumerate(spare) if old.dtype is like.dtype and len(old) == length)
            place = next(fits, None)
            flat = torch.empty(length, dtype=like.dtype, device=device) if place is None else spare.pop(place)
            _fill(flat)
            self._last_made.append(flat)
        else:
            flat = torch.full((length,), int(ones), dtype=like.dtype, device=device)
        made = flat.as_strided(_concrete(like.shape), _concrete(like.stride()), start)
        if matrix and floating and made.dim() >= 2 and made.shape[-1] == made.shape[-2]:
            made.diagonal(dim1=-2, dim2=-1).fill_(made.shape[-1] + 1.0)
        return as_lazy_as(like, made)


def _storage_length(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last in memory."""
    sizes = _concrete(tensor.shape)
    if tensor.layout is not torch.strided or 0 in sizes:
        return 0
    strides = _concrete(tensor.stride())
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _fill(flat: torch.Tensor) -> None:
    """Write floats between a half and 1, the same ones each time."""
    values = _values(flat.dtype)
    whole = len(flat) // len(values) * len(values)
    flat[:whole].view(-1, len(values)).copy_(values)
    flat[whole:].copy_(values[: len(flat) - whole])


@functools.cache
def _values(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    floats = torch.rand(1 << 16, generator=generator, dtype=torch.float32, device="cpu")
    return floats.add_(1.0).div_(2.0).to(dtype)


def _concrete(sizes: Iterable[int]) -> list[int]:
    return [concrete_size(size) for size in sizes]


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
