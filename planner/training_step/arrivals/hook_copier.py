"""Copies of the user's hooks, for a copy of a module: the same code, which refers to copies of its objects.

The copied objects include optimizers that the hooks step, with their state. So a step on the copied module
allocates and frees what the hooks would, and leaves the user's objects unchanged.
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

_NOT_COPIED = ("step", "zero_grad")
"""Methods that schedulers and other wrappers set on an optimizer itself: they are bound to the user's."""


class HookCopier:
    """Copies hooks, and the objects that they refer to. Hooks that share an object share its copy.

    Args:
        copies: Modules, parameters and buffers, each with the copy that exists already.
        copy_tensor: Copies any other tensor.
    """

    def __init__(
        self, copies: Iterable[tuple[Any, Any]], copy_tensor: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._pairs = list(copies)  # keeps the originals alive: the memo of deepcopy has only their ids
        self._memo: dict[int, Any] = {id(original): copied for original, copied in self._pairs}
        self._ids_of_module = {id(copied) for _, copied in self._pairs}
        self._copy_tensor = copy_tensor
        self._optimizers: list[torch.optim.Optimizer] = []

    def __call__(self, hook: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
        """Copy a hook.

        Args:
            hook: The hook.
            reach: The objects that it refers to, none of them opaque.

        Raises:
            Exception: An object that the hook refers to raised it when it was copied.
        """
        stepping = {type(o) for o in reach.objects if is_stepping(o)}
        by_type: dict[type, Any] = dict.fromkeys(stepping, self._optimizer_or_scheduler)
        by_type |= dict.fromkeys((torch.Tensor, torch.nn.Parameter), self._tensor)
        by_type |= {
            types.FunctionType: self._function,
            types.BuiltinFunctionType: _builtin_function,
            types.ModuleType: _python_module,
            functools.partial: _partial,
        }
        with mock.patch.dict(copy._deepcopy_dispatch, by_type):  # type: ignore[attr-defined]
            copied: Callable[..., Any] = copy.deepcopy(hook, self._memo)
        return copied

    def optimizer_state(self) -> list[torch.Tensor]:
        """The tensors that the copied optimizers hold now as their state, except tensors of the module."""
        held = [list(state.values()) for optimizer in self._optimizers for state in optimizer.state.values()]
        return [tensor for tensor in tensors_in(held) if id(tensor) not in self._ids_of_module]

    def _tensor(self, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(tensor)] = self._copy_tensor(tensor)
        return copied

    def _optimizer_or_scheduler(self, value: Any, memo: dict[int, Any]) -> Any:
        """A copy of an optimizer, a scheduler or a gradient scaler, attribute by attribute."""
        copied = memo[id(value)] = object.__new__(type(value))
        attributes = {name: held for name, held in vars(value).items() if name not in _NOT_COPIED}
        vars(copied).update(copy.deepcopy(attributes, memo))
        if isinstance(copied, torch.optim.Optimizer):
            self._optimizers.append(copied)
            vars(copied)["step"] = _step_without_data(copied)
        return copied

    def _function(self, function: types.FunctionType, memo: dict[int, Any]) -> Any:
        if belongs_to(function.__module__, "torch", "planner") or getattr(function, "__code__", None) is None:
            return function
        variables = memo.setdefault(id(function.__globals__), dict(function.__globals__))
        cells = tuple(memo.setdefault(id(cell), types.CellType()) for cell in function.__closure__ or ())
        copied = types.FunctionType(function.__code__, variables, function.__name__, None, cells)
        memo[id(function)] = copied  # before its globals and cells are copied: they may refer to it
        for name, value in globals_named_in(function).items():
            variables[name] = copy.deepcopy(value, memo)
        for cell, copied_cell in zip(function.__closure__ or (), cells, strict=True):
            try:
                copied_cell.cell_contents = copy.deepcopy(cell.cell_contents, memo)
            except ValueError:  # the enclosing function has not assigned the variable yet
                continue
        copied.__defaults__ = copy.deepcopy(function.__defaults__, memo)
        copied.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
        return copied


def _step_without_data(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The ``step`` of an optimizer whose state may have no data, as the number of its steps."""

    def step(*args: Any, **kwargs: Any) -> Any:
        vars(optimizer)["_opt_called"] = True  # a scheduler warns without it, and without the attribute below
        with fake_.AnyNumber():  # type: ignore[no-untyped-call]
            return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _python_module(value: types.ModuleType, _memo: Mapping[int, Any]) -> types.ModuleType:
    return value


def _builtin_function(value: Any, memo: dict[int, Any]) -> Any:
    """The function itself; of a bound method, as ``list.append``, the method of the copied object."""
    bound_to = value.__self__
    if bound_to is None or isinstance(bound_to, types.ModuleType | type):
        return value
    return getattr(copy.deepcopy(bound_to, memo), value.__name__)


def _partial(value: Any, memo: dict[int, Any]) -> Any:
    function, arguments = copy.deepcopy(value.func, memo), copy.deepcopy(value.args, memo)
    return functools.partial(function, *arguments, **copy.deepcopy(value.keywords, memo))
