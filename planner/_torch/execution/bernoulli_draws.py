"""On the CPU, the numbers that ``bernoulli_`` draws, in less time.

It draws 64 bits an element from the Mersenne Twister, makes of the lower 53 a double from 0 to 1, and
compares that with the probability (ATen's ``DistributionsHelper.h``). Compared as an integer, these 53 bits
give the same without a conversion. That this holds is tried once a process, with generators of its own; where
it does not, ``bernoulli_`` is called.
"""

import functools
import math
from typing import Any

import numpy as np
import torch

from planner._torch import fake

_BITS = 53
"""Of a double's fraction."""
_CHUNKS = 1 << 14, 1 << 16
"""Elements that are drawn at once, at least and at most: their numbers stay in a core's cache."""
_WORTH_IT = 8 * _CHUNKS[0]
"""Elements from which on it saves time. The scratch takes no more bytes than the mask."""
_BERNOULLI = torch.ops.aten.bernoulli_.float


def draw(mask: torch.Tensor, probability: float) -> torch.Tensor:
    """Fill a boolean mask as ``mask.bernoulli_(probability)`` does, and leave the generator as that does.

    Args:
        mask: Of any shape and device.
        probability: That an element is true, from 0 to 1.
    """
    plain = type(mask) is not torch.Tensor or mask.device.type != "cpu" or not mask.is_contiguous()
    if plain or mask.numel() < _WORTH_IT or not are_bernoullis():
        return mask.bernoulli_(probability)
    _draw(mask.view(-1), probability, None)
    return mask


def bernoulli_(noise: torch.Tensor, probability: float = 0.5, **generator: Any) -> torch.Tensor:
    """What ``noise.bernoulli_(probability)`` does, of floats; below autograd, as a dispatch mode calls it.

    It allocates nothing: what is drawn lies in the part of the noise that is not written yet.

    Args:
        noise: Of any shape, type and device.
        probability: That an element is one and not zero, from 0 to 1.
        generator: To draw from, by this name; the default one where it is left out.
    """
    plain = generator or not _is_large(noise) or not 0 <= probability <= 1
    if plain or torch._C._len_torch_dispatch_stack() or not are_bernoullis():
        drawn: torch.Tensor = _BERNOULLI(noise, probability, **generator)
        return drawn
    flat, count, size = noise.view(-1), noise.numel(), noise.element_size()
    done, chunk = 0, _CHUNKS[1]
    while chunk >= _CHUNKS[0] // 2:
        # Each takes eight bytes as a number and one as a boolean, the numbers first, at whole words.
        begin = (count - 9 * chunk // size) // 8 * 8
        if begin < done + chunk:
            chunk //= 2
            continue
        scratch = flat[begin:].view(torch.uint8)
        booleans = scratch[8 * chunk : 9 * chunk]
        _draw_chunk(scratch[: 8 * chunk].view(torch.int64), probability, None, booleans.view(torch.bool))
        flat[done : done + chunk].copy_(booleans)
        done += chunk
    _BERNOULLI(flat[done:], probability)
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
    """A number in NumPy's memory: PyTorch would make a tensor of it with each call."""
    with fake.without_modes():
        return torch.from_numpy(np.array(value))


@functools.cache
def are_bernoullis() -> bool:
    """Whether this build of PyTorch draws so."""
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
"""What a dispatch mode calls in the place of an operator: the same bits and states, and nothing allocated."""
