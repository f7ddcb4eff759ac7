"""Results that are written into the memory of an operand that nobody reads afterwards.

A traced graph computes every result in memory of its own. Where an operand of the same shape, strides and
type is read for the last time, its memory serves as well: the bits are the same, and less is allocated. The
autograd engine does so where it adds up gradients.

In the backward, and of what never runs again, the order of the operations is fixed, so that the last reader
of a value is known. A value of the forward may be computed again: there an operand is overwritten only if
nothing but that one operation reads it, and the two are run again together. The result and its operand are
then one value to a solver. What else the operation reads must then be there when the operand is computed, so
that it may only be what that reads too, inputs, and what was made before and is small or costs no memory:
while it is computed again, what the operand is computed of waits in the place of the operand, and is no
larger; and both together are no more than operand and result were beside it. So a residual is added into the
result of a batch normalisation.
"""

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from planner._torch import fake, operators
from planner._torch.execution.op_bindings import same_sizes, same_steps
from planner._torch.execution.sign_operators import MASK_GRADIENT, MASK_GRADIENT_
from planner._torch.joint import aot_metadata
from planner.graph.in_place import operator_in_place
from planner.graph.known_strides import has_one, with_known_strides
from planner.graph.passes.in_place_accumulation import is_sum_in_place
from planner.graph.replay import rule_of
from planner.graph.replay_rule import ReplayRule

aten = torch.ops.aten

_POSITION = "planner_written_into"
"""Key in a node's ``meta``: the position of the argument that its result is written into."""

RUNS_ONCE = "planner_runs_once"
"""Key in a node's ``meta``: it is of the forward, and no plan runs it again."""

_SMALL = 8
"""By how many times an operand must be smaller than a result to be small."""

_FIRST, _EITHER = (0,), (0, 1)

_AT_INDICES: dict[Any, tuple[tuple[int, ...], Any, Any]] = {
    aten.scatter.src: (_FIRST, aten.scatter_.src, None),
    aten.scatter.value: (_FIRST, aten.scatter_.value, None),
    aten.scatter_add.default: (_FIRST, aten.scatter_add_.default, None),
    aten.index_put.default: (_FIRST, aten.index_put_.default, None),
    aten.index_add.default: (_FIRST, aten.index_add_.default, None),
    aten.index_copy.default: (_FIRST, aten.index_copy_.default, None),
    aten.masked_scatter.default: (_FIRST, aten.masked_scatter_.default, None),
}
"""Operators that copy their first argument, and write others to some of its elements. Gradients of what reads
at indices are written into zeros by them."""

_WRITERS: dict[Any, tuple[tuple[int, ...], Any, Any]] = {
    **_AT_INDICES,
    aten.add.Tensor: (_EITHER, aten.add_.Tensor, aten.add.out),
    aten.sub.Tensor: (_EITHER, aten.sub_.Tensor, aten.sub.out),
    aten.mul.Tensor: (_EITHER, aten.mul_.Tensor, aten.mul.out),
    aten.div.Tensor: (_EITHER, aten.div_.Tensor, aten.div.out),
    aten.addmm.default: (_FIRST, aten.addmm_.default, None),
    aten.where.self: ((1, 2), None, aten.where.self_out),
    aten.add.Scalar: (_FIRST, aten.add_.Scalar, None),
    aten.sub.Scalar: (_FIRST, aten.sub_.Scalar, None),
    aten.mul.Scalar: (_FIRST, aten.mul_.Tensor, None),  # `mul_.Scalar` rounds the number
    aten.div.Scalar: (_FIRST, aten.div_.Scalar, None),
    aten.pow.Tensor_Scalar: (_FIRST, aten.pow_.Scalar, None),
    aten.masked_fill.Scalar: (_FIRST, aten.masked_fill_.Scalar, None),
    aten.masked_fill.Tensor: (_FIRST, aten.masked_fill_.Tensor, None),
    aten.tanh_backward.default: (_FIRST, None, aten.tanh_backward.grad_input),
    aten.sigmoid_backward.default: (_FIRST, None, aten.sigmoid_backward.grad_input),
    aten.threshold_backward.default: (_FIRST, None, aten.threshold_backward.grad_input),
    MASK_GRADIENT: (_FIRST, MASK_GRADIENT_, None),
    aten.gelu_backward.default: (_FIRST, None, aten.gelu_backward.grad_input),
    aten.silu_backward.default: (_FIRST, None, aten.silu_backward.grad_input),
    aten._softmax.default: (_FIRST, None, aten._softmax.out),
    aten._log_softmax.default: (_FIRST, None, aten._log_softmax.out),
    aten._softmax_backward_data.default: (_FIRST, None, aten._softmax_backward_data.out),
    aten._log_softmax_backward_data.default: (_FIRST, None, aten._log_softmax_backward_data.out),
    **{
        getattr(aten, name).default: (_FIRST, getattr(aten, f"{name}_").default, None)
        for name in ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "cos", "sin", "erf",
                     "tanh", "sigmoid", "relu", "silu")
    },
}  # fmt: skip
"""Operators that may write over an argument, which one, and by which operator, in place (the first) or by
``out=``. But for those at indices they compute each element of their result of the same element of their
arguments; a softmax, and its backward, of its row as well, all of which its kernels have read before they
write the first element."""


