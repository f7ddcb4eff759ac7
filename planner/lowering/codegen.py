"""Generated code: a torch.fx graph as one Python function that holds nothing longer than it must.

The function takes its arguments *boxed*, in a list that it empties, so that the caller keeps none of them
alive. It deletes every intermediate right after its last use. So the executed step frees memory exactly when
the simulated one does. Operations that run again together are one step of the schedule, and free at its end.
"""

import linecache
import math
import operator
import re
import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from planner._torch.execution import (
    form_operators,
    mask_operators,
    op_bindings,
    pooling_operators,
    sign_operators,
)
from planner._torch.fake import concrete_size, tree_leaves
from planner._torch.joint.aot import BoxedFunction
from planner.graph.dying_operands import writing
from planner.graph.in_place import OnCopy, operator_in_place
from planner.graph.passes.in_place_accumulation import add_as_in_place, is_sum_in_place
from planner.lowering.gradients_handed_out import hand_out_no_views
from planner.lowering.partition import RUN_TOGETHER
from planner.lowering.view_elimination import simplify

aten = torch.ops.aten

_numbers = count()
_MISSING = object()
_LITERALS = (int, bool, str, type(None))
_OWN = (
    form_operators.FUNCTIONS
    | mask_operators.FUNCTIONS
    | pooling_operators.FUNCTIONS
    | sign_operators.FUNCTIONS
)


def compile_graph(
    module: GraphModule, name: str, *, fixed_outputs: int | None = None, gradients: bool = False
) -> BoxedFunction:
    """Compile a graph of operator calls into a boxed function.

    Args:
        module: The graph and its constants. Superfluous views are taken out of it.
        name: The name of the function in tracebacks and profiles.
        fixed_outputs: How many outputs, from the first, go to the user, see :func:`simplify`.
        gradients: Whether outputs are gradients that the autograd engine may add others to.

    Returns:
        A function of one list. It empties the list and returns the list of outputs.
    """
    simplify(module.graph, fixed_outputs)
    if gradients:
        hand_out_no_views(module.graph)
    source, constants = generate(module.graph, module, name)
    filename = f"<planner {name} {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    scope: dict[str, Any] = dict(constants)
    exec(compile(source, filename, "exec"), scope)
    function: BoxedFunction = scope[name]
    weakref.finalize(function, linecache.cache.pop, filename, None)
    return function


def generate(graph: FxGraph, module: GraphModule, name: str) -> tuple[str, dict[str, Any]]:
    """Source of the boxed function and the constants that it refers to."""
    return _Writer(graph, module).write(name)


class _Writer:
    def __init__(self, graph: FxGraph, module: GraphModule) -> None:
        self.graph, self.module = graph, module
        self.constants: dict[str, Any] = {}
        self._constant_names: dict[int, str] = {}
        self._bindings: dict[Any, Any] = {}
        self._results: set[Node] = set()
        self.names: dict[Node, str] = {}
        self.lines: list[str] = []

    def write(self, name: str) -> tuple[str, dict[str, Any]]:
        nodes = list(self.graph.nodes)
        inputs = [n for n in nodes if n.op == "placeholder"]
        self._results = set(nodes[-1].all_input_nodes)
        last_use, unpacked, ends = _last_uses(nodes), _unpacked(nodes), _ends(nodes)
        unused_until: dict[Node, list[str]] = {}
        for i, node in enumerate(nodes):
            self.names[node] = f"v{i}"
        if inputs:
            self.lines.append(f"{', '.join(self.names[n] for n in inputs)}, = args")
        self.lines.append("args.clear()")
        self._delete([n for n in inputs if not n.users])
        for node in nodes:
            if node.op == "placeholder" or node in unpacked.members:
                continue
            if node.op == "get_attr":
                self.names[node] = self._constant(_attribute(self.module, str(node.target)))
                continue
            if node.op == "output":
                self.lines.append(f"return {self._text(list(node.args[0]))}")
                continue
            dead = list(last_use.get(node, ()))
            call = self._call(node)
            if node in unpacked.tuples:
                targets = unpacked.tuples[node]
                names = [
                    self.names[t] if t is not None else f"{self.names[node]}_{i}"
                    for i, t in enumerate(targets)
                ]
                self.lines.append(f"{', '.join(names)}, = {call}")
                unused = [n for n, t in zip(names, targets, strict=True) if t is None or not t.users]
                unused_until[ends.get(node, node)] = unused
            elif node.users:
                self.lines.append(f"{self.names[node]} = {call}")
            else:
                self.lines.append(call)
            self._delete(dead, unused_until.get(node, ()))
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def {name}(args):\n{body}", self.constants

    def _delete(self, nodes: list[Node], unused: Sequence[str] = ()) -> None:
        names = [*unused, *(self.names[n] for n in nodes if n.op != "get_attr")]
        if names:
            self.lines.append(f"del {', '.join(names)}")

    def _call(self, node: Node) -> str:
        target = node.target
        if target is operator.getitem:
            return f"{self._text(node.args[0])}[{self._text(node.args[1])}]"
        in_place = operator_in_place(node)
        if in_place is not None:
            return self._written(OnCopy(op_bindings.raw_callable(in_place)), str(in_place), node)
        if target is aten.view.default or (target is aten._unsafe_view.default and node not in self._results):
            # A view fails where the real strides of a kernel's result are not those without data.
            return self._written(op_bindings.RESHAPE, "reshape", node, sizes_in_tuples=True)
        into = writing(node)
        if into is not None:
            kwargs = into.kwargs(node)
            binding = self._binding(into.operator, node.args, kwargs)
            function = op_bindings.raw_callable(into.operator) if binding is None else binding
            return self._written(function, str(into.operator), node, kwargs)
        if is_sum_in_place(node):
            return self._written(add_as_in_place, "add", node)
        own = _OWN.get(target)
        if own is not None:
            return self._written(own, str(target), node)
        binding = self._binding(target, node.args, node.kwargs)
        if binding is not None:
            return self._written(binding, str(target), node, sizes_in_tuples=True)
        return self._written(op_bindings.raw_callable(target), str(target), node)

    def _written(
        self,
        function: Any,
        name: str,
        node: Node,
        kwargs: dict[str, Any] | None = None,
        *,
        sizes_in_tuples: bool = False,
    ) -> str:
        """The text of a call. Tuples of numbers are constants of the code; lists are made at every call."""

        def text(value: Any) -> str:
            if sizes_in_tuples and isinstance(value, list) and all(type(v) is int for v in value):
                value = tuple(value)
            return self._text(value)

        arguments = [text(a) for a in node.args]
        arguments += [f"{k}={text(v)}" for k, v in (node.kwargs if kwargs is None else kwargs).items()]
        return f"{self._constant(function, name)}({', '.join(arguments)})"

    def _binding(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = map_arg((args, kwargs), _value)
        if any(value is _MISSING for value in tree_leaves((args, kwargs))):
            return None
        key = (target, *(_kind(v) for v in tree_leaves((args, kwargs))))
        if key not in self._bindings:
            args, kwargs = _sizes_in_tuples((args, kwargs))
            self._bindings[key] = op_bindings.python_binding(target, args, kwargs)
        return self._bindings[key]

    def _text(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, tuple):
            return "(" + "".join(f"{self._text(v)}, " for v in value) + ")"
        if isinstance(value, list):
            return "[" + ", ".join(self._text(v) for v in value) + "]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._text(v)}" for k, v in value.items()) + "}"
        if type(value) in _LITERALS or (type(value) is float and math.isfinite(value)):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any, called: str = "") -> str:
        name = self._constant_names.get(id(value))
        if name is None:
            base = called.removeprefix("aten.") or str(getattr(value, "__name__", type(value).__name__))
            name = f"{re.sub(r'[^0-9a-zA-Z]+', '_', base).strip('_') or 'constant'}_{len(self.constants)}"
            self.constants[name] = value  # held, so that the id stays this object's
            self._constant_names[id(value)] = name
        return name


