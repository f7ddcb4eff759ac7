"""Private PyTorch APIs: graph modules whose Python code is written when it is first asked for.

Nobody runs most of the graphs that are made on the way from a Dynamo graph to functions, and the code of one
of a thousand operations takes a tenth of a second. Tested with torch 2.13.
"""

from contextlib import AbstractContextManager

import torch
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module


def graph_module(root: torch.nn.Module, graph: Graph) -> GraphModule:
    """A module that runs a graph with the parts of another module."""
    return _LazyGraphModule(root, graph)


def written_when_needed() -> AbstractContextManager[None]:
    """Within this, PyTorch makes such modules too."""
    return _use_lazy_graph_module(True)
