"""Loops over the sequences of a batch, as operations of all of them.

``torch.stack([row.logsumexp(-1) for row in logits])`` takes each sequence, computes something, and stacks
what it made; its backward adds up gradients of the whole that are zeros but for one sequence. Here one
operation computes it of all sequences, which is row-wise.
"""

from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from planner.graph.split.emitter import Emitter

aten = torch.ops.aten

_ALONG = frozenset(
    {
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.logsumexp.default, aten._log_softmax.default),
        *(aten._log_softmax_backward_data.default, aten.gather.default, aten.scatter_add.default),
    }
)
"""Operators whose numbers are dimensions."""

_SAME = frozenset({aten.detach.default, aten.alias.default, aten.new_zeros.default})


class _Loop(NamedTuple):
    """What is computed of each sequence: the operator, its arguments, and of how many sequences.

    An argument that is computed of each sequence is a loop itself; dimensions count from the last.
    """

    count: int
    target: Any
    args: tuple[Any, ...]


def join_loops(joint: GraphModule) -> None:
    """Let what is computed of each sequence by itself, and stacked or added up, be computed of all at once."""
    of = dict[Node, tuple[_Loop, int]]()
    members = dict[_Loop, dict[int, Node]]()
    whole, made = dict[_Loop, Node](), list[Node]()
    for node in list(joint.graph.nodes):
        if node.target is aten.stack.default:
            _join_stack(node, of, whole)
        found = _loop_of(node, of) if node.op == "call_function" else None
        if found is None:
            continue
        loop, index = of[node] = found
        members.setdefault(loop, {})[index] = node
        if len(members[loop]) == loop.count and all(arg in whole for arg in _loops(loop)):
            whole[loop] = _of_all(joint, node, loop, whole)
            made.append(whole[loop])
    for loop, total in whole.items():
        if loop.target is aten.select_backward.default:
            _join_sum(joint, list(members[loop].values()), total)
    place = {node: number for number, node in enumerate(joint.graph.nodes)}
    for node in sorted({*of, *made}, key=place.__getitem__, reverse=True):
        if not node.users and node.op == "call_function":
            joint.graph.erase_node(node)


def _loop_of(node: Node, of: dict[Node, tuple[_Loop, int]]) -> tuple[_Loop, int] | None:
    """Of which loop an operation is a part, and of which sequence."""
    args: Any = node.args
    if node.target is aten.select.int and args[0] not in of:
        shape = args[0].meta["val"].shape
        is_one = args[1] == 0 and len(shape) > 1 and isinstance(shape[0], int) and args[2] >= 0
        return (_Loop(shape[0], node.target, (args[0],)), args[2]) if is_one else None
    read = [of[n] for n in node.all_input_nodes if n in of]
    if not read or len(read) < len(node.all_input_nodes) or len({(of.count, i) for of, i in read}) > 1:
        return None
    count, index = read[0][0].count, read[0][1]
    if node.target is aten.select_backward.default:
        is_same = list(args[2:]) == [0, index] and args[1][0] == count
        return (_Loop(count, node.target, (of[args[0]][0],)), index) if is_same else None
    ranks = {n.meta["val"].dim() for n in node.all_input_nodes}
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) and len(ranks) == 1
    if not pointwise and node.target not in _SAME and node.target not in _ALONG:
        return None
    rank = max(*ranks, node.meta["val"].dim())

    def told(arg: Any) -> Any:
        if isinstance(arg, Node):
            return of[arg][0]
        if isinstance(arg, list | tuple):
            return tuple(told(each) for each in arg)
        is_dim = node.target in _ALONG and type(arg) is int
        return arg - rank if is_dim and arg >= 0 else arg

    return _Loop(count, node.target, (*map(told, args), *sorted(node.kwargs.items()))), index


def _loops(loop: _Loop) -> list[_Loop]:
    return [arg for arg in loop.args if isinstance(arg, _Loop)]


def _of_all(joint: GraphModule, last: Node, loop: _Loop, whole: dict[_Loop, Node]) -> Node:
    """What a loop computes, of all sequences at once; ``last`` is what computes it of the last."""
    if loop.target is aten.select.int:
        node: Node = loop.args[0]
        return node
    if loop.target is aten.select_backward.default:
        return whole[loop.args[0]]
    emit = Emitter(joint.graph, last.next, last.meta.get("partitioner_tag", "is_forward"))
    args = [whole[arg] if isinstance(arg, _Loop) else arg for arg in loop.args[: len(last.args)]]
    args = [list(arg) if type(arg) is tuple else arg for arg in args]
    if loop.target is aten.new_zeros.default:
        args[1] = [loop.count, *args[1]]
    return emit.call(last, loop.target, tuple(args), last.kwargs)


def _join_stack(node: Node, of: dict[Node, tuple[_Loop, int]], whole: dict[_Loop, Node]) -> None:
    parts: Any = node.args[0]
    dim = list(node.args[1:])
    found = [of.get(part, (None, 0)) for part in parts]
    loop = found[0][0]
    in_order = [index for _, index in found] == list(range(len(parts)))
    alike = {each for each, _ in found} == {loop} and in_order and dim in ([], [0])
    if loop is not None and loop in whole and alike and loop.count == len(parts):
        node.replace_all_uses_with(whole[loop])
        node.graph.erase_node(node)


def _join_sum(joint: GraphModule, parts: list[Node], total: Node) -> None:
    """Let a sum of gradients, each of which is zeros but for one sequence, be the gradients of all."""
    left, sums = set(parts), list[Node]()
    while len(left) > 1:
        read = (user for node in left for user in node.users)
        found = next((n for n in read if n.target is aten.add.Tensor and left.issuperset(n.args)), None)
        if found is None or any(len(n.users) > 1 for n in found.all_input_nodes):
            return
        left = left - {*found.all_input_nodes} | {found}
        sums.append(found)
    (last,) = left
    last.replace_all_uses_with(total)
    for node in reversed(sums):
        joint.graph.erase_node(node)
