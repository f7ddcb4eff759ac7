"""Masks that are kept as bits: an operation that runs again by unpacking its result.

The first run makes a boolean tensor, and right after it the booleans are packed, eight to a byte. In place of
a second run they are unpacked, which reads nothing else: neither the operation nor its inputs are needed
again. No operation matches this rule: a schedule says which masks are packed.
"""

from collections.abc import Collection, Sequence

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from planner._torch import fake
from planner._torch.execution.mask_operators import PACK_BITS, UNPACK_BITS
from planner.graph.replay_rule import ReplayRule, ReplayState, Take

aten = torch.ops.aten

LEAST_ELEMENTS = 1024
"""Smaller masks are not worth the two calls, nor smaller results being written over operands."""


class Packed(ReplayRule):
    """An operation whose result is kept as bits."""

    def state(self, node: Node) -> ReplayState:
        return ReplayState("bits", fake.storage_bytes(bits_of(node.meta["val"])))

    def save_state(self, graph: FxGraph, node: Node) -> Node:
        """Emit the packing of a mask that has been made."""
        packed = graph.call_function(PACK_BITS, (node,))
        packed.meta["val"] = bits_of(node.meta["val"])
        return packed

    def reads_again(self, node: Node) -> Sequence[Node]:
        return ()

    def emit_again(self, graph: FxGraph, node: Node, take: Take, state: Node | None) -> Node:
        sizes = [take(s) if isinstance(s, Node) else s for s in _sizes(node)]
        return graph.call_function(UNPACK_BITS, (state, sizes))


PACKED = Packed()


def is_mask(node: Node) -> bool:
    """Whether an operation's result is one boolean tensor."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def is_packable(node: Node) -> bool:
    """Whether an operation's result is a mask that lies in memory row by row, and is not too small."""
    if not is_mask(node):
        return False
    value: torch.Tensor = node.meta["val"]
    return (
        fake.concrete_size(value.numel()) >= LEAST_ELEMENTS
        and value.is_contiguous()
        and fake.storage_bytes(value) == fake.concrete_size(value.numel())
    )


def bits_of(mask: torch.Tensor) -> torch.Tensor:
    """The bits of a mask without data, without data."""
    return fake.empty_of(mask, (mask.numel() + 7) // 8, torch.uint8)


def read_sizes(graph: FxGraph, nodes: Collection[Node]) -> None:
    """Add nodes that read the symbolic sizes of masks, right after these: unpacking needs the sizes."""
    for node in nodes:
        for dimension, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int) and _size(node, dimension) is None:
                with graph.inserting_after(node):
                    read = graph.call_function(aten.sym_size.int, (node, dimension))
                read.meta["val"] = size


def _sizes(node: Node) -> list[int | Node]:
    sizes: list[int | Node] = []
    for dimension, size in enumerate(node.meta["val"].shape):
        read = size if isinstance(size, int) else _size(node, dimension)
        assert read is not None, f"the backward does not know the sizes of {node}"
        sizes.append(read)
    return sizes


def _size(node: Node, dimension: int) -> Node | None:
    return next(
        (u for u in node.users if u.target is aten.sym_size.int and u.args == (node, dimension)), None
    )
