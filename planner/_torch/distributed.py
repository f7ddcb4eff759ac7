"""Private PyTorch APIs of training on many ranks.

Tested with torch 2.13.
"""

import math
import sys
from typing import Any

import torch


def active_data_parallel_group() -> Any:
    """The process group of the ``DistributedDataParallel`` whose forward is running; None outside of one."""
    active: Any = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    return None if active is None else active.process_group


def ranks_of_shards(module: torch.nn.Module) -> list[int]:
    """The ranks among which parameters of a module are sharded; none where they are not."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return []
    sharded = next((p for p in module.parameters() if isinstance(p, tensor.DTensor)), None)
    return [] if sharded is None else sorted(sharded.device_mesh.mesh.flatten().tolist())


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` shards a module, or parts of it."""
    found = sys.modules.get("torch.distributed.fsdp")
    return found is not None and any(isinstance(part, found.FSDPModule) for part in module.modules())


def tensor_parallel_ranks(module: torch.nn.Module) -> int:
    """Among how many ranks ``parallelize_module`` distributed a module; 1 where it did not."""
    return 1 if is_fully_sharded(module) else max(len(ranks_of_shards(module)), 1)


def number_of_shards(module: torch.nn.Module) -> int:
    """Among how many ranks parameters of a module are sharded; 1 where they are whole."""
    tensor = sys.modules.get("torch.distributed.tensor")
    sharded = next((p for p in module.parameters() if tensor and isinstance(p, tensor.DTensor)), None)
    if tensor is None or sharded is None:
        return 1
    sizes = zip(sharded.placements, sharded.device_mesh.mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_shard())


def default_store() -> Any:
    """The key-value store that the processes of a job met in."""
    return torch.distributed.distributed_c10d._get_default_store()
