"""The user's module that each node of a Dynamo graph came from, by its name in ``named_modules()``.

Dynamo writes down a source, such as ``L['self'].h.0``. It begins at the captured function, so at a submodule
where a graph break lies inside one. So modules are recognised by their identity instead.
"""

import re
import sys
from collections.abc import Collection
from itertools import chain
from types import FrameType

import torch
from torch.fx import GraphModule

from planner._torch.tracing.block_marks import marks
from planner.addresses import addresses
from planner.module_parts import named_parts

# By identity: code that Dynamo made may hold constants that have no hash.
_CALLS = {id(call.__code__) for call in (torch.nn.Module._call_impl, torch.nn.Module._wrapped_call_impl)}
_STACK = "nn_module_stack"


class ModuleNames:
    """The names of the modules inside of one, by their identity.

    They are read when first asked for, and again where a module is not among them: a forward may put in new
    ones.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self._modules: list[torch.nn.Module] = []  # held, so that no other gets the identity of one of them
        self._names: dict[str, str] = {}

    def including(self, keys: Collection[str]) -> dict[str, str]:
        """All names, by identities as Dynamo writes them."""
        if not self._names or any(key not in self._names for key in keys):
            names, self._modules = map(list, zip(*named_parts(self._root).items(), strict=True))
            self._names = dict(zip(map(str, addresses(self._modules).tolist()), names, strict=True))
        return self._names


def name_modules(graph: GraphModule, root: "torch.nn.Module | ModuleNames") -> None:
    """Write into every node of a Dynamo graph the module it came from, for :func:`module_of` to read.

    To be called by the backend that Dynamo hands the graph to. A module that is not among those of
    ``root`` (made in its forward, or in a plain list) counts as the registered one that calls it.
    """
    nodes = [node for part in graph.modules() if isinstance(part, GraphModule) for node in part.graph.nodes]
    # A second call of a module is written as 1234@1.
    stacks = [[key.partition("@")[0] for key in node.meta.get(_STACK) or {}] for node in nodes]
    running = [str(id(module)) for module in _running()]
    known = root if isinstance(root, ModuleNames) else ModuleNames(root)
    names = known.including({*running, *chain.from_iterable(stacks)})
    here = next((names[key] for key in running if key in names), "")
    for node, stack in zip(nodes, stacks, strict=True):
        found = next((names[key] for key in reversed(stack) if key in names), here)
        node.meta[_STACK] = {marks(node): (found, torch.nn.Module)}


def module_of(node: torch.fx.Node) -> str:
    """Name of the module whose forward a node, or the forward twin of a backward node, came from."""
    stack = node.meta.get(_STACK) or node.meta.get("fwd_nn_module_stack") or {}
    return str(next(reversed(stack.values()))[0]) if stack else ""


def marks_of(node: torch.fx.Node) -> str:
    """The marks of the blocks that a node came from, as :func:`planner._torch.tracing.block_marks.marks`."""
    stack = node.meta.get(_STACK) or {}
    return str(next(reversed(stack))) if stack else ""


def _running() -> list[torch.nn.Module]:
    """The modules whose calls are running in this thread, the innermost first."""
    found: list[torch.nn.Module] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Of no other frames: reading their locals would hold what they free later.
        if id(frame.f_code) in _CALLS:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


_INSIDE = re.compile(r"'\]\._modules\['|\._(?:modules|parameters|buffers)\['|'\]")


def source_name(placeholder: torch.fx.Node) -> str | None:
    """The name of an input of a Dynamo graph at its source, as in ``args[0]`` or ``0.bias``.

    None for results of an earlier graph.
    """
    name = getattr(getattr(placeholder, "_dynamo_source", None), "name", None)
    found = re.fullmatch(r"L\['(args|kwargs|module)'\](.*)", str(name() if callable(name) else name))
    if found is None:
        return None
    if found[1] != "module":
        return f"{found[1]}{found[2]}"
    return _INSIDE.sub(lambda inside: "." if "[" in inside[0] else "", found[2]).lstrip(".")


def described_input(placeholder: torch.fx.Node) -> str:
    """The name of an input of a Dynamo graph; its shape where it has none."""
    shape = "x".join(map(str, placeholder.meta["example_value"].shape)) or "a scalar"
    return source_name(placeholder) or f"a tensor of {shape}"
