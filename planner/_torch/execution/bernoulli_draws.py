"""On the CPU, the numbers that ``bernoulli_`` draws, in less time.

It draws 64 bits an element from the Mersenne Twister, makes of the lower 53 a double from 0 to 1, and
compares that with the probability (ATen's ``DistributionsHelper.h``). Compared as an integer, these 53 bits
give the same without a conversion. That this holds is tried once a process, with generators of its own; where
it does not, ``bernoulli_`` is called.
"""

import functools
import math

import torch

from planner._torch import fake

_BITS = 53
"""Of a double's fraction."""
_CHUNKS = 1 << 14, 1 << 16
"""Elements that are drawn at once, at least and at most: their numbers stay in a core's cache."""
_WORTH_IT = 8 * _CHUNKS[0]
"""Elements from which on it saves time. The scratch takes no more bytes than the mask."""


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


def _draw(flat: torch.Tensor, probability: float, generator: torch.Generator | None) -> None:
    below = math.ceil(probability * (1 << _BITS))  # exact: a double times a power of two
    least, most = _CHUNKS
    chunk = max(least, min(most, len(flat) // 8))
    scratch = torch.empty(min(len(flat), chunk), dtype=torch.int64, device=flat.device)
    for part in flat.split(chunk):
        drawn = scratch[: len(part)].random_(generator=generator).bitwise_and_((1 << _BITS) - 1)
        torch.lt(drawn, below, out=part)


@functools.cache
def are_bernoullis() -> bool:
    """Whether this build of PyTorch draws so."""
    with fake.without_modes():
        for seed, probability in enumerate((0.1, 0.5, 0.9, 1 - 1e-9)):
            ours, theirs = (torch.Generator("cpu").manual_seed(seed) for _ in range(2))
            masks = torch.empty(2, _CHUNKS[0] + 7, dtype=torch.bool, device="cpu")
            _draw(masks[0], probability, ours)
            masks[1].bernoulli_(probability, generator=theirs)
            if not torch.equal(*masks) or not torch.equal(ours.get_state(), theirs.get_state()):
                return False
    return True
