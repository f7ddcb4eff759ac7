"""Graph modules whose Python code is written when it is first asked for.

Most of the graphs made on the way from a Dynamo graph to functions never run, and writing the code of one of
a thousand operations takes a tenth of a second.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.utils._mode_utils import no_dispatch


def graph_module(root: torch.nn.Module, graph: Graph) -> GraphModule:
    """A module that runs a graph with the parts of another module."""
    return _LazyGraphModule(root, graph)


def written_when_needed() -> AbstractContextManager[None]:
    """A context in which PyTorch makes such modules too."""
    return _use_lazy_graph_module(True)


def tell_sizes_alone(graph: torch.fx.GraphModule) -> None:
    """Reduce a Dynamo graph's example values to sizes: without autograd history and data.

    The graph would otherwise hold tensors with data: numbers that tensors were multiplied by, and tables of
    integers that were computed during the capture.
    """
    for part in graph.modules():
        if not isinstance(part, torch.fx.GraphModule):
            continue
        named: Iterable[object] = part.graph._graph_namespace._obj_to_name  # those that were erased, too
        for node in named:
            if isinstance(node, torch.fx.Node) and node.op != "placeholder" and "example_value" in node.meta:
                node.meta["example_value"] = _sizes_alone(node.meta["example_value"])


def _sizes_alone(value: Any) -> Any:
    if isinstance(value, (tuple, list)):  # or what operators return, whose members have names
        make = getattr(type(value), "_make", type(value))
        return make(list(map(_sizes_alone, value)))
    # Do not read grad_fn: a view that was written to may raise.
    if type(value) is not FakeTensor or not (value.requires_grad or value.constant is not None):
        return value
    with no_dispatch():
        alone = FakeTensor(value.fake_mode, torch.Tensor.detach(value), value.device)
    return alone.requires_grad_(value.requires_grad)
