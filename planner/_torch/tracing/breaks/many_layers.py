"""Work that Dynamo does for each layer of a model, in each function that it traces: done once."""

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables import builder
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lists import SliceVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

from planner._torch.patches import replace, replaced
from planner.module_parts import parts_of

_Reference = weakref.ref[torch.nn.Module]

_mark = operator.attrgetter("_dynamo_static_input_type")

_METHODS = ("og_module_named_parameters_fn_ptr", "og_module_named_buffers_fn_ptr")
"""The methods of ``nn.Module`` that Dynamo compares a module's with: it marks results of PyTorch's own."""


@functools.cache
def mark_parameters_once(is_ours: Callable[[Any], bool]) -> None:
    """Mark the parameters of a module only the first time that Dynamo reaches it, or a module around it.

    Dynamo marks them in every function, although the marks stay on the tensors until others change them, as
    ``torch.compile`` around an optimizer's step does. With regions, it reaches all layers of a model, and all
    of their parameters, in each function that it traces after a region.
    """
    wrap = VariableBuilder.wrap_module
    known: dict[int, list[_Reference]] = {}  # the module, and those in it: tensors can be exchanged

    def once(self: Any, value: torch.nn.Module) -> Any:
        if not is_ours(self.tx):
            return wrap(self, value)
        parts = known.get(key := id(value))
        if parts is None or parts[0]() is not value:
            inside = [part for part in parts_of(value) if part._parameters or part._buffers]
            module = weakref.ref(value, lambda _: known.pop(key, None))
            parts = known[key] = [module, *map(weakref.ref, inside)]
        if not _are_marked(parts):
            return wrap(self, value)
        with replaced(builder, dict.fromkeys(_METHODS)):
            return wrap(self, value)

    replace(VariableBuilder, "wrap_module", once)


def _are_marked(references: list[_Reference]) -> bool:
    held: list[torch.Tensor | None] = []
    for reference in references:  # thousands
        part = reference()
        if part is None:
            return False
        if some := part._parameters:
            held += some.values()
        if others := part._buffers:
            held += others.values()
    try:
        return {*map(_mark, [tensor for tensor in held if tensor is not None])} <= {"unguarded"}
    except AttributeError:  # one has none
        return False


@functools.cache
def take_parts_of_lists_at_once(is_ours: Callable[[Any], bool]) -> None:
    """Loop over a slice of a list of modules, as in ``for layer in self.layers[:n]``, without making an
    ``nn.ModuleList`` of it: Dynamo would trace how each module is put in."""
    taken_from = UnspecializedNNModuleVariable.mp_subscript_impl

    def at_once(self: Any, tx: Any, key: Any) -> Any:
        if not (
            type(self.value) is torch.nn.ModuleList
            and isinstance(key, SliceVariable)
            and is_ours(tx)
            and _is_looped_over(tx)
        ):
            return taken_from(self, tx, key)
        name = VariableTracker.build(tx, "_modules")
        held = VariableTracker.build(tx, getattr).call_function(tx, [self, name], {})
        modules = held.call_method(tx, "values", [], {})
        return VariableTracker.build(tx, list).call_function(tx, [modules], {}).mp_subscript_impl(tx, key)

    replace(UnspecializedNNModuleVariable, "mp_subscript_impl", at_once)


def _is_looped_over(tx: Any) -> bool:
    """Whether the next instruction loops over the value on top of the stack."""
    return bool(tx.instructions[tx.instruction_pointer].opname == "GET_ITER")
