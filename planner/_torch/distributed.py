"""Training on many ranks."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner._torch.compat import private
from planner.module_parts import named_parts, parameters_of


def active_data_parallel_group() -> Any:
    """The process group of the ``DistributedDataParallel`` whose forward is running; None outside of one."""
    active: Any = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    return None if active is None else active.process_group


@dataclass(frozen=True)
class Wrapper:
    """The ``DistributedDataParallel`` whose forward is running.

    Attributes:
        ranks: The number of ranks among which it reduces.
        bucket_cap_mb, gradient_as_bucket_view: As it was given them.
    """

    ranks: int
    bucket_cap_mb: float
    gradient_as_bucket_view: bool


def active_wrapper() -> Wrapper | None:
    """The ``DistributedDataParallel`` whose forward is running, described; None outside of one."""
    active: Any = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    if active is None:
        return None
    ranks = len(torch.distributed.get_process_group_ranks(active.process_group))
    return Wrapper(ranks, active.bucket_bytes_cap / 2**20, active.gradient_as_bucket_view)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    found = sys.modules.get("torch.distributed.tensor")
    return found is not None and isinstance(tensor, found.DTensor)


def holds_dtensors(module: torch.nn.Module) -> bool:
    """Whether parameters of a module are DTensors."""
    return any(is_dtensor(parameter) for parameter in parameters_of(module))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor is returned as it is."""
    local: torch.Tensor = getattr(tensor, "_local_tensor") if is_dtensor(tensor) else tensor  # noqa: B009
    return local


def local_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient of a parameter on this rank. A DTensor's gradient is redistributed to the placements of
    the parameter, as ``fully_shard`` does before it reduces it."""
    gradient: Any = parameter.grad
    if not is_dtensor(parameter):
        return gradient  # type: ignore[no-any-return]
    placements = parameter.placements  # type: ignore[attr-defined]
    if gradient.placements != placements:
        gradient = gradient.redistribute(placements=placements)
    return local_tensor(gradient)


def autograd_sums_micro_batches() -> bool:
    """Whether autograd sums gradients of micro-batches for ``fully_shard``, and casts them to the dtype that
    they are reduced in, as from PyTorch 2.15 on."""
    return private("_default_reduce_scatter_input_fn") is not None


def pipelines_free_early() -> bool:
    """Whether stages of a pipeline free outputs once these are sent, and allocate buffers only when they
    receive, as from PyTorch 2.15 on."""
    return private("_wait_and_release_fwd_send") is not None


def is_whole_on_each_rank(parameter: torch.Tensor) -> bool:
    """Whether ``parallelize_module`` left a parameter whole on some ranks, among which its gradient is then
    summed before ``fully_shard`` reduces it."""
    if not is_dtensor(parameter):
        return False
    placements = parameter.placements  # type: ignore[attr-defined]
    return any(placement.is_replicate() for placement in placements)


def copy_for_reduction(gradients: Sequence[torch.Tensor], ranks: int, whole: torch.Tensor) -> None:
    """Copy gradients into the buffer that ``fully_shard`` reduces, rank by rank, by its own operator."""
    mixed = getattr(torch.ops.fsdp, "chunk_cat_mixed_dtype", None) if autograd_sums_micro_batches() else None
    copy: Any = mixed or torch.ops.aten._chunk_cat.out
    copy(list(gradients), 0, ranks, out=whole.view(ranks, -1))


def ranks_of_shards(module: torch.nn.Module) -> list[int]:
    """The ranks among which parameters of a module are sharded; none if they are not."""
    meshes = {p.device_mesh for p in parameters_of(module) if is_dtensor(p)}  # type: ignore[attr-defined]
    return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` shards a module, or parts of it."""
    return bool(_sharded_modules(module))


def tensor_parallel_ranks(module: torch.nn.Module) -> int:
    """The number of ranks among which ``parallelize_module`` distributed a module; 1 if it did not."""
    if not is_fully_sharded(module):
        return max(len(ranks_of_shards(module)), 1)
    return max(
        (
            # All ranks of the parameter, over those of ``fully_shard``.
            param.sharded_param.device_mesh.size() // param.mesh_info.mesh.size()
            for param in _fully_sharded_parameters(module)
        ),
        default=1,
    )


def number_of_shards(module: torch.nn.Module) -> int:
    """The number of ranks among which ``fully_shard`` sharded a module's parameters; 1 if it did not."""
    return max((_shards(param.mesh_info) for param in _fully_sharded_parameters(module)), default=1)


def _shards(mesh_info: Any) -> int:
    return getattr(mesh_info, "shard_mesh_size", 1)  # meshes without it only replicate


