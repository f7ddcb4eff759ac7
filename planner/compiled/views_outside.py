"""Views of inputs that a graph returns are taken before the graph, and become inputs of it.

In eager the engine adds up the gradients of a view's uses at the view, and passes the sum on to the view's
base. AOTAutograd takes a view that a graph returns after the graph, from the input. The gradients that come
through the view would then be added to the input's other gradients one by one, in another order. So the view
is taken before the graph. A use of the input before the view is taken gets an alias of the input, made at
that use. The nodes of views and aliases run in the reverse order of their making, as in eager.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from planner._torch import fake, pytree
from planner._torch.joint.graph_modules import graph_module, tell_sizes_alone
from planner._torch.tensors import transform_depth, writes
from planner.graph.dynamo_graph import copied, views_handed_on

_ONE_USE = "planner_one_use"
"""Key in a node's ``meta``, of an input that is an alias for a single use of another input."""


@dataclass(frozen=True)
class ViewsOutside:
    """A Dynamo graph that takes views of its inputs as further inputs.

    Attributes:
        rest: The graph without these views.
        views: A graph that takes the views, given the inputs of Dynamo's graph.
    """

    rest: GraphModule
    views: GraphModule

    def inputs(self, given: Sequence[Any]) -> list[Any]:
        """The inputs of :attr:`rest`."""
        return [*given, *self.views(*given)]

    def around(self, rest: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the inputs of Dynamo's graph, given a function of the inputs of :attr:`rest`."""
        views = self.views
        return lambda *args: rest(*args, *views(*args))


def views_outside(graph: GraphModule) -> ViewsOutside | None:
    """Move the views of inputs that a Dynamo graph returns out of the graph; None if it returns none.

    Call it with gradients on or off as they will be when the graph runs. A graph that changes an input in
    place keeps its views.
    """
    views = _views(graph) if torch.is_grad_enabled() else {}
    return _taken_apart(graph, views) if views else None


def compile_with_views_outside(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    compile_: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile a graph while Dynamo captures it; the views that it returns are taken before it."""
    apart = views_outside(graph)
    if apart is None:
        return compile_(graph, example_inputs)
    # Examples without data, so that their sizes have Dynamo's symbols: new views would get other symbols.
    added = apart.rest.graph.find_nodes(op="placeholder")[len(example_inputs) :]
    examples = [n.meta["example_value"].detach().requires_grad_() for n in added]
    call = compile_(apart.rest, [*example_inputs, *examples])
    tell_sizes_alone(apart.rest)
    return apart.around(call)


def for_one_use(graph: GraphModule) -> list[int]:
    """Positions of the inputs that are aliases for a single use, given :attr:`ViewsOutside.rest`."""
    inputs = graph.graph.find_nodes(op="placeholder")
    return [i for i, node in enumerate(inputs) if _ONE_USE in node.meta]


def _views(graph: GraphModule) -> dict[Node, None]:
    """The views to take, with those between them and the inputs, in the order of the graph."""
    outputs: Sequence[Any] = graph.graph.output_node().args[0]  # type: ignore[assignment]
    received = [i for i, o in enumerate(outputs) if isinstance(o, Node) and _differentiable(o)]
    if any(map(transform_depth, graph.graph.nodes)):
        return {}
    found: set[Node] = set()
    for node in (view for views in views_handed_on(graph, received).values() for view in views):
        if (path := _operations_to(node)) is not None:
            found |= path
    for node in [n for n in found if not _is_tensor(n)]:
        found |= {*node.users}  # of an operation that returns several views, the views
    return {node: None for node in graph.graph.nodes if node in found}


def _operations_to(view: Node) -> set[Node] | None:
    """The operations that make a view of an input; None if they cannot run before the graph."""
    path: set[Node] = set()
    node = view
    while node.op != "placeholder":
        bases = [n for n in node.all_input_nodes if not _is_known_size(n)]
        called = node.op in ("call_function", "call_method")
        if len(bases) != 1 or not called or not _same_memory(node, bases[0]):
            return None
        # An operation that returns several views: each use must take one of them out.
        if not _is_tensor(node) and any(u.all_input_nodes != [node] or not _is_tensor(u) for u in node.users):
            return None
        path.add(node)
        node = bases[0]
    return None if writes(node.meta["example_value"]) else path


def _same_memory(node: Node, base: Node) -> bool:
    """Whether all tensors of two nodes are differentiable and share one storage."""
    tensors = [t for n in (node, base) for t in pytree.tree_leaves(n.meta.get("example_value"))]
    return (
        all(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)
        and len({fake.storage_key(t) for t in tensors}) == 1
    )


def _is_known_size(node: Node) -> bool:
    """Whether a node is a size that follows from sizes of inputs."""
    if not fake.is_size(node.meta.get("example_value")):
        return False
    return node.op == "placeholder" or all(map(_is_known_size, node.all_input_nodes))


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _differentiable(node: Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("example_value"))
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in values)


def _taken_apart(graph: GraphModule, path: dict[Node, None]) -> ViewsOutside:
    """Divide a graph; `path` has the operations to move, in order."""
    rest, views = copied(graph), Graph()
    inside = dict(zip(graph.graph.nodes, rest.graph.nodes, strict=True))
    outside = {n: views.node_copy(n) for n in graph.graph.find_nodes(op="placeholder")}
    node_in_rest = dict(inside)  # the nodes of `rest` that now have the values of the graph's nodes
    further_inputs: list[Node] = []
    last_input = rest.graph.find_nodes(op="placeholder")[-1]

    def copied_outside(node: Node) -> Node:
        if node not in outside:
            outside[node] = views.node_copy(node, copied_outside)
        return outside[node]

    def input_for(taken: Node, like: Node) -> Node:
        """Add an input to `rest`, which the node `taken` of `views` is handed to."""
        nonlocal last_input
        with rest.graph.inserting_after(last_input):
            last_input = rest.graph.placeholder(f"view_{len(further_inputs)}")
        last_input.meta["example_value"] = like.meta["example_value"]
        further_inputs.append(taken)
        return last_input

    # By node, the number of its views that are not taken yet.
    views_to_come = {n: sum(user in path for user in n.users) for n in graph.graph.nodes}
    for node in graph.graph.nodes:
        if node in path:
            taken = copied_outside(node)
            for base in node.all_input_nodes:
                views_to_come[base] -= 1
            if _is_tensor(node) and any(user not in path for user in node.users):
                view_input = input_for(taken, node)
                inside[node].replace_all_uses_with(view_input)
                node_in_rest[node] = view_input
        elif node.op != "output" and _differentiable(node):
            # The gradients of an operation's arguments arrive in their order. Nodes run in the reverse order
            # of their making: so the alias for the last argument is made first.
            for operand in reversed(node.all_input_nodes):
                if views_to_come[operand] and operand in outside and _differentiable(operand):
                    alias = views.call_function(torch.ops.aten.alias.default, (outside[operand],))
                    one_use = input_for(alias, operand)
                    one_use.meta[_ONE_USE] = True
                    inside[node].replace_input_with(node_in_rest[operand], one_use)
    for node in reversed(path):
        rest.graph.erase_node(inside[node])
    views.output(tuple(further_inputs))
    rest.recompile()
    return ViewsOutside(rest, graph_module(graph, views))