_LITTLE_SCRATCH = frozenset(
    {
        aten._native_batch_norm_legit_functional.default,
        *(aten.mm.default, aten.bmm.default, aten.addmm.default),
        *(_WRITERS.keys() - _AT_INDICES.keys()),
    }
)
"""Operators that allocate little besides their results while they run."""


_READ_APART = frozenset({*_AT_INDICES, aten.addmm.default})
"""Operators that read other elements of their further arguments than those that they write."""


class Writing(NamedTuple):
    """A call that writes its result into one of its arguments.

    Attributes:
        operator: The operator that is called.
        position: The position of the argument that is written into.
        keyword: The name of the parameter by which the operator takes that argument a second time; None if it
            writes to its first argument.
    """

    operator: Any
    position: int
    keyword: str | None

    def kwargs(self, node: Node) -> dict[str, Any]:
        """The arguments by name, of a node that is called so."""
        return (
            dict(node.kwargs) if self.keyword is None else {**node.kwargs, self.keyword: self.operand(node)}
        )

    def operand(self, node: Node) -> Node:
        """The argument that is written into."""
        operand = node.args[self.position]
        assert isinstance(operand, Node)
        return operand


def writing(node: Node) -> Writing | None:
    """How a node writes its result into an operand; None for all that allocate their results."""
    position = node.meta.get(_POSITION)
    if position is None or node.target not in _WRITERS:
        return None
    _, in_place, out = _WRITERS[node.target]
    if position == 0 and in_place is not None:
        return Writing(in_place, position, None)
    return Writing(out, position, operators.last_argument(out))


def forget(node: Node) -> None:
    """Make a node allocate its result again: take the mark away."""
    node.meta.pop(_POSITION, None)


def write_into_dying_operands(module: GraphModule) -> None:
    """Mark the operations of a joint graph that write into an operand; :func:`writing` tells how.

    Args:
        module: The graph, without dead code.
    """
    found = _Storages(module)
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        forget(node)
        for position in found.positions(node):
            if found.is_free(node, position):
                node.meta[_POSITION] = position
                found.merge(node, position)
                break


