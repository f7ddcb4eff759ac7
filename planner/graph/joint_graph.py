"""A joint graph read as operations on storages.

AOTAutograd gives one torch.fx graph of forward and backward ATen operators. This module says what
in it is an operation (allocates storage), what is a view (re-emitted wherever it is needed), which
storage each node lives in, and in which form an operation may be run a second time. Both the
problem (what a solver sees) and the rewriter (what is emitted) are built on this one reading.
"""

import hashlib
import operator
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from planner._torch import fake, operators
from planner._torch.joint import aot_metadata
from planner._torch.joint.effects import has_effects
from planner._torch.module_paths import marks_of, module_of
from planner._torch.tensors import call_tensors, stored_elements
from planner.graph.dying_operands import RUNS_ONCE, write_into_dying_operands, writing
from planner.graph.replay import rule_of
from planner.graph.replay_rule import ReplayRule
from planner.training_step.user_lines import users_line

aten = torch.ops.aten

INPUT = "input"
"""Name of an input among the operations."""

RESIDENT = -1
"""Storage number of all tensors that live outside the schedule: parameters, buffers, inputs, constants."""


@dataclass(frozen=True, eq=False)
class JointOp:
    """One operation of a joint graph, or an input of its forward that a plan may keep on the host.

    Attributes:
        index: Its stable index: position among the graph's operations.
        node: Its node.
        backward: Whether it was traced in the backward.
        reads: Storage numbers of its tensor inputs, without resident ones, each once.
        allocates: Storage numbers that it allocates, in order of its outputs.
        rule: The way to run it again.
        reads_mutated: Whether a second run reads an input that the step overwrites.
        written: The storage of another operation that it writes its result into; None if it allocates one.
        writers: The operations that write their results into a storage that this one, of the forward,
            allocates, in order. They run again with it, and not without.
    """

    index: int
    node: Node
    backward: bool
    reads: tuple[int, ...]
    allocates: tuple[int, ...]
    rule: ReplayRule
    reads_mutated: bool
    written: int | None = None
    writers: list["JointOp"] = field(default_factory=list)

    @property
    def recomputable(self) -> bool:
        """Whether a second run, in its replay form, gives the same values and touches nothing else. An input
        has no second run."""
        target = self.node.target
        if self.backward or not operators.is_operator(target) or has_effects(target):
            return False
        if self.written is not None or RUNS_ONCE in self.node.meta:
            return False
        return self.rule.repeatable(self.node) and not self.reads_mutated

    @property
    def line(self) -> str | None:
        """The user's line that it comes from, as in ``net.py:12``."""
        return users_line(self.node.meta.get("stack_trace"))

    @property
    def read_again(self) -> Sequence[Node]:
        """The nodes that a second run reads, the second runs of :attr:`writers` included."""
        found = dict.fromkeys(self.rule.reads_again(self.node))
        for writer in self.writers:
            found.update(dict.fromkeys(writer.node.all_input_nodes))
        return list(found)

    @property
    def is_input(self) -> bool:
        """Whether it is an input that another graph hands on to this one."""
        return self.node.op == "placeholder"

    @property
    def allocates_again(self) -> tuple[int, ...]:
        """Storage numbers that a second run allocates; of an input, what it takes when it is fetched."""
        if self.is_input:
            return self.reads
        values = self.rule.values_again(self.node)
        if values is self.node.meta.get("val"):
            return self.allocates
        results = {fake.storage_key(t) for t in call_tensors(values)}
        keep = [fake.storage_key(t) in results for t in call_tensors(self.node.meta["val"])]
        return tuple(s for s, kept in zip(self.allocates, keep, strict=True) if kept)

    @property
    def name(self) -> str:
        """Operator name, such as ``aten.mm.default``."""
        return INPUT if self.is_input else str(self.node.target)

    @cached_property
    def module(self) -> str:
        """Name of the module that it came from, as in ``named_modules()``; "" for the root."""
        return module_of(self.node)

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Marks of the blocks that it came from, ``number kind name``, outermost first."""
        return tuple(marks_of(self.node).split("\n")) if marks_of(self.node) else ()


@dataclass(eq=False)
class JointGraph:
    """The reading of one joint graph; see the module's docstring.

    Args:
        graph: The graph, without dead code.
        forward_outputs: How many of its outputs belong to the forward.
        mutated: Indices of the inputs that the step overwrites.
        handed: Positions of the inputs that are the first of its operations: other graphs hand them on to
            this one, and they may be kept on the host.

    Attributes:
        to_copy: Inputs of which re-runs read copies where users overwrite them, see
        `planner.graph.overwritten`.
    """

    graph: FxGraph
    module: GraphModule
    forward_outputs: int
    mutated: frozenset[int] = frozenset()
    handed: frozenset[int] = frozenset()

    ops: list[JointOp] = field(default_factory=list, init=False)
    storage_bytes: list[int] = field(default_factory=list, init=False)
    storage_of: dict[Node, int] = field(default_factory=dict, init=False)
    op_of: dict[Node, int] = field(default_factory=dict, init=False)
    to_copy: frozenset[Node] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        self._keys: dict[int, int] = {}
        self._maker: dict[int, JointOp] = {}
        self._read()

    @cached_property
    def primals(self) -> list[Node]:
        """Inputs of the forward."""
        return [n for n in self.graph.nodes if n.op == "placeholder" and "tangents" not in n.name]

    @cached_property
    def tangents(self) -> list[Node]:
        """Gradients of the forward's outputs, the inputs of the backward."""
        return [n for n in self.graph.nodes if n.op == "placeholder" and "tangents" in n.name]

    @cached_property
    def outputs(self) -> tuple[list[Any], list[Any]]:
        """Output nodes (or constants) of the forward and of the backward."""
        flat = list(self.graph.output_node().args[0])  # type: ignore[arg-type]
        return flat[: self.forward_outputs], flat[self.forward_outputs :]

    @cached_property
    def forward_length(self) -> int:
        """Number of forward operations; they come first in ``ops``."""
        return sum(not op.backward for op in self.ops)

    @cached_property
    def read_in_backward(self) -> dict[int, list[JointOp]]:
        """The operations of the backward that read each storage, by its number."""
        readers: dict[int, list[JointOp]] = {}
        for op in self.ops[self.forward_length :]:
            for storage in op.reads:
                readers.setdefault(storage, []).append(op)
        return readers

    def is_view(self, node: Node) -> bool:
        """Whether a node is a view of storages that other nodes allocated."""
        return node.op == "call_function" and node not in self.op_of and not self.is_size(node)

    def is_size(self, node: Node) -> bool:
        """Whether a node is a symbolic number, which takes no memory: a size, or computed from sizes."""
        return fake.is_size(node.meta.get("val"))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of operators, their wiring, and all shapes, dtypes and constants."""
        digest = hashlib.sha256()
        numbers = self._numbers()
        for node in self.graph.nodes:
            line = f"{node.op} {node.target if node.op == 'call_function' else ''} "
            line += (
                _written(node.args, numbers) + _written(node.kwargs, numbers) + _shape(node.meta.get("val"))
            )
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()

    def _numbers(self) -> dict[Node, int]:
        """A number of each node: its place, but one for all inputs that hold equal objects. It is chance from
        which of the parameters on a mesh a gradient has it."""
        numbers: dict[Node, int] = {}
        held: list[tuple[object, int]] = []
        for place, node in enumerate(self.graph.nodes):
            numbers[node] = place
            if (found := fake.held_object(node.meta.get("val"))) is not None:
                numbers[node] = next((number for one, number in held if one == found), place)
                held.append((found, numbers[node]))
        return numbers

    # ---- reading -----------------------------------------------------------------------------------

    def _read(self) -> None:
        written_inputs = self._read_inputs()
        in_backward = aot_metadata.backward_calls(self.graph)
        for node in self.primals:
            if aot_metadata.input_position(node) in self.handed and node in self.storage_of:
                reads = (self.storage_of[node],)
                self.ops.append(JointOp(len(self.ops), node, False, reads, (), rule_of(node), False))
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if node.op == "get_attr":
                if isinstance(node.meta.get("val", getattr(self.module, node.target, None)), torch.Tensor):
                    self.storage_of[node] = RESIDENT
            elif node.op != "call_function" or self.is_size(node):
                continue
            elif fake.held_object(value) is not None:
                continue  # a part of a mesh: traced only where nothing asked for it before in this process
            elif node.target is operator.getitem:
                if isinstance(value, torch.Tensor):
                    self.storage_of[node] = self._storage(value)
            else:
                self._read_call(node, written_inputs, backward=node in in_backward)

    def _read_inputs(self) -> set[int]:
        """Give each input a storage of its own; returns the storages of those that the graph writes to.

        Activations handed over by an earlier graph and tangents are inputs too: the problem decides which of
        them are dynamic.
        """
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        self._on_gpu = any(t.is_cuda for n in placeholders for t in call_tensors(n.meta.get("val")))
        for node in placeholders:
            if isinstance(value := node.meta.get("val"), torch.Tensor):
                self.storage_of[node] = self._storage(value)
        written = (node for i, node in enumerate(placeholders) if i in self.mutated)
        return {self.storage_of[node] for node in written if node in self.storage_of}

    def _read_call(self, node: Node, written_inputs: Set[int], *, backward: bool) -> None:
        """Read a call: an operation, unless it only hands on memory that is there."""
        reads, written = self._memory_of(node)
        value = node.meta.get("val")
        known = len(self.storage_bytes)
        numbers = [self._storage(tensor) for tensor in call_tensors(value)]
        allocates = tuple(dict.fromkeys(number for number in numbers if number >= known))
        if isinstance(value, torch.Tensor):
            self.storage_of[node] = self._storage(value)
        if not allocates and reads and _is_aliasing(node) and written is None:
            return
        rule = rule_of(node)
        read_again = [s for n in rule.reads_again(node) for s in self.storages_of(n)]
        op = JointOp(
            index=len(self.ops),
            node=node,
            backward=backward,
            reads=reads,
            allocates=allocates,
            rule=rule,
            reads_mutated=not written_inputs.isdisjoint(read_again),
            written=written,
        )
        self._maker.update(dict.fromkeys(allocates, op))
        if written is not None and not backward and RUNS_ONCE not in node.meta:
            self._maker[written].writers.append(op)
        self.op_of[node] = op.index
        self.ops.append(op)

    def _memory_of(self, node: Node) -> tuple[tuple[int, ...], int | None]:
        """The storages that a call reads, and the one that it writes in place; its result lies there."""
        reads = tuple(dict.fromkeys(s for i in node.all_input_nodes for s in self.storages_of(i)))
        call = writing(node)
        written = None if call is None else self.storage_of[call.operand(node)]
        first: Any = node.args[0] if node.args else None
        if operators.waits(node.target) and first in self.op_of:
            # As if it wrote the result, while what is reduced or gathered is still read.
            written = self.storage_of[first]
            if operators.reads_until_waited_for(first.target):
                reads = tuple(dict.fromkeys((*reads, *self.ops[self.op_of[first]].reads)))
        if node.target is torch.ops.aten._unsafe_view.default and first in self.storage_of:
            # A view, though what PyTorch remembers of calls without data may be a tensor of its own.
            self._keys[fake.storage_key(node.meta["val"])] = self.storage_of[first]
        if written is not None:
            self._keys[fake.storage_key(node.meta["val"])] = written
        return reads, written

    def _storage(self, tensor: torch.Tensor) -> int:
        if tensor.layout is not torch.strided:
            self.storage_bytes.append(
                int(stored_elements(tensor) * tensor.element_size()) if tensor.is_sparse else 0
            )
            return len(self.storage_bytes) - 1
        key = fake.storage_key(tensor)
        number = self._keys.get(key)
        if number is None:
            number = self._keys[key] = len(self.storage_bytes)
            on_host = self._on_gpu and tensor.device.type == "cpu"  # takes none of the device's memory
            self.storage_bytes.append(0 if on_host else fake.storage_bytes(tensor))
        return number

    def storages_of(self, node: Node) -> list[int]:
        """Numbers of the storages that a node's tensors live in, without resident ones."""
        if node in self.storage_of:
            number = self.storage_of[node]
            return [] if number == RESIDENT else [number]
        return [self._storage(v) for v in call_tensors(node.meta.get("val"))]


