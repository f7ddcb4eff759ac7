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


class _Each(NamedTuple):
    """Stands for an argument: the result of another loop for the same sequence."""

    loop: int


class _Loop(NamedTuple):
    """An operation that is computed for each sequence: the number of sequences, the operator, and its
    arguments, in which dimensions are counted from the last."""

    sequences: int
    target: Any
    args: tuple[Any, ...]


def join_loops(joint: GraphModule) -> None:
    """Compute at once, for all sequences, what a graph computes for each one and then stacks or adds up."""
    _Loops(joint).join()


class _Loops:
    """The loops of a joint graph, each with a number."""

    def __init__(self, joint: GraphModule) -> None:
        self._graph = joint.graph
        self._numbers = dict[_Loop, int]()
        self._of = dict[Node, tuple[int, int]]()  # by operation: its loop, and the number of its sequence
        self._members = dict[int, dict[int, Node]]()  # by loop and sequence: the operation
        self._sequences = dict[int, int]()  # by loop: the number of sequences
        self._whole = dict[int, Node]()  # by loop: the operation that computes it for all sequences

    def join(self) -> None:
        for node in list(self._graph.nodes):
            if node.target is aten.stack.default:
                self._join_stack(node)
            found = self._loop_of(node) if node.op == "call_function" else None
            if found is None:
                continue
            loop, index = found
            number = self._numbers.setdefault(loop, len(self._numbers))
            members = self._members.setdefault(number, {})
            members[index] = node
            self._of[node], self._sequences[number] = (number, index), loop.sequences
            read = [arg.loop for arg in loop.args if isinstance(arg, _Each)]
            if len(members) == loop.sequences and self._whole.keys() >= {*read}:
                self._whole[number] = self._of_all(node, loop)
        for loop, number in self._numbers.items():
            if loop.target is aten.select_backward.default and number in self._whole:
                self._join_sum(list(self._members[number].values()), self._whole[number])
        place = {node: number for number, node in enumerate(self._graph.nodes)}
        for node in sorted({*self._of, *self._whole.values()}, key=place.__getitem__, reverse=True):
            if not node.users and node.op == "call_function":
                self._graph.erase_node(node)

    def _loop_of(self, node: Node) -> tuple[_Loop, int] | None:
        """The loop that an operation is a part of, and the number of its sequence; None if there is none."""
        args: Any = node.args
        if node.target is aten.select.int and args[0] not in self._of:
            shape = args[0].meta["val"].shape
            is_one = args[1] == 0 and len(shape) > 1 and isinstance(shape[0], int) and args[2] >= 0
            return (_Loop(shape[0], node.target, (args[0],)), args[2]) if is_one else None
        read = {n: self._of[n] for n in node.all_input_nodes if n in self._of}
        if not read or len(read) < len(node.all_input_nodes) or len({i for _, i in read.values()}) > 1:
            return None
        counts = {self._sequences[number] for number, _ in read.values()}
        count, (_, index) = counts.pop(), next(iter(read.values()))
        if counts:
            return None
        if node.target is aten.select_backward.default:
            is_same = list(args[2:]) == [0, index] and args[1][0] == count
            return (_Loop(count, node.target, (_Each(read[args[0]][0]),)), index) if is_same else None
        ranks = {n.meta["val"].dim() for n in read}
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) and len(ranks) == 1
        if not pointwise and node.target not in _SAME and node.target not in _ALONG:
            return None
        rank = max(*ranks, node.meta["val"].dim())

        def told(arg: Any) -> Any:
            if isinstance(arg, Node):
                return _Each(read[arg][0])
            if isinstance(arg, list | tuple):
                return tuple(told(each) for each in arg)
            is_dim = node.target in _ALONG and type(arg) is int
            return arg - rank if is_dim and arg >= 0 else arg

        told_args = [told(arg) for arg in args]
        return _Loop(count, node.target, (*told_args, *sorted(node.kwargs.items()))), index

    def _of_all(self, last: Node, loop: _Loop) -> Node:
        """A node that computes a loop for all sequences at once; ``last`` computes it for the last one."""
        if loop.target is aten.select.int:
            node: Node = loop.args[0]
            return node
        if loop.target is aten.select_backward.default:
            return self._whole[loop.args[0].loop]
        emit = Emitter(self._graph, last.next, last.meta.get("partitioner_tag", "is_forward"))
        given = loop.args[: len(last.args)]
        args: list[Any] = [self._whole[arg.loop] if isinstance(arg, _Each) else arg for arg in given]
        args = [list(arg) if isinstance(arg, tuple) else arg for arg in args]
        if loop.target is aten.new_zeros.default:
            args[1] = [loop.sequences, *args[1]]
        return emit.call(last, loop.target, tuple(args), last.kwargs)

    def _join_stack(self, node: Node) -> None:
        parts: Any = node.args[0]
        number, _ = self._of.get(parts[0], (-1, 0))
        in_order = [self._of.get(part) for part in parts] == [(number, i) for i in range(len(parts))]
        all_of_them = number in self._whole and len(self._members[number]) == len(parts)
        if all_of_them and in_order and list(node.args[1:]) in ([], [0]):
            node.replace_all_uses_with(self._whole[number])
            self._graph.erase_node(node)

    def _join_sum(self, parts: list[Node], total: Node) -> None:
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
            self._graph.erase_node(node)
