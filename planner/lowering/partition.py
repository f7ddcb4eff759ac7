"""From a schedule to the forward and the backward graph that a plan runs.

Every operation of the backward sequence becomes a node; an operation that is re-run becomes a fresh node each
time. A result of the forward that the backward needs is *saved*: it is an output of the forward graph and an
input of the backward graph. A view is saved as it is where its base is saved, and taken again where its base
is computed again. Views of inputs, and inputs that re-runs read, are taken from an alias or a copy that the
forward makes. Symbolic sizes are saved as numbers.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from planner._torch import fake
from planner._torch.execution.host_place import HostPlace
from planner._torch.joint import aot_metadata
from planner._torch.joint.graph_modules import graph_module
from planner._torch.tensors import strided_copy
from planner.errors import CaptureError
from planner.graph.joint_graph import JointGraph, JointOp
from planner.graph.overwritten import InputReads, alias
from planner.graph.replay.packed import PACKED, bits_of, is_mask, is_packable, read_sizes
from planner.graph.replay_rule import ReplayRule
from planner.graph.signs import emit_masked, gradient_of, relu_before, save_signs, signs_of
from planner.lowering.transfers import begin_to_send, check_transfers, node_to_send, on_host

Role = Literal["forward", "backward"]
"""Which half of a step a graph is."""

_USER_OUTPUTS = "user_outputs"
_UNCHECKED = "saved_tensor_with_no_vc_check"
RUN_TOGETHER = "planner_run_together"
"""Key in a node's ``meta``: a number that a re-run shares with the operations that write over its result.
They are one step of the schedule, and values that they read are freed at its end."""


@dataclass(frozen=True)
class Partition:
    """The two graphs of one captured graph.

    Attributes:
        forward: Takes the primals; returns the forward outputs, then saved tensors, then saved sizes.
        backward: Takes saved sizes, saved tensors and the tangents; returns the gradients.
        saved: The forward's nodes that are saved.
        read_again: The forward's inputs that only re-runs read in the backward.
    """

    forward: GraphModule
    backward: GraphModule
    saved: tuple[Node, ...]
    read_again: tuple[Node, ...] = ()


def partition(
    joint: JointGraph,
    backward: Sequence[int],
    *,
    copying: bool = False,
    packed: Collection[int] = (),
    host: HostPlace | None = None,
    completed: Mapping[int, int] | None = None,
) -> Partition:
    """Emit the graphs that run a schedule.

    Args:
        joint: The captured graph.
        backward: The operations that the backward runs, by index, in order; forward operations
            among them are re-runs.
        copying: Re-runs read copies of ``joint.to_copy``.
        packed: Operations, by index. A forward operation among them leaves its mask as bits, and its re-run
            unpacks them. A backward operation among them is ReLU's, and reads its signs from bits.
        host: Where what is packed is kept, masks as bits and other results as they are; None for masks alone,
            on the device.
        completed: For each operation whose result is sent, the operation after which it must have arrived, if
            that is not the last one that writes it.

    Raises:
        CaptureError: If the backward needs an input that the step overwrites.
    """
    kept = frozenset(joint.ops[index] for index in packed if index < joint.forward_length)
    read_sizes(joint.graph, [op.node for op in kept if is_mask(op.node)])
    signs = {joint.ops[i]: relu for i in packed if (relu := relu_before(joint, joint.ops[i])) is not None}
    body = _Backward(joint, joint.to_copy if copying else frozenset(), kept, signs, host)
    for index in backward:
        body.run(joint.ops[index])
    body.finish()
    forward, saved = _forward(joint, body, completed or {})
    if host is not None:
        for graph in (forward.graph, body.graph):
            check_transfers(graph, host)
    read_again = tuple(p for p in body.read_again if p not in body.read)
    return Partition(forward, graph_module(joint.module, body.graph), saved, read_again)


def user_outputs(forward: GraphModule) -> int | None:
    """How many outputs of an emitted forward, from the first, go to the user; None if it was not emitted."""
    count: int | None = forward.graph.output_node().meta.get(_USER_OUTPUTS)
    return count


def no_recomputation(joint: JointGraph) -> list[int]:
    """The backward sequence that re-runs nothing."""
    return list(range(joint.forward_length, len(joint.ops)))


class _Backward:
    """The backward graph while it grows.

    A storage's *version* counts its re-runs. A node of the joint graph corresponds to another node of this
    graph in each version of the storages that it views.
    """

    def __init__(
        self,
        joint: JointGraph,
        to_copy: Collection[Node],
        packed: Collection[JointOp],
        signs: Mapping[JointOp, JointOp],
        host: HostPlace | None,
    ) -> None:
        self.joint, self._to_copy, self.packed = joint, to_copy, packed
        self._relu_of, self.signs, self.host = signs, frozenset(signs.values()), host
        self.sent = {} if host is None else {op: node_to_send(joint, op) for op in packed}
        self.reads = InputReads(joint)
        self.taken: dict[tuple[Node, bool], Node] = {}  # of an input, or of its copy
        self.read: set[Node] = set()  # inputs, by the backward's own operations
        self.read_again: dict[Node, None] = {}  # inputs, not copies of them, by re-runs
        self._views: dict[tuple[Node, bool], Node] = {}
        self.graph = FxGraph()
        self.saved: dict[Node, Node] = {}
        self.states: dict[JointOp, Node] = {}
        self.sizes: dict[Node, Node] = {}
        self._steps = 0  # number of re-runs so far
        self._version = [0] * len(joint.storage_bytes)
        self._current: dict[Node, tuple[tuple[int, ...], Node]] = {}
        self._fetching: dict[Node, Node] = {}
        self.backward_nodes = _backward_nodes(joint)
        self._early_sizes = _sizes_of_forward(joint, self.backward_nodes)
        self._mutated = {joint.primals[i] for i in joint.mutated if i < len(joint.primals)}
        self._tangents = {n: self._placeholder(n.name, n) for n in joint.tangents}

    def run(self, op: JointOp) -> None:
        """Append an operation: a backward one, or a forward one again."""
        if op.backward:
            relu = self._relu_of.get(op)
            emitted = self.graph.node_copy(op.node, self.node) if relu is None else self._masked(op, relu)
            self._current[op.node] = (self._versions(op.node), emitted)
            for user in op.node.users:
                # Read only at its first use, a size would keep the tensor alive until then.
                if self.joint.is_size(user) and user.all_input_nodes == [op.node]:
                    self._size(user)
            return
        if op in self.sent:
            self._fetch(op, self.sent[op])
            return
        node = self._again(op)
        node.meta = {**op.node.meta, "val": self.rule(op).values_again(op.node)}
        for storage in op.allocates if op in self.packed else op.allocates_again:
            self._version[storage] += 1
        self._current[op.node] = (self._versions(op.node), node)
        self._steps += 1
        for writer in op.writers:
            emitted = writer.rule.emit_again(self.graph, writer.node, self._node_again, None)
            self._current[writer.node] = (self._versions(writer.node), emitted)
            node.meta[RUN_TOGETHER] = emitted.meta[RUN_TOGETHER] = self._steps

    def _masked(self, op: JointOp, relu: JointOp) -> Node:
        self.states[relu] = signs = self._placeholder(f"{relu.node.name}_signs", None)
        signs.meta["val"] = torch.empty(fake.storage_bytes(signs_of(relu)), dtype=torch.uint8, device="meta")
        return emit_masked(self.graph, op, self.node(gradient_of(op)), signs)

    def _fetch(self, op: JointOp, sent: Node) -> None:
        assert self.host is not None
        self._wait_for(sent)
        if op not in self.states:
            self.states[op] = kept = self._placeholder(f"{sent.name}_on_host", None)
            kept.meta["val"] = torch.empty(0, dtype=torch.uint8)
        node = self.graph.call_function(self.host.fetch, (self.states[op],))
        if is_packable(sent):
            node.meta["val"] = bits_of(sent.meta["val"])
            node = PACKED.emit_again(self.graph, sent, self._node_again, self._fetched(node))
        else:
            self._fetching[sent] = node
        node.meta = dict(sent.meta)
        self._version[self.joint.storage_of[sent]] += 1
        self._current[sent] = (self._versions(sent), node)

    def _wait_for(self, sent: Node) -> None:
        if sent in self._fetching:
            node = self._fetched(self._fetching.pop(sent))
            self._current[sent] = (self._versions(sent), node)

    def _fetched(self, node: Node) -> Node:
        assert self.host is not None
        fetched = self.graph.call_function(self.host.fetched, (node,))
        fetched.meta = dict(node.meta)
        return fetched

    def _again(self, op: JointOp) -> Node:
        state = self.rule(op).state(op.node)
        if state is not None and op not in self.states:
            placeholder = self._placeholder(f"{op.node.name}_{state.name}", None)
            placeholder.meta["val"] = torch.empty(state.bytes, dtype=torch.uint8, device="meta")
            self.states[op] = placeholder
        return self.rule(op).emit_again(self.graph, op.node, self._node_again, self.states.get(op))

    def rule(self, op: JointOp) -> ReplayRule:
        """How an operation runs again."""
        return PACKED if op in self.packed else op.rule

    def node(self, original: Node) -> Node:
        """The node that stands for a joint node at this point, saved or emitted as needed."""
        if original in self._tangents:
            return self._tangents[original]
        if original.op == "get_attr":
            return self.graph.node_copy(original)
        if self.joint.is_size(original):
            return self._size(original)
        versions = self._versions(original)
        if original not in self.backward_nodes and not any(versions):
            inputs = self.reads.of(original)
            self.read.update(inputs)
            return self._save(original) if inputs in ((), (original,)) else self._view(original, False)
        self._wait_for(original)  # of those that read it the first waits
        current = self._current.get(original)
        if current is not None and current[0] == versions:
            return current[1]
        if not self.joint.is_view(original):
            raise AssertionError(f"schedule uses {original} before it is computed")
        node = self.graph.node_copy(original, self.node)
        self._current[original] = (versions, node)
        return node

    def _node_again(self, original: Node) -> Node:
        """The node that stands for a joint node that a re-run reads: inputs as they were in the forward."""
        inputs = self.reads.of(original)
        if not inputs or original in self.backward_nodes or any(self._versions(original)):
            return self.node(original)
        self.read_again.update(dict.fromkeys(p for p in inputs if p not in self._to_copy))
        return self._view(original, any(p in self._to_copy for p in inputs))

    def _view(self, original: Node, copy: bool) -> Node:
        """An input as the forward saw it, or a view of that: from an alias that the forward takes, or a copy.

        Autograd saves such a view too. It keeps the memory that the input had, even if the input gets
        another.
        """
        if self.joint.is_size(original):
            return self._size(original)
        if original.op == "placeholder":
            key = (original, copy and original in self._to_copy)
            if key not in self.taken:
                self.taken[key] = self._placeholder(
                    f"{original.name}_{'copy' if key[1] else 'alias'}", original
                )
            return self.taken[key]
        node = self._views.get((original, copy))
        if node is None:
            node = self.graph.node_copy(original, lambda n: self._view(n, copy))
            self._views[original, copy] = node
        return node

    def finish(self) -> None:
        """Emit the outputs."""
        for sent in list(self._fetching):
            self._wait_for(sent)
        self.graph.output(map_arg(list(self.joint.outputs[1]), self.node))

    def _size(self, original: Node) -> Node:
        node = self.sizes.get(original)
        if node is None and original in self._early_sizes:
            node = self.sizes[original] = self._placeholder(original.name, original)
        if node is not None:
            return node
        if original not in self._current:
            self._current[original] = ((), self.graph.node_copy(original, self.node))
        return self._current[original][1]

    def _save(self, original: Node) -> Node:
        node = self.saved.get(original)
        if node is None:
            if original in self._mutated:
                raise CaptureError(
                    f"the backward needs the value that input {original.name} had before the forward "
                    "changed it in place; change a copy in the module's forward instead"
                )
            node = self.saved[original] = self._placeholder(original.name, original)
        return node

    def _placeholder(self, name: str, original: Node | None) -> Node:
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        if original is not None:
            node.meta = dict(original.meta)
        return node

    def _versions(self, node: Node) -> tuple[int, ...]:
        storages = self.joint.storages_of(node)
        return tuple(self._version[s] for s in storages)


def _forward(
    joint: JointGraph, body: _Backward, completed: Mapping[int, int]
) -> tuple[GraphModule, tuple[Node, ...]]:
    graph = FxGraph()
    env: dict[Node, Node] = {}
    for primal in joint.primals:
        env[primal] = graph.node_copy(primal)
    outputs, _ = joint.outputs
    unchecked = _unchecked(joint, body.saved)
    saved = sorted(body.saved, key=lambda n: n in unchecked)
    state_of: dict[JointOp, Node] = {}

    def node(original: Node) -> Node:
        if original not in env:
            index = joint.op_of.get(original)
            emit_node = graph.node_copy if index is None else partial(joint.ops[index].rule.emit_first, graph)
            env[original] = emit_node(original, node)
        return env[original]

    first_readers = body.reads.first_readers()
    taken_as: dict[tuple[Node, bool], Node] = {}
    for primal, copy in body.taken:
        if not copy:
            taken_as[primal, copy] = _taken(graph, env[primal], alias)

    sizes = _sizes_after(joint, body.backward_nodes, body.sizes)
    for size in sizes.get(-1, ()):
        node(size)
    host = body.host
    sending = {joint.op_of.get(sent, op.index): op for op, sent in body.sent.items() if op in body.states}
    completing: dict[int, list[tuple[JointOp, HostPlace, Node, Node]]] = {}
    for op in joint.ops[: joint.forward_length]:
        if op in body.states and op not in body.packed and op not in body.signs:
            state_of[op] = op.rule.save_state(graph, op.node)
            state_of[op].meta["val"] = torch.empty(0, dtype=torch.uint8)
        for primal in first_readers.get(op.index, ()):
            if (primal, True) in body.taken:
                taken_as[primal, True] = _taken(graph, env[primal], strided_copy)
        node(op.node)
        if host is not None and (sender := sending.get(op.index)) is not None:
            kept, value = begin_to_send(graph, host, body.sent[sender], node)
            last = max(completed.get(sender.index, op.index), op.index)
            completing.setdefault(last, []).append((sender, host, kept, value))
        for sender, place, kept, value in completing.get(op.index, ()):
            state_of[sender] = on_host(graph, place.sent, kept, value)
        if op in body.states and op in body.packed and op not in body.sent:
            state_of[op] = PACKED.save_state(graph, node(op.node))
        if op in body.signs:
            state_of[op] = save_signs(graph, op, node(op.node))
        for size in sizes.get(op.index, ()):
            node(size)
    wanted = [*outputs, *saved, *body.sizes]
    results = map_arg(wanted, node)
    for original in {*saved, *body.sizes} - unchecked:
        env[original].meta.pop(_UNCHECKED, None)
    states = [state_of[op] for op in body.states]
    taken = [taken_as[key] for key in body.taken]
    graph.output([*results[: len(outputs)], *states, *taken, *results[len(outputs) :]])
    graph.output_node().meta[_USER_OUTPUTS] = len(outputs)

    tensors = [*body.states.values(), *body.taken.values(), *(body.saved[n] for n in saved)]
    _order_placeholders(body, [*body.sizes.values(), *tensors])
    return graph_module(joint.module, graph), tuple(saved)


def _unchecked(joint: JointGraph, saved: Iterable[Node]) -> set[Node]:
    """Saved nodes that may be changed in place until the backward, as attributes of a user's ``ctx`` may.

    PyTorch holds such tensors beyond the backward. Tensors inside the graph are left out: nobody else can
    change them, so they are saved like all others, and freed at their last use.
    """
    around = (n for n in (*joint.primals, *joint.outputs[0]) if isinstance(n, Node))
    reached = {s for n in around for s in joint.storages_of(n)}

    def within(node: Node) -> bool:
        storages = joint.storages_of(node)
        return bool(storages) and reached.isdisjoint(storages)

    return {n for n in saved if n.meta.get(_UNCHECKED) and not within(n)}


def _taken(graph: FxGraph, source: Node, function: Callable[..., Any]) -> Node:
    node = graph.call_function(function, (source,))
    node.meta["val"] = source.meta["val"]
    return node


def _order_placeholders(body: _Backward, saved: list[Node]) -> None:
    ordered = [*saved, *body._tangents.values()]
    first_other = next(n for n in body.graph.nodes if n.op != "placeholder")
    for placeholder in ordered:
        first_other.prepend(placeholder)


def _sizes_of_forward(joint: JointGraph, backward_nodes: set[Node]) -> set[Node]:
    """Symbolic numbers that the forward can compute: of its inputs and of the tensors it makes."""
    found: set[Node] = set()
    for node in joint.graph.nodes:
        if not joint.is_size(node) or node in joint.tangents:
            continue
        sources = node.all_input_nodes
        if all(n in found if joint.is_size(n) else n not in backward_nodes for n in sources):
            found.add(node)
    return found


def _sizes_after(
    joint: JointGraph, backward_nodes: set[Node], wanted: Iterable[Node]
) -> dict[int, list[Node]]:
    """After which operation of the forward (-1: before all) each symbolic number can be computed.

    Computed only at its first use, a size would keep the tensor that it is read from alive until then.
    """
    after: dict[Node, int] = {}
    found: dict[int, list[Node]] = {}
    wanted = set(wanted)
    for node in joint.graph.nodes:
        sources = [after[n] for n in node.all_input_nodes if n in after]
        after[node] = joint.op_of.get(node, max(sources, default=-1))
        forward = node in wanted or any(u not in backward_nodes for u in node.users)
        if joint.is_size(node) and node.op != "placeholder" and forward:
            found.setdefault(after[node], []).append(node)
    return found


def _backward_nodes(joint: JointGraph) -> set[Node]:
    """Nodes that belong to the backward: its operations, and views taken in it or of its results."""
    return {*joint.tangents, *aot_metadata.backward_calls(joint.graph)}
