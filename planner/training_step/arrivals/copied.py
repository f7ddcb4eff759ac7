"""Hooks of weights on a copy of a module: the same code, with copies of all that it reaches.

An optimizer that such hooks step is copied with its state. So a step on the copy shows the memory that the
hooks take and release, and changes nothing of the user's.
"""

import copy
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest import mock

import torch

from planner._torch import fake as fake_
from planner.training_step.arrivals.reach import Reach
from planner.training_step.python_state import belongs_to, globals_named_in, is_stepping
from planner.training_step.step import tensors_in

_NOT_TAKEN = ("step", "zero_grad")
"""Attributes that schedulers put into optimizers, and that refer to these optimizers."""


class CopiedHooks:
    """Makes hooks that reach copies.

    Args:
        copies: Originals, each with its copy: modules, parameters, buffers.
        tensor: Makes the copy of any other tensor.
    """

    def __init__(
        self, copies: Iterable[tuple[Any, Any]], tensor: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._originals = list(copies)  # held, as the memo knows them by their ids
        self._memo: dict[int, Any] = {id(original): mine for original, mine in self._originals}
        self._own = {id(mine) for _, mine in self._originals}
        self._tensor = tensor
        self._stepping: dict[int, torch.optim.Optimizer] = {}

    def __call__(self, hook: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
        """A copy of a hook that reaches copies only.

        Args:
            hook: The hook.
            reach: The objects that it reaches, none of them opaque.

        Raises:
            Exception: Copying an object that it reaches raised it.
        """
        stepping = {type(o) for o in reach.objects if is_stepping(o)}
        by_type: dict[type, Any] = dict.fromkeys(stepping, self._step)
        by_type |= dict.fromkeys((torch.Tensor, torch.nn.Parameter), self._of_tensor)
        by_type |= {
            types.FunctionType: self._function,
            types.BuiltinFunctionType: _builtin,
            types.ModuleType: _itself,
            functools.partial: _partial,
        }
        with mock.patch.dict(copy._deepcopy_dispatch, by_type):  # type: ignore[attr-defined]
            made: Callable[..., Any] = copy.deepcopy(hook, self._memo)
        return made

    def state(self) -> list[torch.Tensor]:
        """The tensors that the copied optimizers hold now, besides those of the module."""
        held = [list(s.values()) for optimizer in self._stepping.values() for s in optimizer.state.values()]
        return [tensor for tensor in tensors_in(held) if id(tensor) not in self._own]

    def _of_tensor(self, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        made = memo[id(tensor)] = self._tensor(tensor)
        return made

    def _step(self, value: Any, memo: dict[int, Any]) -> Any:
        """A copy of an optimizer, or of a scheduler, with all of its attributes."""
        made = memo[id(value)] = object.__new__(type(value))
        own = {name: held for name, held in vars(value).items() if name not in _NOT_TAKEN}
        vars(made).update(copy.deepcopy(own, memo))
        if isinstance(made, torch.optim.Optimizer):
            self._stepping[id(made)] = made
            vars(made)["step"] = _step_without_data(made)
        return made

    def _function(self, function: types.FunctionType, memo: dict[int, Any]) -> Any:
        if belongs_to(function.__module__, "torch", "planner") or getattr(function, "__code__", None) is None:
            return function
        variables = memo.setdefault(id(function.__globals__), dict(function.__globals__))
        cells = tuple(memo.setdefault(id(cell), types.CellType()) for cell in function.__closure__ or ())
        made = types.FunctionType(function.__code__, variables, function.__name__, None, cells)
        memo[id(function)] = made
        for name, value in globals_named_in(function).items():
            variables[name] = copy.deepcopy(value, memo)
        for cell, mine in zip(function.__closure__ or (), cells, strict=True):
            try:
                mine.cell_contents = copy.deepcopy(cell.cell_contents, memo)
            except ValueError:  # nothing yet
                continue
        made.__defaults__ = copy.deepcopy(function.__defaults__, memo)
        made.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
        return made


def _step_without_data(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        vars(optimizer)["_opt_called"] = True  # schedulers check this and `_wrapped_by_lr_sched`
        with fake_.AnyNumber():  # type: ignore[no-untyped-call]
            return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _itself(value: Any, _memo: Mapping[int, Any]) -> Any:
    return value


def _builtin(value: Any, memo: dict[int, Any]) -> Any:
    holder = value.__self__
    if holder is None or isinstance(holder, types.ModuleType | type):
        return value
    return getattr(copy.deepcopy(holder, memo), value.__name__)


def _partial(value: Any, memo: dict[int, Any]) -> Any:
    function, arguments = copy.deepcopy(value.func, memo), copy.deepcopy(value.args, memo)
    return functools.partial(function, *arguments, **copy.deepcopy(value.keywords, memo))
