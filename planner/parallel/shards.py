"""What ``fully_shard`` leaves of a parameter on one rank.

It splits along the first dimension, as ``torch.chunk`` does, and pads every rank's part to the first one's.
"""

import math

import torch

from planner._torch.distributed import local_tensor
from planner.parallel.strategies import ParallelError


def shard_shape(tensor: torch.Tensor, world_size: int) -> tuple[int, ...]:
    """The shape of the first rank's part of a parameter, which is the largest; no rank holds more with its
    padding. Of one that ``parallelize_module`` distributed, what is here is split.

    Raises:
        ParallelError: It has no dimensions.
    """
    if tensor.dim() == 0:
        raise ParallelError("a parameter is a scalar, and fully_shard shards none: give it one dimension")
    shape = local_tensor(tensor).shape
    return (-(-shape[0] // world_size), *shape[1:])


def shard_elements(tensor: torch.Tensor, world_size: int) -> int:
    """Elements of any rank's part of a parameter, padding included."""
    return math.prod(shard_shape(tensor, world_size))
