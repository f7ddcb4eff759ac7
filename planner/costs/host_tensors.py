"""Tensors that an operator of a GPU makes, or reads, on the host, and tensors on the meta device.

Memory-efficient attention keeps its seed and its offset in the memory of the host, and its backward reads
them there: it would crash the process on an address of the GPU. Yet these tensors, when they have no data,
claim to be on the GPU.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from planner._torch import fake
from planner._torch.tensors import schema_of
from planner._torch.without_data.plain import device_of
from planner.training_step.call import Call

aten = torch.ops.aten

_READ_ON_HOST: dict[object, frozenset[str]] = {
    getattr(aten, name): frozenset({"philox_seed", "philox_offset"})
    for name in ("_efficient_attention_backward", "_scaled_dot_product_efficient_attention_backward")
}
_MADE_ON_HOST: dict[object, frozenset[str]] = {
    getattr(aten, name): frozenset({"philox_seed", "philox_offset"})
    for name in ("_efficient_attention_forward", "_scaled_dot_product_efficient_attention")
}


def read_on_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments of a call whose values the host reads, whatever device they claim to be on."""
    names = _READ_ON_HOST.get(getattr(func, "overloadpacket", None))
    if names is None:
        return []
    given = dict(zip((a.name for a in schema_of(func).arguments), args, strict=False)) | dict(kwargs)
    return [tensor for name in sorted(names) if isinstance(tensor := given.get(name), torch.Tensor)]


def made_on_host(func: Any) -> list[bool]:
    """Which of an operator's results that are tensors are on the host; empty where none is."""
    names = _MADE_ON_HOST.get(getattr(func, "overloadpacket", None))
    if names is None:
        return []
    return [r.name in names for r in schema_of(func).returns if isinstance(r.type, torch.TensorType)]


def on_meta(call: Call) -> bool:
    """Whether a call makes tensors on the meta device, or reads tensors there."""
    return any(
        leaf.type == "meta"
        if isinstance(leaf, torch.device)
        else fake.is_fake(leaf) and device_of(leaf).type == "meta"
        for leaf in fake.tree_leaves((call.args, call.kwargs))
    )