class _Unpacked:
    """Calls that return tuples of tensors, which the generated code takes apart at once.

    Attributes:
        tuples: The node of such a call -> the nodes of its members, by position (None: never used).
        members: The ``getitem`` nodes of these members, which need no code.
    """

    def __init__(self) -> None:
        self.tuples: dict[Node, list[Node | None]] = {}
        self.members: set[Node] = set()


def _unpacked(nodes: list[Node]) -> _Unpacked:
    found = _Unpacked()
    for node in nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, list | tuple) or not value:
            continue
        members: list[Node | None] = [None] * len(value)
        users = list(node.users)
        once = len({u.args[1] for u in users if u.target is operator.getitem}) == len(users)
        if once and all(u.target is operator.getitem and isinstance(u.args[1], int) for u in users):
            for user in users:
                members[user.args[1]] = user  # type: ignore[index]
            found.tuples[node] = members
            found.members.update(users)
    return found


def _last_uses(nodes: list[Node]) -> dict[Node, list[Node]]:
    unpacked, ends = _unpacked(nodes), _ends(nodes)
    place = {node: i for i, node in enumerate(nodes)}
    last: dict[Node, Node] = {}
    for node in nodes:
        if node in unpacked.members:
            continue
        end = ends.get(node, node)
        for used in node.all_input_nodes:
            last[used] = max(last.get(used, end), end, key=place.__getitem__)
    freed: dict[Node, list[Node]] = {}
    for used, user in last.items():
        if user.op != "output" and used not in unpacked.tuples:
            freed.setdefault(user, []).append(used)
    return freed


def _ends(nodes: list[Node]) -> dict[Node, Node]:
    """Each node that runs together with others -> the last of them; values that they read are freed there."""
    last = {node.meta[RUN_TOGETHER]: node for node in nodes if RUN_TOGETHER in node.meta}
    return {node: last[node.meta[RUN_TOGETHER]] for node in nodes if RUN_TOGETHER in node.meta}


def _attribute(module: GraphModule, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _value(node: Node) -> Any:
    """A node's value without data; for a symbolic size the number that it had when it was captured."""
    value = node.meta.get("val", _MISSING)
    return concrete_size(value) if isinstance(value, torch.SymInt) else value


def _kind(value: Any) -> Any:
    """The properties of an argument that PyTorch's argument parsers may look at."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, value.dim() == 0, value.layout
    return type(value).__name__, repr(value)


def _sizes_in_tuples(tree: Any) -> Any:
    if isinstance(tree, list | tuple):
        whole = all(type(v) is int for v in tree) or isinstance(tree, tuple)
        return (tuple if whole else list)(_sizes_in_tuples(v) for v in tree)
    return {k: _sizes_in_tuples(v) for k, v in tree.items()} if isinstance(tree, dict) else tree
