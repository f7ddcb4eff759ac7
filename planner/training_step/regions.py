"""Regions: submodules that have graphs of their own for forward and backward, and an autograd node."""

import difflib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch

from planner._torch import modules
from planner._torch.tracing.hindrances import checkpoint_that_is_on
from planner._torch.tracing.inside_compile import not_compiled
from planner.errors import CaptureError, PlannerError
from planner.module_parts import named_parts

Regions = Literal["auto"] | Sequence[str] | None
"""Names or patterns of submodules; "auto" for those of one class that repeat."""
Forward = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Runs the forward of a module with arguments and keyword arguments."""


class RegionError(PlannerError, ValueError):
    """There are no such submodules."""


def find_regions(model: torch.nn.Module, wanted: Regions) -> list[str]:
    """The names of the submodules that are to be regions, in order; of those inside each other the outermost.

    Raises:
        RegionError: A pattern matches no submodule, or "auto" finds none.
    """
    if wanted is None:
        return []
    names = [name for name in named_parts(model) if name]
    if wanted == "auto":
        found = _repeated(model)
        if not found:
            raise RegionError(
                "regions='auto' finds no submodules of one class that repeat in an nn.ModuleList or "
                "nn.Sequential: name the parts of the model that are to be regions, as ['encoder', 'decoder']"
            )
    else:
        found = set()
        for pattern in [wanted] if isinstance(wanted, str) else wanted:
            matching = {name for name in names if fnmatchcase(name, pattern)}
            if not matching:
                near = difflib.get_close_matches(pattern, names, 3, 0.4)
                hint = f"; near to it are {', '.join(near)}" if near else ""
                raise RegionError(f"regions= names {pattern!r}, and no submodule matches{hint}")
            found |= matching
    # Containers are not called themselves; the modules in them are.
    called = {name for name in found if type(model.get_submodule(name)) not in _CONTAINERS}
    parts = {part for name in found - called for part in _children(model, name)}
    return [name for name in names if name in called | parts and not _inside(name, called | parts)]


_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def _repeated(model: torch.nn.Module) -> set[str]:
    found: set[str] = set()
    for name, module in named_parts(model).items():
        if not isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
            continue
        # A module without children computes too little to be worth a boundary.
        children = {k: child for k, child in module.named_children() if next(child.children(), None)}
        count = Counter(type(child) for child in children.values())
        found |= {
            f"{name}.{k}" if name else k
            for k, child in children.items()
            if count[type(child)] > 1 and type(child) not in _CONTAINERS
        }
    return found


def _children(model: torch.nn.Module, name: str) -> set[str]:
    found: set[str] = set()
    for key, child in model.get_submodule(name).named_children():
        inner = f"{name}.{key}"
        found |= _children(model, inner) if type(child) in _CONTAINERS else {inner}
    return found


def _inside(name: str, others: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:i]) in others for i in range(1, len(parts)))


class Boundary:
    """A region's call: its hooks run as they are, its forward compiled.

    Args:
        module: The region.
        forward: Returns the function that runs its forward now; None where it runs as it is.
        previous: The call that was installed in the region before.
    """

    _planner_ends_a_graph = True  # see inside_compile.py

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable[[], Forward | None],
        previous: Callable[..., Any] | None = None,
    ) -> None:
        self._module, self.forward, self.previous = module, forward, previous

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (clone := modules.called_instead_of(self._module, self)) is not None:
            return modules.module_call(clone, *args, **kwargs)
        forward = self.forward()
        if forward is not None:
            run = partial(_run, forward, self._module)
            return modules.call_with_forward(self._module, run, args, kwargs)
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return modules.module_call(self._module, *args, **kwargs)


def _run(forward: Forward, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(module, args, kwargs)


_CALLS_A_REGION = 4
_MOST_REGIONS = 2000  # the stack of a thread, 8 MiB, holds at least as many


def allow_nested_calls(regions: int) -> None:
    """Let Python nest as many calls as a loop over regions does.

    Dynamo breaks the graph at each region and calls the code after it as a function from the code before
    it. The limit is not lowered again: other threads may be as deep.
    """
    needed = 2 * 1000 + _CALLS_A_REGION * min(regions, _MOST_REGIONS)  # 1,000 is Python's own limit
    if regions > 1000 // (2 * _CALLS_A_REGION) and sys.getrecursionlimit() < needed:
        sys.setrecursionlimit(needed)


class RunningRegions(threading.local):
    """Submodules that run graphs of their own while this thread runs the forward of the module, and else as
    they are.

    Inside a ``torch.utils.checkpoint`` of the forward's they run as they are, too. The checkpoint runs them
    again in the backward, when the forward does not run any more, and expects them to save the same tensors.

    Args:
        names: Their names.
        in_checkpoint: Called when one of them is called inside such a checkpoint.
    """

    def __init__(self, names: Sequence[str], in_checkpoint: Callable[[], None]) -> None:
        self._names, self._in_checkpoint = names, in_checkpoint
        self._forward: Forward | None = None
        self._around: object = None  # the checkpoint that the forward itself is called in

    def put_in(self, model: torch.nn.Module) -> None:
        """Install boundaries in a module's regions, where there are none yet."""
        for name in self._names:
            module = model.get_submodule(name)
            installed = modules.installed_call(module)
            if not (isinstance(installed, Boundary) and installed.forward == self._running):
                modules.install_call(module, Boundary(module, self._running, installed))

    def _running(self) -> Forward | None:
        if self._forward is None or checkpoint_that_is_on() in (None, self._around):
            return self._forward
        self._in_checkpoint()
        return None

    def take_out(self, model: torch.nn.Module) -> None:
        """Take the boundaries out again."""
        parts = named_parts(model)
        for module in (parts[name] for name in self._names if name in parts):
            installed = modules.installed_call(module)
            if isinstance(installed, Boundary):
                modules.install_call(module, installed.previous)

    def during(self, whole: Callable[..., Any], region: Forward) -> Callable[..., Any]:
        """The compiled forward of the module, in which regions run ``region``."""
        if not self._names:
            return whole

        allow_nested_calls(len(self._names))

        def run(*args: Any) -> Any:
            before = self._forward, self._around
            self._forward, self._around = region, checkpoint_that_is_on()
            try:
                return whole(*args)
            finally:
                self._forward, self._around = before

        return run


def refuse_in_checkpoint() -> None:
    """Refuse a region that is called inside of a checkpoint of the forward's.

    Raises:
        CaptureError: Always.
    """
    raise CaptureError(
        "a region is called inside of torch.utils.checkpoint, which runs it again by itself. Plan without "
        "regions=, or take the checkpoint away (of Hugging Face's models "
        "model.gradient_checkpointing_disable()): a plan says itself what runs again"
    )