def _fully_sharded_parameters(module: torch.nn.Module) -> Iterator[Any]:
    """The ``FSDPParam`` that ``fully_shard`` keeps for each parameter."""
    for state in _states(module):
        for group in state._fsdp_param_groups:
            yield from group.fsdp_params


def _states(module: torch.nn.Module) -> list[Any]:
    """The ``FSDPState`` of each call of ``fully_shard`` for a module and its parts."""
    states = (part._get_fsdp_state() for part in _sharded_modules(module).values())  # type: ignore[operator]
    return list(dict.fromkeys(states))


def _sharded_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    found = sys.modules.get("torch.distributed.fsdp")
    if found is None:
        return {}
    return {name: part for name, part in named_parts(module).items() if isinstance(part, found.FSDPModule)}


@dataclass(frozen=True)
class ShardedUnit:
    """Parameters that ``fully_shard`` gathers together, and how.

    Attributes:
        names: The modules that were given to ``fully_shard`` together, by name.
        of_root: Whether the root module is one of them.
        reshard_after_forward: The argument of ``fully_shard``.
        dtypes: The dtypes of the parameters.
        param_dtype, reduce_dtype: Those of the mixed-precision policy.
        replicas: How many groups of ranks hold a full copy, each sharded in the same way.
        reduces: Whether gradients are reduced after this backward.
        reduces_all: Whether they are also reduced between the replicas.
        reshards: Whether gathered parameters are freed after the backward.
        prefetches: Whether the user set which units to gather ahead in the backward.
        offloads: Whether the parameters are kept on the CPU, although another device computes with them.
        output_dtype: The ``output_dtype`` of the mixed-precision policy.
        overrides: Whether the policy differs for some of the parameters (from torch 2.15 on).
    """

    names: tuple[str, ...]
    of_root: bool
    reshard_after_forward: bool | int | None
    dtypes: frozenset[torch.dtype]
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    replicas: int
    reduces: bool
    reduces_all: bool
    reshards: bool
    prefetches: bool
    offloads: bool
    output_dtype: torch.dtype | None
    overrides: bool


def sharded_units(module: torch.nn.Module) -> list[ShardedUnit]:
    """The units of a module that ``fully_shard`` shards."""
    units = []
    names = {part: name for name, part in named_parts(module).items()}
    for state in _states(module):
        for group in state._fsdp_param_groups:
            of_root = module in group.modules
            after = group.post_forward_mesh_info
            size = None if after is None else _shards(after)
            # The user's argument, read back: False without a mesh after the forward, True for as many shards.
            reshard = size is not None and (size == _shards(group.mesh_info) or size)
            units.append(
                ShardedUnit(
                    tuple(names[part] for part in group.modules if part in names),
                    of_root,
                    None if state._auto_reshard_after_forward and of_root else reshard,
                    frozenset(param.sharded_param.dtype for param in group.fsdp_params),
                    state._mp_policy.param_dtype,
                    state._mp_policy.reduce_dtype,
                    getattr(group.mesh_info, "replicate_mesh_size", 1),
                    group.reduce_grads,
                    group.all_reduce_grads,
                    group.reshard_after_backward,
                    bool(state._states_to_backward_prefetch),
                    any(param.offload_to_cpu for param in group.fsdp_params) and group.device.type != "cpu",
                    state._mp_policy.output_dtype,
                    any(
                        getattr(param, "mp_policy", state._mp_policy).param_dtype
                        is not state._mp_policy.param_dtype
                        for param in group.fsdp_params
                    ),
                )
            )
    return units


class UnreducedGradients:
    """Looks, at each step, for unsharded gradients that ``fully_shard`` keeps until it reduces them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters = list(_fully_sharded_parameters(module))

    def are_there(self) -> bool:
        """Whether there is one."""
        return any(
            param.unsharded_accumulated_grad is not None
            or getattr(getattr(param, "_unsharded_param", None), "grad", None) is not None
            for param in self._parameters
        )


def names_of_whole(module: torch.nn.Module) -> list[str]:
    """The parameters of a module that ``fully_shard`` does not shard, by name."""
    return [name for name, parameter in module.named_parameters() if not is_dtensor(parameter)]


def names_of_units(module: torch.nn.Module) -> list[str]:
    """The parts of a module that have parameters and were given to ``fully_shard``, by name; not the root."""
    parts = _sharded_modules(module).items()
    return [name for name, part in parts if name and next(part.parameters(), None) is not None]


def default_store() -> Any:
    """The key-value store that the processes of a job met in."""
    return torch.distributed.distributed_c10d._get_default_store()
