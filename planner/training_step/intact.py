"""Restoring the user's objects after planning, whether a plan was made or not.

Planning runs the step on copies. A copy may still share objects with the original: a scripted module clones
its parameters with their history, a ``__deepcopy__`` returns the module itself, a function among the
attributes, or the loss, refers to modules and tensors from around it. Changes to those in a step would
remain: gradients, tensors without data in places where the user keeps tensors, and, in a step that runs with
data, changes in place. Here such objects are noted before they change, and restored.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from planner._torch import fake, versions
from planner._torch.tensors import schema_of
from planner.training_step.python_state import CONTAINERS, remember, same
from planner.training_step.step import Step, tensors_in

_MOST_ELEMENTS = 10_000
_MISSING = object()


@dataclass
class _Before:
    """A tensor as it was; ``data`` only of one that is about to be written to."""

    tensor: torch.Tensor
    gradient: torch.Tensor | None
    version: int | None
    requires_grad: bool
    data: torch.Tensor | None = None


class Belongings:
    """What a module, its arguments and its loss consist of, or can reach.

    Args:
        module, step: What is about to be planned.
    """

    def __init__(self, module: nn.Module, step: Step) -> None:
        self._tensors: dict[int, _Before] = {}
        for part in module.modules():
            for value in [*part._parameters.values(), *part._buffers.values(), *vars(part).values()]:
                if isinstance(value, torch.Tensor):
                    self._note(value)
        for tensor in [*module.parameters(), *tensors_in((step.args, dict(step.kwargs)))]:
            self._note(tensor)
        self._python = [remember(module), *_around(step.loss), _namespaces(module, step.loss)]

    def about_to_run(self, operator: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Note, in a step that is recorded, that an operator is about to run on tensors that the step did not
        make."""
        for tensor in tensors:
            if fake.is_fake(tensor):
                continue
            self._note(tensor)
            before = self._tensors[id(tensor)]
            # Batch normalisations write to running statistics, which their schemas do not mention.
            writes = schema_of(operator).is_mutable or "batch_norm" in str(operator)
            if before.data is None and writes:
                with fake.without_modes(), torch.no_grad():
                    before.data = tensor.detach().clone()

    def put_back_tensors(self) -> None:
        """Give every tensor its gradient, its version and, where it was written to, its data back."""
        for before in list(self._tensors.values()):
            tensor = before.tensor
            if tensor.requires_grad is not before.requires_grad:
                if not tensor.is_leaf:  # written to by what has gradients
                    tensor.detach_()
                tensor.requires_grad_(before.requires_grad)
            if before.data is not None:
                with torch.no_grad():
                    tensor.copy_(before.data)
            if before.version is not None and versions.version_of(tensor) != before.version:
                versions.set_version(tensor, before.version)
            if tensor.is_leaf and tensor.grad is not before.gradient:
                tensor.grad = before.gradient

    def put_back(self) -> None:
        """Put everything back as it was."""
        self.put_back_tensors()
        for put_back in self._python:
            put_back()

    def _note(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self._tensors:
            return
        gradient = tensor.grad if tensor.is_leaf else None
        self._tensors[id(tensor)] = _Before(
            tensor, gradient, versions.version_of(tensor), tensor.requires_grad
        )
        if gradient is not None:
            self._note(gradient)


def _around(function: Any) -> Iterator[Callable[[], None]]:
    """Put back what a function refers to: modules, plain containers, and what its variables from around it
    are bound to."""
    held: list[Any] = [function, getattr(function, "__self__", None)]
    held += getattr(function, "__defaults__", None) or ()
    for cell in getattr(function, "__closure__", None) or ():
        yield _bound(cell)
        held.append(_content(cell))
    for value in held:
        if isinstance(value, nn.Module):
            yield remember(value)
        elif type(value) in CONTAINERS:
            yield _contents(value, lambda _: True)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return _MISSING


def _bound(cell: CellType) -> Callable[[], None]:
    before = _content(cell)

    def put_back() -> None:
        if before is not _MISSING and _content(cell) is not before:
            cell.cell_contents = before

    return put_back


def _contents(container: Any, matters: Callable[[Any], bool]) -> Callable[[], None]:
    saved = container.copy()

    def put_back() -> None:
        if (container != saved if isinstance(container, set) else not same(container, saved)) and matters(
            container
        ):
            container.clear()
            (container.extend if hasattr(container, "extend") else container.update)(saved)

    return put_back


def _namespaces(module: nn.Module, loss: Any) -> Callable[[], None]:
    """Take tensors that a step left there out of the classes of modules, and out of the variables, and plain
    containers among them, of the files that these are written in. All else there is left alone: caches that
    were filled belong together."""
    classes = dict.fromkeys(
        base for part in module.modules() for base in type(part).__mro__ if not _of_pytorch(base.__module__)
    )
    functions = [f for base in classes for f in vars(base).values()]
    functions += [f for part in module.modules() for f in vars(part).values()]
    functions += [loss, getattr(loss, "forward", None)]
    files: dict[int, dict[str, Any]] = {}
    for function in functions:
        plain = function.__func__ if isinstance(function, MethodType) else function
        if isinstance(plain, FunctionType) and not _of_pytorch(plain.__module__ or ""):
            files[id(plain.__globals__)] = plain.__globals__
    spaces: list[tuple[Mapping[str, Any], _Change]] = [(vars(base), _of_class(base)) for base in classes]
    spaces += [(file, _of_file(file)) for file in files.values()]
    saved = [(space, dict(space), change) for space, change in spaces]
    inner = [
        _contents(value, _has_tensors)
        for space, _ in spaces
        for value in list(space.values())
        if type(value) in CONTAINERS and len(value) <= _MOST_ELEMENTS
    ]

    def put_back() -> None:
        for space, before, change in saved:
            for name, value in list(space.items()):
                then = before.get(name, _MISSING)
                if value is not then and _has_tensors(value):
                    change(name, then)
        for contents in inner:
            contents()

    return put_back


_Change = Callable[[str, Any], None]


def _of_class(kind: type) -> _Change:
    def change(name: str, value: Any) -> None:
        delattr(kind, name) if value is _MISSING else setattr(kind, name, value)

    return change


def _of_file(variables: dict[str, Any]) -> _Change:
    def change(name: str, value: Any) -> None:
        if value is not _MISSING:
            variables[name] = value
        elif not name.startswith("__"):  # Dynamo's own
            del variables[name]

    return change


def _of_pytorch(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "builtins", "abc", "typing")


def _has_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if type(value) not in (*CONTAINERS, tuple) or len(value) > _MOST_ELEMENTS:
        return False
    members = value.values() if isinstance(value, dict) else value
    return any(isinstance(member, torch.Tensor) for member in list(members))