def read_joint(module: GraphModule, forward_outputs: int, handed: frozenset[int] = frozenset()) -> JointGraph:
    """Drop dead code of a joint graph, in place, and read it.

    Args:
        module: The graph.
        forward_outputs: How many of its outputs belong to the forward.
        handed: As for :class:`JointGraph`.
    """
    mutated = aot_metadata.mutated_inputs(module)
    module.graph.eliminate_dead_code(is_impure_node=_is_impure)
    write_into_dying_operands(module)
    return JointGraph(module.graph, module, forward_outputs, mutated, handed)


def nodes_in(tree: Any) -> Iterator[Node]:
    """Nodes anywhere in nested arguments."""
    if isinstance(tree, Node):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from nodes_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from nodes_in(item)


def _is_aliasing(node: Node) -> bool:
    return not operators.uses_generator(node.target) and bool(call_tensors(node.meta.get("val")))


def _is_impure(node: Node) -> bool:
    # Only effects matter: a random operation that nobody reads must still advance the generator.
    return node.op in ("placeholder", "output") or operators.uses_generator(node.target) or node.is_impure()


def _written(tree: Any, numbers: dict[Node, int]) -> str:
    if isinstance(tree, Node):
        return f"%{numbers[tree]}"
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return "[" + ",".join(_written(x, numbers) for x in tree) + "]"
    if isinstance(tree, dict):
        return "{" + ",".join(f"{k}={_written(v, numbers)}" for k, v in tree.items()) + "}"
    return repr(tree)


def _shape(value: Any) -> str:
    tensors = call_tensors(value)
    return ";".join(f"{tuple(t.shape)}{t.stride()}{t.dtype}{t.device.type}" for t in tensors)
