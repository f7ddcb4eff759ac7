"""A planned backward in which some outputs of the graph got no gradient.

In eager, parameters that only those outputs depend on then keep ``grad = None``. AOTAutograd passes zeros to
the one backward that it traced, which leaves gradients of zeros (weight decay and momentum differ then) and
multiplies zeros with the values of the forward, infinities included. Here a variant of the backward runs,
without everything that only the undefined gradients lead to.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from planner._torch import fake
from planner._torch.joint import aot, aot_metadata
from planner._torch.joint.graph_modules import graph_module
from planner._torch.tensors import call_tensors
from planner.compiled.graph_hook import GraphHook
from planner.graph.dying_operands import forget
from planner.graph.trace import TracedGraph

aten = torch.ops.aten


class UndefinedGradients(GraphHook):
    """The backward of one planned graph, in as many variants as the training loop needs.

    Args:
        compile_: Compiles a backward graph.
    """

    def __init__(self, compile_: Callable[[GraphModule], aot.BoxedFunction]) -> None:
        self._compile = compile_
        self._module: GraphModule | None = None
        self._tangents: Mapping[int, int] = {}
        self._variants: dict[frozenset[int], aot.BoxedFunction] = {}
        # Set by a hook before an autograd node runs, read by its backward right after, in one thread.
        self._next_call = threading.local()

    def on_traced(self, traced: TracedGraph) -> None:
        # Which output of the autograd node is the source of which gradient among the inputs.
        self._tangents = aot_metadata.tangent_positions(traced.joint, traced.forward_outputs)
        self.watches = len(self._tangents) >= 2

    def compile(self, module: GraphModule) -> aot.BoxedFunction:
        """The boxed function of a backward graph, whose last inputs are the gradients of the outputs."""
        whole = self._variants[frozenset()] = self._compile(module)
        self._module = module
        if not self.watches:
            return whole

        def run(args: list[Any]) -> Sequence[Any]:
            absent = self._next_call.__dict__.pop("absent", None)
            return whole(args) if absent is None else self._variant(absent)(args)

        return run

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        node.register_prehook(self._look)

    def _look(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        absent = frozenset(t for i, t in self._tangents.items() if gradients[i] is None)
        if absent:
            self._next_call.absent = absent

    def _variant(self, absent: frozenset[int]) -> aot.BoxedFunction:
        if absent not in self._variants:
            assert self._module is not None
            self._variants[absent] = self._compile(
                without_gradients(self._module, absent, len(self._tangents))
            )
        return self._variants[absent]


def without_gradients(module: GraphModule, absent: frozenset[int], count: int) -> GraphModule:
    """A backward graph without what absent gradients lead to.

    Args:
        module: The graph; the last ``count`` of its inputs are the gradients of the forward's outputs.
        absent: Which of those are not there, by position among them.
        count: How many there are.

    Returns:
        A graph with the same inputs and outputs. An output that only absent gradients lead to is None; where
        they are combined with others they are left out of sums, and are zeros elsewhere, as in the engine.
    """
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    result = graph_module(module, graph)
    gradients = [n for n in graph.nodes if n.op == "placeholder"][-count:]
    gone = {gradients[i] for i in absent}
    reached = set(gradients)  # by any gradient
    merged: set[int] = set()  # storages that are read instead of sums as well
    for node in list(graph.nodes):
        if node.op != "call_function" or reached.isdisjoint(node.all_input_nodes):
            continue
        reached.add(node)
        missing = [n for n in node.all_input_nodes if n in gone]
        if not missing:
            continue
        left = [n for n in node.all_input_nodes if n in reached and n not in gone]
        if not left:
            gone.add(node)
        elif _is_sum(node) and len(missing) == len(left) == 1:
            merged |= _storages([node, left[0]])
            node.replace_all_uses_with(left[0])
            graph.erase_node(node)
        else:
            for absentee in missing:
                with graph.inserting_before(node):
                    zeros = _zeros(graph, absentee.meta["val"])
                node.replace_input_with(absentee, zeros)
    for node in graph.nodes:
        if not merged.isdisjoint(_storages(node.all_input_nodes)):
            forget(node)  # what it writes its result into may be read again
    output = graph.output_node()
    output.args = (torch.fx.node.map_arg(output.args[0], lambda n: None if n in gone else n),)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    result.recompile()
    return result


def _storages(nodes: Sequence[Node]) -> set[int]:
    """The storages that nodes' tensors lie in."""
    return {fake.storage_key(value) for node in nodes for value in call_tensors(node.meta.get("val"))}


def _is_sum(node: Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    shapes = [n.meta["val"].shape for n in (node, *node.args) if isinstance(n, Node)]
    return len(shapes) == 3 and shapes[0] == shapes[1] == shapes[2]


def _zeros(graph: torch.fx.Graph, like: Any) -> Node:
    if isinstance(like, list | tuple):
        raise AssertionError("a member of a tuple is taken before it is used")
    options = {"dtype": like.dtype, "device": like.device}
    node = graph.call_function(aten.zeros.default, (list(like.shape),), options)
    node.meta = {"val": like}
    return node
