"""Views of inputs that a graph returns are taken before the graph, and become inputs of it.

In eager the engine adds up the gradients of a view's uses at the view, and passes the sum on to the view's
base. AOTAutograd takes a view that a graph returns outside the graph, of the input. The gradients that come
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
    """Take the views of inputs that a Dynamo graph returns out of it; None where there are none.

    Call it with gradients switched on or off as they will be where the graph runs. A graph that changes one
    of its inputs in place keeps its views.
    """
    views = _views(graph) if torch.is_grad_enabled() else {}
    return _taken_apart(graph, views) if views else None


def compile_with_views_outside(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    compile_: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile a graph while Dynamo captures it, with the views that it returns taken outside of it."""
    apart = views_outside(graph)
    if apart is None:
        return compile_(graph, example_inputs)
    # Without data: views that Dynamo has not seen would get other symbols for their sizes than it has.
    added = apart.rest.graph.find_nodes(op="placeholder")[len(example_inputs) :]
    examples = [n.meta["example_value"].detach().requires_grad_() for n in added]
    call = compile_(apart.rest, [*example_inputs, *examples])
    tell_sizes_alone(apart.rest)
    return apart.around(call)


def for_one_use(graph: GraphModule) -> list[int]:
    """Positions of the inputs that are aliases for a single use, of a graph whose views are outside."""
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
        if (path := _path(node)) is not None:
            found |= path
    for node in [n for n in found if not _is_tensor(n)]:
        found |= {*node.users}  # an operation that returns several views: each of them
    return {node: None for node in graph.graph.nodes if node in found}


def _path(view: Node) -> set[Node] | None:
    """The operations from an input to a view; None where they cannot run before the graph."""
    path: set[Node] = set()
    node = view
    while node.op != "placeholder":
        of = [n for n in node.all_input_nodes if not _is_known_size(n)]
        if len(of) != 1 or node.op not in ("call_function", "call_method") or not _same_memory(node, of[0]):
            return None
        if not _is_tensor(node) and any(u.all_input_nodes != [node] or not _is_tensor(u) for u in node.users):
            return None
        path.add(node)
        node = of[0]
    return None if writes(node.meta["example_value"]) else path


def _same_memory(node: Node, of: Node) -> bool:
    """Whether all tensors of two nodes are differentiable views of one storage."""
    tensors = [t for n in (node, of) for t in pytree.tree_leaves(n.meta.get("example_value"))]
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
    rest, views = copied(graph), Graph()
    inside = dict(zip(graph.graph.nodes, rest.graph.nodes, strict=True))
    outside = {n: views.node_copy(n) for n in graph.graph.find_nodes(op="placeholder")}
    stands_for = dict(inside)
    handed: list[Node] = []
    last = rest.graph.find_nodes(op="placeholder")[-1]

    def copied_outside(node: Node) -> Node:
        if node not in outside:
            outside[node] = views.node_copy(node, copied_outside)
        return outside[node]

    def input_for(taken: Node, like: Node) -> Node:
        nonlocal last
        with rest.graph.inserting_after(last):
            last = rest.graph.placeholder(f"view_{len(handed)}")
        last.meta["example_value"] = like.meta["example_value"]
        handed.append(taken)
        return last

    waiting = {n: sum(user in path for user in n.users) for n in graph.graph.nodes}  # views yet to be taken
    for node in graph.graph.nodes:
        if node in path:
            taken = copied_outside(node)
            for of in node.all_input_nodes:
                waiting[of] -= 1
            if _is_tensor(node) and any(user not in path for user in node.users):
                given = input_for(taken, node)
                inside[node].replace_all_uses_with(given)
                stands_for[node] = given
        elif node.op != "output" and _differentiable(node):
            # The gradients of one operation arrive in the order of its arguments.
            for of in reversed(node.all_input_nodes):
                if waiting[of] and of in outside and _differentiable(of):
                    alias = views.call_function(torch.ops.aten.alias.default, (outside[of],))
                    one_use = input_for(alias, of)
                    one_use.meta[_ONE_USE] = True
                    inside[node].replace_input_with(stands_for[of], one_use)
    for node in reversed(path):
        rest.graph.erase_node(inside[node])
    views.output(tuple(handed))
    rest.recompile()
    return ViewsOutside(rest, graph_module(graph, views))
