"""A block that is recomputed without a plan: ``torch.utils.checkpoint``, made exact.

Non-reentrant ``torch.utils.checkpoint`` drops the block's saved tensors and runs the block again in backward.
Its autograd graph is that of the first run, so gradients are summed in the same order. The code here makes
the second run see what the first one saw: the states of random generators (of PyTorch, Python, numpy and the
block's own), buffers, attributes and modes of modules, and inputs that the block writes to. And it puts
everything back after the second run, so that running statistics are updated once
(https://github.com/pytorch/pytorch/issues/96136).
"""

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from planner._torch import pytree
from planner._torch.tensors import without_history, writes
from planner.blocks.running import switched, switched_off
from planner.errors import InputsChanged, PlannerError
from planner.training_step.generators import GeneratorStates, is_generator
from planner.training_step.python_state import (
    FUNCTIONS,
    PythonState,
    globals_named_in,
    is_of_users,
    referred,
)


class RecomputeError(PlannerError, RuntimeError):
    """A block cannot be recomputed."""


Overwritten = weakref.WeakKeyDictionary[Any, set[int]]
"""The inputs that a block writes to, by the first module among its arguments, or by the function."""


def run_recomputed(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], known: Overwritten, name: str
) -> Any:
    """Call a function whose saved tensors backward computes again.

    Args:
        function: The function.
        args, kwargs: Its arguments.
        known: The inputs that it was seen to write to; this call is added.
        name: Its name in messages.

    Raises:
        RecomputeError: It writes to a parameter, or to a tensor of an enclosing scope.
    """
    run = _Run(function, args, kwargs, known, name)
    return checkpoint(run, args, kwargs, use_reentrant=False, preserve_rng_state=False)


