"""Keep the order of Inductor's programs near to that of the graph: they free as early as the schedule."""

import bisect
from typing import Any

import torch
from torch._inductor import lowering
from torch.fx import GraphModule, Node

from planner._torch.operators import OpOverload

aten: Any = torch.ops.aten

KEPT, FREED = "arg_kept_", "arg_freed_"
"""How inputs are named that outlive a program, and those that it frees, with the number of their storage.

They begin with "arg", as Inductor's own names of inputs.
"""

_CALLS = frozenset(
    {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
        aten.convolution.default, aten.convolution_backward.default,
    }
)  # fmt: skip
"""Operators whose lowerings in Inductor call a library."""

_VIEWS = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default,
        aten.transpose.int, aten.t.default, aten.expand.default, aten.unsqueeze.default,
        aten.squeeze.dims, aten.squeeze.dim, aten.alias.default, aten.slice.Tensor, aten.select.int,
    }
)  # fmt: skip


def realize_in_place(traced: GraphModule) -> None:
    """Have results computed where the graph has them, if that frees more.

    Inductor computes the result of a pointwise operation where it is read, and holds what it is computed from
    until then. Beside a copy that a product takes there is what was copied, and all that the schedule put
    between the two: what a call of a library reads is computed at its own place. So is what is read after
    a later call, if it is smaller than what is read for it only, as a sum is that is read early and late.

    Args:
        traced: A graph whose inputs are named by :data:`KEPT` and :data:`FREED`.
    """
    place = {node: i for i, node in enumerate(traced.graph.nodes)}
    calls = [i for node, i in place.items() if _calls_library(node)]
    realized: set[Node] = set()
    for node in traced.graph.nodes:
        if not _is_pointwise(node):
            continue
        after = bisect.bisect_right(calls, place[node])
        until = calls[after] if after < len(calls) else len(place)
        late = any(reader > until for reader in _readers_of(node, place, realized))
        if _goes_to_library(node) or (late and _frees_more(node, until, place, realized)):
            node.meta["inductor_realize_to_strides"] = True
            realized.add(node)


def _frees_more(node: Node, until: int, place: dict[Node, int], realized: set[Node]) -> bool:
    """Whether what is read for a result only, and by others before a place, is larger than the result."""
    freed = sum(
        _size(source)
        for source in _sources(node, realized)
        if not source.name.startswith(KEPT)
        and all(reader <= until for reader in _readers_of(source, place, realized | {node}))
    )
    return freed > _size(node)


def _sources(node: Node, realized: set[Node]) -> set[Node]:
    """The values in memory that a result is computed from."""
    found: set[Node] = set()
    seen: set[Node] = set()
    ahead = [node]
    while ahead:
        for source in set(ahead.pop().all_input_nodes) - seen:
            seen.add(source)
            inlined = source not in realized and (_is_view(source) or _is_pointwise(source))
            (ahead.append if inlined else found.add)(source)
    return found


def _readers_of(node: Node, place: dict[Node, int], realized: set[Node]) -> set[int]:
    """The places where a value is read, for results that are computed there, too."""
    seen: set[Node] = set()
    ahead = [node]
    while ahead:
        for user in ahead.pop().users.keys() - seen:
            seen.add(user)
            if _is_view(user) or (_is_pointwise(user) and user not in realized):
                ahead.append(user)
    return {place[user] for user in seen}


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and node.target in _VIEWS


def _is_pointwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and (node.target is aten.clone.default or torch.Tag.pointwise in tags)


def _size(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.itemsize if isinstance(value, torch.Tensor) else 0


def _goes_to_library(node: Node) -> bool:
    return any(_calls_library(user) or (_is_view(user) and _goes_to_library(user)) for user in node.users)


def _calls_library(node: Node) -> bool:
    target = node.target
    # What has no lowering becomes a fallback when Inductor first meets it in a process.
    called = target in lowering.fallbacks or (
        isinstance(target, OpOverload) and target not in lowering.lowerings
    )
    return node.op == "call_function" and (target in _CALLS or called)
