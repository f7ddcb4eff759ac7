"""A cache of joint graphs that were traced before in this process; they are copied.

The same graphs are traced when a plan is made, when it first runs, and when the model is planned for another
budget; tracing is a good part of the time that these take. The cache saves AOTAutograd's collection of
metadata, and ``make_fx``; its later work on the graph is done each time.
"""

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch import aot_autograd
from torch._guards import detect_fake_mode
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map_only

from planner._torch.compat import of_graphs
from planner._torch.fake import fake_mode
from planner._torch.joint.graph_modules import graph_module
from planner._torch.patches import replaced
from planner._torch.without_data.fake_values import times_asked_for_data

graph_capture, graph_compile = of_graphs("torch._functorch._aot_autograd", "graph_capture", "graph_compile")

_MOST_NODES = 30_000
"""How many graphs are kept: those that were used last."""
_META_WITH_TENSORS = {"val", "eager_input_vals"}
_COPIES = torch.ops.aten.lift_fresh_copy.default
_COLLECTS = "run_functionalized_fw_and_collect_metadata"


@dataclass(frozen=True)
class Traced:
    """One trace.

    Attributes:
        graph: The joint graph.
        constants: Tensors that it makes of numbers in the code, by name; it copies them, and writes to none.
        metadata: AOTAutograd's metadata of its inputs and outputs.
        asked: The keyword arguments that the metadata were collected with.
    """

    graph: Graph
    constants: dict[str, torch.Tensor]
    metadata: Any
    asked: dict[str, Any]


class TracedBefore:
    """Joint graphs by what they depend on, see :func:`planner._torch.joint.trace_key.trace_key`.

    Attributes:
        found: How many traces it saved.
    """

    def __init__(self, most_nodes: int = _MOST_NODES) -> None:
        self._most_nodes = most_nodes
        self._traced: OrderedDict[Hashable, Traced] = OrderedDict()
        self.found = 0

    def clear(self) -> None:
        """Forget all graphs."""
        self._traced.clear()

    @contextlib.contextmanager
    def used_for(self, key: Hashable | None) -> Iterator[None]:
        """A context in which AOTAutograd compiles one graph, whose joint graph is taken from here or kept.

        Args:
            key: What the graph depends on; None for one that is always traced.
        """
        if key is None:
            yield
            return
        module: Any = graph_compile
        dispatch = module.aot_dispatch_autograd_graph
        collected = list[tuple[Any, dict[str, Any], int]]()

        def dispatch_once(flat_fn: Any, flat_args: Any, *args: Any, **kwargs: Any) -> Any:
            mode, metadata = detect_fake_mode(flat_args), kwargs["fw_metadata"]
            with self._traces(key, mode) as traced:
                result = dispatch(flat_fn, flat_args, *args, **kwargs)
            # Tracing writes into the metadata, and would have to write again.
            noted = metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw or metadata.tokens
            if traced and collected and not noted:
                before, asked, times = collected[0]
                if times == times_asked_for_data(mode):
                    self._keep(key, Traced(*traced[0], before, asked))
            return result

        with (
            replaced(module, {"aot_dispatch_autograd_graph": dispatch_once}),
            replaced(aot_autograd, {_COLLECTS: self._collects(key, collected)}),
        ):
            yield

    def _collects(
        self, key: Hashable, collected: list[tuple[Any, dict[str, Any], int]]
    ) -> Callable[..., Callable[..., Any]]:
        """A replacement of the function that collects metadata. It adds these to ``collected``, with the
        keyword arguments, and how often data had been asked for before."""
        original = getattr(aot_autograd, _COLLECTS)

        def collects(flat_fn: Any, **asked: Any) -> Callable[..., Any]:
            collect = original(flat_fn, **asked)

            def collect_once(*inputs: Any) -> Any:
                mode: Any = detect_fake_mode(inputs)
                found = self._traced.get(key)
                if found is not None and found.asked == asked:
                    return _copy_metadata(found.metadata, mode)
                times = times_asked_for_data(mode)
                metadata = collect(*inputs)
                collected.append((_copy_metadata(metadata, fake_mode()), asked, times))
                return metadata

            return collect_once

        return collects

    @contextlib.contextmanager
    def _traces(self, key: Hashable, mode: Any) -> Iterator[list[tuple[Graph, dict[str, torch.Tensor]]]]:
        """A context in which the graph of a known key is not traced; yields a copy of the kept one, and its
        constants."""
        create, traced = graph_capture._create_graph, list[tuple[Graph, dict[str, torch.Tensor]]]()

        def create_once(*args: Any, **kwargs: Any) -> GraphModule:
            found = self._traced.get(key)
            if found is not None:
                self._traced.move_to_end(key)
                self.found += 1
                root = torch.nn.Module()
                for name, constant in found.constants.items():
                    setattr(root, name, constant)
                return graph_module(root, _copy(found.graph, mode))
            made: GraphModule = create(*args, **kwargs)
            constants = _constants(made)
            if constants is not None:
                traced.append((_copy(made.graph, fake_mode()), constants))
            return made

        with replaced(graph_capture, {"_create_graph": create_once}):
            yield traced

    def _keep(self, key: Hashable, traced: Traced) -> None:
        self._traced[key] = traced
        while sum(len(each.graph.nodes) for each in self._traced.values()) > self._most_nodes:
            self._traced.popitem(last=False)


def _constants(module: GraphModule) -> dict[str, torch.Tensor] | None:
    """The tensors that a graph holds, by name; None where it does more with one than copy it.

    Their values follow from the Dynamo graph, which has no data, only numbers that tensors are made of.
    """
    found: dict[str, torch.Tensor] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if type(value) is not torch.Tensor or any(user.target is not _COPIES for user in node.users):
            return None
        found[str(node.target)] = value
    return found


def _copy(graph: Graph, mode: FakeTensorMode) -> Graph:
    """A copy whose tensors without data are of a mode, and whose values are not known."""
    copied, nodes = Graph(), dict[Node, Node]()
    copied.set_codegen(copy.copy(graph._codegen))
    found: Any = copied.graph_copy(graph, nodes, return_output_node=True)
    results, output = found
    nodes[output] = copied.output(results)
    for old, node in nodes.items():
        node.meta = dict(old.meta)
        for key in _META_WITH_TENSORS & node.meta.keys():
            node.meta[key] = _of_mode(node.meta[key], mode)
    return copied


def _copy_metadata(metadata: Any, mode: FakeTensorMode) -> Any:
    """A copy whose lists are its own, and whose tensors without data are of a mode."""
    copied = copy.copy(metadata)
    for name, value in vars(metadata).items():
        if isinstance(value, list):
            members = [_of_mode(m, mode) if torch.is_tensor(m) else copy.copy(m) for m in value]
            setattr(copied, name, members)
        elif isinstance(value, dict | set):
            setattr(copied, name, value.copy())
    return copied


def _of_mode(value: Any, mode: FakeTensorMode) -> Any:
    if isinstance(value, FakeTensor):
        return fast_detach(mode, value)
    if isinstance(value, list | tuple | dict):
        return tree_map_only(FakeTensor, lambda tensor: fast_detach(mode, tensor), value)
    return value


TRACED_BEFORE = TracedBefore()
"""Those of this process."""
