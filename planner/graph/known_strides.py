"""The values that are certain to have the strides that a joint graph was traced with.

Strides of dimensions of one element say nothing of where elements lie, but kernels that detect channels-last
images look at them too, as do matrix products. Tracing without data gets them right for operands that have
the strides of new tensors; for others, kernels may give results other strides.
"""

import functools

import torch
from torch.fx import GraphModule, Node

from planner._torch import fake, operators
from planner.graph.passes.in_place_accumulation import is_sum_in_place

aten = torch.ops.aten

_WHATEVER_OPERANDS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
    aten.native_layer_norm.default, aten.native_layer_norm_backward.default,
}  # fmt: skip
_WHATEVER_OPERANDS |= {
    getattr(aten, name).default
    for name in ("_fused_rms_norm", "_fused_rms_norm_backward")
    if hasattr(aten, name)  # since 2.9
}
"""Operators whose results have the strides of new tensors, whatever those of their operands."""


def with_known_strides(module: GraphModule) -> set[Node]:
    """Nodes whose values, when the graph runs, have the strides that they were traced with.

    Args:
        module: A joint graph.
    """
    known: set[Node] = set()
    for node in module.graph.nodes:
        values = _tensors(node)
        if not any(map(has_one, values)) or (all(map(_is_plain, values)) and _is_known(node, known)):
            known.add(node)
    return known


def _is_known(node: Node, known: set[Node]) -> bool:
    if node.op == "placeholder":
        return "tangents" not in node.name  # gradients arrive with any strides
    if node.op != "call_function" or operators.is_foreign(node.target):
        return False
    if node.target in _WHATEVER_OPERANDS:
        return True
    if not known.issuperset(node.all_input_nodes):
        return False
    result, operands = _tensors(node), [_tensors(operand) for operand in node.all_input_nodes]
    if node.target in operators.SHAPE_VIEWS:
        viewed = operands[0][0]
        return fake.strides_of_view(_sizes(viewed), _strides(viewed), _sizes(result[0])) == _strides(
            result[0]
        )
    if is_sum_in_place(node):
        return _strides(operands[0][0]) == _strides(result[0])
    own, sizes = set(map(_strides, result)), set(map(_sizes, result))
    return all(_strides(value) in own for values in operands for value in values if _sizes(value) in sizes)


def _tensors(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [t for t in fake.tree_leaves(value) if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def has_one(value: torch.Tensor) -> bool:
    """Whether a tensor has a dimension of one element."""
    return any(isinstance(size, int) and size == 1 for size in value.shape)


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor has the strides of a new one, of some order of its dimensions."""
    return not has_one(value) or _are_plain(_sizes(value), _strides(value))


@functools.lru_cache(maxsize=4096)
def _are_plain(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    same = torch.empty_strided(sizes, strides, device="meta")
    formats = [torch.contiguous_format]
    formats += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(len(sizes), [])
    for memory_format in formats:
        if same.is_contiguous(memory_format=memory_format):
            return torch.empty(sizes, device="meta", memory_format=memory_format).stride() == strides
    inner = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if stride != inner:
            return False
        inner *= size
    return len(set(strides)) == len(strides)


def _sizes(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(fake.concrete_size, value.shape))


def _strides(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(fake.concrete_size, value.stride()))
