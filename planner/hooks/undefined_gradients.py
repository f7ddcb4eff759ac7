"""A planned backward in which some outputs of the graph get no gradient.

In eager, parameters that only those outputs depend on keep ``grad = None``. AOTAutograd traced one backward
and passes it zeros. That leaves gradients of zeros, by which weight decay and momentum differ, and multiplies
zeros with the values of the forward, infinities included. Here a variant of the backward runs, without the
operations that only the undefined gradients lead to. Hooks on tensors that get no gradient by that are not
called; the engine would call them with None.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from planner._torch import autograd, tensors
from planner._torch.joint import aot, aot_metadata
from planner._torch.joint.graph_modules import graph_module
from planner.compiled.graph_hook import GraphHook
from planner.errors import PlanMismatch
from planner.graph.dying_operands import forget
from planner.graph.memory_of_gradients import keep_gradients_apart
from planner.graph.passes.absent_gradients import leave_out, read_by_functions
from planner.graph.trace import TracedGraph


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
        self._leaves_out = False  # an input that needs a gradient gets none, even if all outputs have one
        # Set by a hook before an autograd node runs, read by its backward right after, in one thread.
        self._next_call = threading.local()

    def on_traced(self, traced: TracedGraph) -> None:
        # Output of the autograd node -> its gradient's position among the inputs of the backward.
        self._tangents = aot_metadata.tangent_positions(traced.joint, traced.forward_outputs)
        returned: Any = traced.joint.graph.output_node().args[0]
        places = aot_metadata.gradient_places(traced.joint)
        self._leaves_out = any(returned[place] is None for place in places.values())
        self.watches = bool(self._tangents)  # even a single one is missing where a later graph returns None

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
        inside = [
            tensors.HooksOn(x)
            for x in args
            if isinstance(x, torch.Tensor) and x.requires_grad and not x.is_leaf
        ]
        node.register_prehook(lambda gradients: self._look(gradients, inside))

    def results(self, node: Any, args: tuple[Any, ...], results: Sequence[Any]) -> Sequence[Any]:
        if node is not None and self.watches:
            for result in results:
                if isinstance(result, torch.Tensor) and result.grad_fn is node:
                    autograd.call_no_hooks_without_gradient(result)
        return results

    def _look(self, gradients: tuple[torch.Tensor | None, ...], inside: Sequence[tensors.HooksOn]) -> None:
        absent = frozenset(t for i, t in self._tangents.items() if gradients[i] is None)
        self._next_call.absent = absent or None  # over that of a backward that an error ended before it ran
        if absent or self._leaves_out:
            hooks = [found for one in inside if (found := one.there_now())]
            node = autograd.running_node()
            autograd.leave_out_functions_without_gradients(node)
            autograd.leave_out_hooks_without_gradients(node, hooks)

    def _variant(self, absent: frozenset[int]) -> aot.BoxedFunction:
        if absent not in self._variants:
            assert self._module is not None
            self._variants[absent] = self._compile(
                without_gradients(self._module, absent, len(self._tangents))
            )
        return self._variants[absent]


def without_gradients(module: GraphModule, absent: frozenset[int], count: int) -> GraphModule:
    """A backward graph without the operations that only absent gradients lead to.

    Args:
        module: The graph; the last ``count`` of its inputs are the gradients of the forward's outputs.
        absent: The gradients that are not there, by position among these.
        count: The number of outputs.

    Returns:
        A graph with the same inputs and outputs.

    Raises:
        PlanMismatch: What the backward of a user's function does then is not known.
    """
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    result = graph_module(module, graph)
    gradients = [n for n in graph.nodes if n.op == "placeholder"][-count:]
    gone = {gradients[i] for i in absent}
    _refuse_unknown_functions(graph, gradients, gone)
    for node in leave_out(graph, gradients, gone):
        forget(node)  # the operand that it writes its result into may be read again
    keep_gradients_apart(graph)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    result.recompile()
    return result


def _refuse_unknown_functions(graph: torch.fx.Graph, gradients: Sequence[Node], absent: set[Node]) -> None:
    for node, read in read_by_functions(graph, gradients, graph.output_node().all_input_nodes).items():
        if not read or (read & absent and read - absent):
            raise PlanMismatch(
                "some outputs of the module got no gradient, and a graph does not say what the backward of a "
                f"torch.autograd.Function does then (at {node.name}): plan with backend='replay', or "
                "train by the outputs that the plan was made with"
            )
