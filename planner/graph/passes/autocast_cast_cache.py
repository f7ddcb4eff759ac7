"""Under autocast, one cast of a parameter for all of its uses, as eager has it.

Eager keeps the cast of a parameter for as long as a region of autocast lasts; where the parameter is used
again, the gradients of its uses are added in half precision and cast back once. AOTAutograd casts at every
use and adds the gradients after casting them back, which rounds differently and takes more memory.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from planner._torch import fake
from planner._torch.execution.checkpoints import checkpointed_part, is_reentrant
from planner._torch.joint import aot_metadata
from planner._torch.tensors import ENTER_AUTOCAST, EXIT_AUTOCAST, is_view, transform_depth
from planner.graph.accumulation import is_sum
from planner.graph.joint_pass import AutocastContext, TraceContext

aten = torch.ops.aten

_CALLER_REGION = 0
"""The region that a forward is called in."""
_EXPLICIT = {"to", "type", "type_as", "half", "bfloat16", "float", "_to_copy"}


def share_casts(joint: GraphModule, context: TraceContext) -> None:
    """Let every region of autocast cast a parameter once; note the casts that eager keeps for longer."""
    inputs = context.inputs
    regions = _regions(context.forward, context.autocast)
    groups: dict[tuple[Node, Any, int], list[Node]] = {}
    for node in joint.graph.nodes:
        if node.target is not aten._to_copy.default or node.meta.get("partitioner_tag") == "is_backward":
            continue
        source = node.args[0]
        if list(node.kwargs) != ["dtype"] or not isinstance(source, Node) or not _is_kept(source, inputs):
            continue
        source_name = aot_metadata.source_node_name(node)
        if source_name in regions and not _is_explicit(node):
            groups.setdefault((source, node.kwargs["dtype"], regions[source_name]), []).append(node)
    for casts in groups.values():
        _share(joint, casts)
    joint.recompile()
    for source, dtype, region in groups:
        position = aot_metadata.input_position(source)
        if region == _CALLER_REGION and position is not None:
            context.cached_casts[position] = dtype


def _regions(graph: GraphModule, around: AutocastContext) -> dict[str, int]:
    """The outermost region of autocast that keeps the casts of each node of a forward, by name."""
    region_of: dict[str, int] = {}
    numbers = itertools.count(_CALLER_REGION)
    region, depth, keeps = next(numbers), int(around.inside), [around.keeps]
    transforms = 0  # how many transforms of torch.func are open: inside of them eager keeps no casts

    def walk(graph: GraphModule) -> None:
        nonlocal region, depth, transforms
        for node in graph.graph.nodes:
            if (part := checkpointed_part(graph, node)) is not None:
                outside = region
                if is_reentrant(node):  # the backward makes casts of its own for it
                    region = next(numbers)
                walk(part)
                region = outside
            elif node.target is ENTER_AUTOCAST:
                region = next(numbers) if depth == 0 else region
                depth += 1
                _, _, _, wanted = node.args
                keeps.append(keeps[-1] if wanted is None else bool(wanted))
            elif node.target is EXIT_AUTOCAST:
                depth -= 1
                keeps.pop()
            elif (change := transform_depth(node)) != 0:
                transforms += change
            elif depth and keeps[-1] and not transforms:
                region_of[node.name] = region

    walk(graph)
    return region_of


def _is_kept(source: Node, inputs: Sequence[Any]) -> bool:
    """Whether eager keeps casts of an input: leaves in single precision that need a gradient."""
    position = aot_metadata.input_position(source)
    tensor = inputs[position] if position is not None and position < len(inputs) else None
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype is torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not is_view(tensor)
    )


def _is_explicit(cast: Node) -> bool:
    stack = cast.meta.get("source_fn_stack")
    if not stack:
        return True
    function = stack[-1][1]
    return (function if isinstance(function, str) else getattr(function, "__name__", "")) in _EXPLICIT


def _share(joint: GraphModule, casts: list[Node]) -> None:
    if len(casts) < 2:
        return
    numbers = {cast.meta.get("seq_nr") for cast in casts}
    shape = casts[0].meta["val"].shape
    back = [
        node
        for node in joint.graph.nodes
        if node.target is aten._to_copy.default
        and node.meta.get("partitioner_tag") == "is_backward"
        and node.meta.get("seq_nr") in numbers
        and node.meta["val"].shape == shape
        and node.meta["val"].dtype is torch.float32
    ]
    if len(back) > len(casts) or len({_sum_of(node) for node in back}) > 1:
        return
    for cast in casts[1:]:
        views = _views_of(cast)
        cast.replace_all_uses_with(casts[0])
        joint.graph.erase_node(cast)
        for view in views:  # they now view the storage of the remaining cast
            args, kwargs = map_arg((view.args, view.kwargs), lambda node: node.meta["val"])
            look: Any = view.target
            view.meta["val"] = look(*args, **kwargs)
    _add_up(joint, back)
    for cast_back in back[:-1]:
        (total_of_both,) = cast_back.users
        (other,) = (n for n in total_of_both.all_input_nodes if n is not cast_back)
        total_of_both.replace_all_uses_with(other)
        joint.graph.erase_node(total_of_both)
        joint.graph.erase_node(cast_back)


def _add_up(joint: GraphModule, back: Sequence[Node]) -> None:
    """Let the last cast back be that of the sum of all gradients, added up in the order in which they arrive.

    One cast may have several casts back, where the forward differentiates an operation that uses it: one of
    the backward and one of the inner backward. Their gradients arrive among those of the other casts.
    """
    arriving = [_Term(node.args[0], node) for node in back]
    terms = [term for node in back for term in _terms(node.args[0])]
    if len(terms) > len(back):
        places = {node: i for i, node in enumerate(joint.graph.nodes)}
        arriving = sorted(terms, key=lambda term: places[term.before])
    total = arriving[0].gradient
    for gradient, before in arriving[1:]:
        with joint.graph.inserting_before(before):
            added = joint.graph.call_function(aten.add.Tensor, (total, gradient))
        added.meta = {**back[-1].meta, "val": fake.same_shape(gradient.meta["val"])}
        total = added
    back[-1].args = (total,)


class _Term(NamedTuple):
    """A gradient that the engine adds to the sum so far.

    Attributes:
        gradient: The gradient.
        before: The operation before which it is added.
    """

    gradient: Any
    before: Node


def _terms(gradient: Any) -> list[_Term]:
    """The gradients that the engine added up to one."""
    if is_sum(gradient) and len(gradient.users) == 1:
        earlier, later = gradient.args
        if earlier.meta.get("seq_nr") != gradient.meta.get("seq_nr"):  # else a sum inside one autograd node
            return [*_terms(earlier), _Term(later, gradient)]
    return [_Term(gradient, gradient.next)]


def _views_of(node: Node) -> list[Node]:
    """The nodes that share a node's storage, in order."""
    key = fake.storage_key(node.meta["val"])
    views: list[Node] = []
    for user in node.users:
        value = user.meta.get("val")
        if isinstance(value, torch.Tensor) and fake.storage_key(value) == key:
            views += [user, *_views_of(user)]
    return views


def _sum_of(node: Node) -> Node:
    """The end of the sums that a gradient goes into."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is not aten.add.Tensor or user.kwargs or len(user.all_input_nodes) != 2:
            break
        node = user
    return node
