"""The numbers that ``bernoulli_`` draws on the CPU, in less time.

For each element it draws 64 bits from the Mersenne Twister, makes a double from 0 to 1 of the lower 53, and
compares that with the probability (ATen's ``DistributionsHelper.h``, ``TransformationHelper.h``). Here the 53
bits are compared as an integer: the same answers without a conversion.

Some builds of PyTorch draw with MKL's generator instead (pytorch/pytorch#132395). So each process tries once
whether the numbers are the same, with generators of its own; if not, ``bernoulli_`` is called.
"""

import functools
import math
from typing import Any

import numpy as np
import torch

from planner._torch import fake

_BITS = 53
"""Bits of a double's significand, which the comparison is made with."""
_CHUNKS = 1 << 14, 1 << 16
"""The fewest and the most elements that are drawn at once: their 64-bit numbers stay in a core's cache."""
_WORTH_IT = 8 * _CHUNKS[0]
"""Fewer elements are left to PyTorch. From here on the scratch, 8 bytes an element of a chunk, takes no more
bytes than the mask, 1 byte an element."""
_BERNOULLI = torch.ops.aten.bernoulli_.float


def draw(mask: torch.Tensor, probability: float) -> torch.Tensor:
    """Fill a boolean mask as ``mask.bernoulli_(probability)`` does, and leave the generator as that does.

    Args:
        mask: A boolean tensor, of any shape and device.
        probability: The probability that an element is true, from 0 to 1.
    """
    plain = type(mask) is not torch.Tensor or mask.device.type != "cpu" or not mask.is_contiguous()
    if plain or mask.numel() < _WORTH_IT or not are_bernoullis():
        return mask.bernoulli_(probability)
    _draw(mask.view(-1), probability, None)
    return mask


def bernoulli_(noise: torch.Tensor, probability: float = 0.5, **generator: Any) -> torch.Tensor:
    """Fill a tensor of floats as ``noise.bernoulli_(probability)`` does; called below autograd, by a mode.

    It allocates nothing: numbers are drawn into the end of the noise, which is not written yet.

    Args:
        noise: A tensor of any shape, type and device.
        probability: The probability that an element is one, and not zero, from 0 to 1.
        generator: ``generator=``, to be passed on; without it PyTorch's default generator draws.
    """
    plain = generator or not _is_large(noise) or not 0 <= probability <= 1
    if plain or torch._C._len_torch_dispatch_stack() or not are_bernoullis():
        drawn: torch.Tensor = _BERNOULLI(noise, probability, **generator)
        return drawn
    flat, count, size = noise.view(-1), noise.numel(), noise.element_size()
    done, chunk = 0, _CHUNKS[1]
    while chunk >= _CHUNKS[0] // 2:
        # The scratch: for each element of the chunk an int64, aligned to 8 bytes, then for each a boolean.
        begin = (count - 9 * chunk // size) // 8 * 8
        if begin < done + chunk:
            chunk //= 2
            continue
        scratch = flat[begin:].view(torch.uint8)
        booleans = scratch[8 * chunk : 9 * chunk]
        _draw_chunk(scratch[: 8 * chunk].view(torch.int64), probability, None, booleans.view(torch.bool))
        flat[done : done + chunk].copy_(booleans)
        done += chunk
    _BERNOULLI(flat[done:], probability)  # the rest, in which no scratch finds room
    return noise


def _is_large(noise: torch.Tensor) -> bool:
    return (
        noise.numel() >= _WORTH_IT
        and type(noise) is torch.Tensor
        and noise.is_cpu
        and noise.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        and noise.is_contiguous()
        and noise.storage_offset() % 8 == 0
    )


def _draw(flat: torch.Tensor, probability: float, generator: torch.Generator | None) -> None:
    least, most = _CHUNKS
    chunk = max(least, min(most, len(flat) // 8))
    scratch = torch.empty(min(len(flat), chunk), dtype=torch.int64, device=flat.device)
    for part in flat.split(chunk):
        _draw_chunk(scratch[: len(part)], probability, generator, part)


def _draw_chunk(
    numbers: torch.Tensor, probability: float, generator: torch.Generator | None, out: torch.Tensor
) -> None:
    below = math.ceil(probability * (1 << _BITS))  # exact: a double times a power of two
    numbers.random_(generator=generator).bitwise_and_(_number((1 << _BITS) - 1))
    torch.lt(numbers, _number(below), out=out)


@functools.lru_cache(maxsize=1024)
def _number(value: int) -> torch.Tensor:
    """An integer as a tensor in NumPy's memory: of a Python number PyTorch would allocate one each call."""
    with fake.without_modes():
        return torch.from_numpy(np.array(value))


@functools.cache
def are_bernoullis() -> bool:
    """Whether this build of PyTorch draws as the module's docstring says."""
    with fake.without_modes():
        for seed, probability in enumerate((0.1, 0.5, 0.9, 1 - 1e-9)):
            ours, theirs = (torch.Generator("cpu").manual_seed(seed) for _ in range(2))
            masks = torch.empty(2, _CHUNKS[0] + 7, dtype=torch.bool, device="cpu")
            _draw(masks[0], probability, ours)
            masks[1].bernoulli_(probability, generator=theirs)
            floats = torch.empty(masks.shape[1], device="cpu")
            floats.bernoulli_(probability, generator=torch.Generator("cpu").manual_seed(seed))
            same = torch.equal(*masks) and torch.equal(masks[0], floats.bool())
            if not same or not torch.equal(ours.get_state(), theirs.get_state()):
                return False
    return True


FASTER: dict[Any, Any] = {_BERNOULLI: bernoulli_}
"""By operator: the function that a dispatch mode calls instead. It gives the same bits, leaves the generator
in the same state, and allocates nothing."""