class _Run:
    """One call of a block: the first run notes the states that it sees, later runs see the same."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Overwritten,
        name: str,
    ) -> None:
        self._function, self._name, self._known = function, name, known
        self._off, self._again = switched_off(), False
        leaves = pytree.tree_leaves((args, kwargs))
        objects = (x for x in leaves if not isinstance(x, torch.Tensor) and is_of_users(x))
        around = list(from_around(function, *objects, objects=True))
        self._modules = list(dict.fromkeys(x for x in [*leaves, *around] if isinstance(x, torch.nn.Module)))
        self._around = [x for x in around if isinstance(x, torch.Tensor)]
        self._others = (function, args, kwargs, *(x for x in around if not isinstance(x, torch.Tensor)))
        inner = inner_function(function)
        own = inner if isinstance(inner, FUNCTIONS) else type(inner)  # others may have no hash
        self._key = self._modules[0] if self._modules else own

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._again:
            return self._second(args, kwargs)
        self._again = True
        return self._first(args, kwargs)

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        learnt = self._known.get(self._key)
        inputs = [_Held(f"input {i}", x) for i, x in enumerate(pytree.tree_leaves((args, kwargs)))]
        inputs = [held for held in inputs if held.tensor is not None]
        around = [_Held(f"tensor {i} of an enclosing scope", x) for i, x in enumerate(self._around)]
        around += [_Held(f"parameter {n}", p) for m in self._modules for n, p in m.named_parameters()]
        parts = [part for module in self._modules for part in module.modules()]
        around += [
            _Held(f"attribute {name}", tensor)
            for part in parts
            for name, tensor in vars(part).items()
            if isinstance(tensor, torch.Tensor)
        ]
        buffers = [
            (part, name, _Held(f"buffer {name}", buffer, copied=True))
            for part in parts
            for name, buffer in part.named_buffers(recurse=False)
        ]
        for i, held in enumerate(inputs):
            if learnt is None or i in learnt:
                held.copy()
        if learnt is None:
            for held in around[: len(self._around)]:
                held.copy()
        self._python = PythonState(self._modules, self._others, objects=True)
        self._python.let_go_of_graphs()
        given = [x for x in pytree.tree_leaves((args, kwargs)) if is_generator(x)]
        self._generators = [*self._python.generators, *given]
        self._states = GeneratorStates.now(self._generators)
        result = self._function(*args, **kwargs)
        for held in around:
            if held.written(guess=False):
                raise RecomputeError(
                    f"the block {self._name} writes to {held.name}, which would happen once more when it is "
                    "recomputed: make it a buffer of a module, or leave that out of the block"
                )
        written = {i for i, held in enumerate(inputs) if held.written()} | (learnt or set())
        if any(inputs[i].saved is None for i in written if i < len(inputs)):
            raise RecomputeError(
                f"the block {self._name} writes to an input in place, and did not when it was first called: "
                "let it write to a copy, or call it with _recompute=False"
            )
        self._known[self._key] = written
        self._copies = [held for i, held in enumerate(inputs) if i in written]
        self._buffers = [(part, name, held) for part, name, held in buffers if held.written()]
        kept = {id(held) for held in (*self._copies, *(held for _, _, held in self._buffers))}
        everything = (*inputs, *around, *(held for _, _, held in buffers))
        self._unchanged = [held for held in everything if id(held) not in kept]
        for held in self._unchanged:
            held.saved = None
        for held in around:  # a graph of an earlier call would hold that call's inputs, and its run
            if type(held.tensor) is torch.Tensor:
                held.tensor = without_history(held.tensor)
        self._around.clear()
        return result

    def _second(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for held in self._unchanged:
            if held.written():
                raise InputsChanged(
                    f"{held.name} of the block {self._name} was changed in place since its forward, and its "
                    "backward computes it again from there: change it after backward(), change a copy, or "
                    "call the block with _recompute=False"
                )
        if self._copies:
            instead = {id(held.tensor): held.again() for held in self._copies}
            args, kwargs = pytree.tree_map(lambda x: instead.get(id(x), x), (args, kwargs))
        states = GeneratorStates.now(self._generators)
        python = PythonState(self._modules, self._others, objects=True)
        frozen_since = [held for held in self._unchanged if held.frozen_or_thawed()]
        try:
            for held in frozen_since:
                held.freeze_or_thaw()
            self._states.restore()
            self._python.restore()
            clones: dict[int, torch.Tensor] = {}  # modules may share a buffer
            for part, name, held in self._buffers:
                assert held.saved is not None
                if id(held.tensor) not in clones:
                    clones[id(held.tensor)] = held.saved.clone()
                part._buffers[name] = clones[id(held.tensor)]
            with switched(self._off):
                return self._function(*args, **kwargs)
        finally:
            python.restore()
            states.restore()
            for held in frozen_since:
                held.freeze_or_thaw()


class _Held:
    """A tensor that a block may write to.

    Args:
        name: Its name in messages.
        tensor: The tensor. Another object, or a tensor that counts no writes, is left alone.
        copied: Whether to copy it now.

    Attributes:
        tensor: As given; None where it is left alone.
        saved: Its copy; None where there is none.
    """

    def __init__(self, name: str, tensor: Any, *, copied: bool = False) -> None:
        counts = isinstance(tensor, torch.Tensor) and not tensor.is_inference()
        self.name, self.tensor = name, tensor if counts else None
        self.saved: torch.Tensor | None = None
        self._writes = writes(tensor) if counts else 0
        self._needs_gradient = counts and tensor.requires_grad
        if copied:
            self.copy()

    def copy(self) -> None:
        """Copy it as it is now."""
        if self.tensor is not None:
            self.saved = self.tensor.detach().clone()

    def written(self, *, guess: bool = True) -> bool:
        """Whether it was written to. Where there is a copy, writes that no version counts are found too.

        Kernels write running statistics uncounted. Comparing would wait for a GPU, so there a small copy
        counts as one of a tensor that was written to, unless ``guess`` is off.
        """
        if self.tensor is None:
            return False
        if writes(self.tensor) != self._writes:
            return True
        if self.saved is None or self.saved.is_meta or self.saved.is_nested:
            return False
        if self.saved.layout is not torch.strided:
            return False
        if guess and self.saved.device.type != "cpu" and self.saved.nbytes <= _SMALL_BYTES:
            return not self._needs_gradient
        now, then = self.tensor.detach(), self.saved
        if now.is_complex():  # complex halves cannot be compared as such
            now, then = torch.view_as_real(now.resolve_conj()), torch.view_as_real(then.resolve_conj())
        return not (torch.equal(now, then) or ((now == then) | (now.isnan() & then.isnan())).all())

    def frozen_or_thawed(self) -> bool:
        """Whether it is a leaf that requires a gradient now and did not, or the other way round."""
        if self.tensor is None or not self.tensor.is_leaf:
            return False
        return self.tensor.requires_grad is not self._needs_gradient

    def freeze_or_thaw(self) -> None:
        """Change whether it requires a gradient. Autograd saves tensors by that."""
        assert self.tensor is not None
        self.tensor.requires_grad_(not self.tensor.requires_grad)

    def again(self) -> torch.Tensor:
        """The tensor as it was, for the block to write to; no leaf, as a leaf that trains refuses writes."""
        assert self.saved is not None
        return self.saved.detach().requires_grad_(self._needs_gradient).clone()


_SMALL_BYTES = 2**16


def inner_function(function: Any) -> Any:
    """The function inside partials, methods and decorators that set ``__wrapped__``."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def from_around(*functions: Any, objects: bool = False) -> Iterator[Any]:
    """Tensors and modules that functions, and objects, read besides their arguments.

    They come from closures, partials, methods, defaults, globals and attributes.
    """
    seen: set[int] = set()
    pending = list(functions)
    while pending:
        found = pending.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor | torch.nn.Module) or is_generator(found):
            yield found
        elif isinstance(found, FUNCTIONS):
            pending += referred(found)
            if isinstance(found, types.FunctionType):
                held = globals_named_in(found).values()
                kinds = (torch.Tensor, torch.nn.Module, list, tuple, dict)
                pending += [x for x in held if isinstance(x, kinds) or is_generator(x)]
        elif isinstance(found, list | tuple):
            pending += found
        elif type(found) is dict:
            pending += found.values()
        elif objects and is_of_users(found):
            pending += vars(found).values()