class _Storages:
    """Who makes and who reads the storages of a joint graph."""

    def __init__(self, module: GraphModule) -> None:
        self._same: dict[int, int] = {}  # the storages of views that have one of their own without data
        self._maker: dict[int, Node] = {}  # by storage
        self._bytes: dict[int, int] = {}  # by storage
        self._first: dict[int, int] = {}  # by storage: the one whose memory it is written into, or itself
        self._reads: dict[int, set[int]] = {}  # by storage: what its maker, and all that write into it, read
        self._readers: dict[int, list[Node]] = {}
        self._viewed: set[Node] = set()  # results that are written into a view
        self._backward = aot_metadata.backward_calls(module.graph)
        self._known_strides = with_known_strides(module)
        self._place = {node: place for place, node in enumerate(module.graph.nodes)}
        placeholders = module.graph.find_nodes(op="placeholder")
        mutated = aot_metadata.mutated_inputs(module)
        self._mutated = {
            self._key(tensor)
            for i, n in enumerate(placeholders)
            if i in mutated
            for tensor in _strided(n.meta.get("val"))
        }
        for node in module.graph.nodes:
            self._add(node)

    def _key(self, tensor: torch.Tensor) -> int:
        key = fake.storage_key(tensor)
        return self._same.get(key, key)

    def _add(self, node: Node) -> None:
        if node.target is aten._unsafe_view.default:
            # A view, though what PyTorch remembers of calls without data may be a tensor of its own.
            viewed, view = (self._key(n.meta["val"]) for n in (node.all_input_nodes[0], node))
            if view != viewed:
                self._same[view] = viewed
        values = {self._key(tensor): tensor for tensor in _strided(node.meta.get("val"))}
        keys = list(values)
        new = [key for key in keys if key not in self._maker]
        read = {self._key(t) for n in node.all_input_nodes for t in _strided(n.meta.get("val"))}
        for key in new:
            self._maker.setdefault(key, node)
            self._first[key] = key
            self._bytes[key] = fake.storage_bytes(values[key])
            self._reads[key] = read
        is_view = keys and not new and not operators.writes(node.target)
        if node.op in ("placeholder", "get_attr") or is_view or fake.is_size(node.meta.get("val")):
            return
        for key in read:
            self._readers.setdefault(key, []).append(node)

    def positions(self, node: Node) -> tuple[int, ...]:
        """The arguments of a node that it may write over, if they are free."""
        if node.target not in _WRITERS or operator_in_place(node) is not None:
            return ()
        value = node.meta.get("val")
        if (
            not isinstance(value, torch.Tensor)
            or not fake.is_fake(value)
            or value.layout is not torch.strided
        ):
            return ()
        if (
            type(rule_of(node)) is not ReplayRule
            or not value.is_floating_point()
            or self._maker[self._key(value)] is not node
        ):
            return ()
        read = {self._key(t) for n in node.all_input_nodes for t in _strided(n.meta.get("val"))}
        if read & self._mutated:
            return ()
        # Eager's sum has the strides of the first of two gradients, whatever those of the second.
        if is_sum_in_place(node):
            return _FIRST
        # In the memory of an operand a result has its strides, which must be those of a new one. Where it has
        # no dimension of one element, those of its operands are broadcast, and their strides are not read.
        if has_one(value) and not self._known_strides.issuperset((node, *node.all_input_nodes)):
            return ()
        return _WRITERS[node.target][0]

    def is_free(self, node: Node, position: int) -> bool:
        """Whether an argument of a node has the form of its result, and dies there."""
        operand = node.args[position] if position < len(node.args) else None
        if not isinstance(operand, Node) or not _same_form(operand.meta.get("val"), node.meta["val"]):
            return False
        if node.target in _READ_APART and node.args.count(operand) > 1:
            return False
        key = self._key(operand.meta["val"])
        maker = self._maker[self._first[key]]
        if maker.op != "call_function" or not operators.returns_no_views(maker.target):
            return False
        if operators.is_foreign(maker.target):
            return False
        once = RUNS_ONCE in maker.meta and all(self._runs_once(r) for r in self._readers[key])
        if not once and (maker in self._backward) is not (node in self._backward):
            return False
        others = {
            self._first[self._key(tensor)]: tensor
            for n in node.all_input_nodes
            if n is not operand
            for tensor in _strided(n.meta.get("val"))
        }
        readers = self._readers[key]
        if readers[-1] is not node or self._first[key] in others:
            return False
        if any(operators.reads_until_waited_for(reader.target) for reader in readers):
            return False
        if node in self._backward or once:
            return True
        # A view stays one: users may not write to what a function of autograd's returns as a view.
        if any(r is not node for r in readers) or (self._is_returned(node) and self._looks_at(operand)):
            return False
        first = self._first[key]
        read = {self._first[storage] for storage in self._reads[first]}
        waits = self._waits_for_free(first)
        return all(
            storage in read
            or self._maker[storage].op != "call_function"
            or (
                (waits or fake.storage_bytes(tensor) * _SMALL <= self._bytes[first])
                and self._place[self._maker[storage]] < self._place[maker]
            )
            for storage, tensor in others.items()
        )

    def _runs_once(self, node: Node) -> bool:
        return node in self._backward or RUNS_ONCE in node.meta

    def _waits_for_free(self, first: int) -> bool:
        """Whether all that a result is computed of is no larger than it, but for what is small."""
        if self._maker[first].target not in _LITTLE_SCRATCH:
            return False
        own = self._bytes[first]
        read = {self._first[storage] for storage in self._reads[first]} - {first}
        made = (self._bytes[storage] for storage in read if self._maker[storage].op == "call_function")
        return sum(size for size in made if size * _SMALL > own) <= own

    def merge(self, node: Node, position: int) -> None:
        """The result of a node is in the memory of an argument."""
        operand = node.args[position]
        assert isinstance(operand, Node)
        key, first = (self._key(n.meta["val"]) for n in (node, operand))
        self._first[key] = self._first[first]
        self._reads[self._first[key]] |= self._reads[key]
        if self._looks_at(operand):
            self._viewed.add(node)

    def _is_returned(self, node: Node) -> bool:
        return any(n.op == "output" for n in self._readers.get(self._key(node.meta["val"]), ()))

    def _looks_at(self, node: Node) -> bool:
        maker = self._maker[self._key(node.meta["val"])]
        return node in self._viewed or (node is not maker and node.target is not operator.getitem)


def _strided(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _strided(item)
    elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
        yield value


def _same_form(operand: Any, result: torch.Tensor) -> bool:
    """Whether an operand has the type, sizes and strides of a result, and the whole of its memory."""
    return (
        fake.is_fake(operand)
        and operand.layout is torch.strided
        and operand.dtype is result.dtype
        and operand.device == result.device
        and same_sizes(operand, result)
        and same_steps(operand, result)
        and fake.concrete_size(operand.storage_offset()) == 0
        and fake.storage_bytes(operand) == fake.storage_bytes(result) > 0
    )
