"""A warning of gradients that are there when a step begins, where the plan counts none."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from planner._torch.tensors import held_tensors
from planner.errors import warn
from planner.planfile.budget import format_bytes
from planner.planfile.plan import PlanRecord
from planner.training_step.step import backward_begins_at


class EarlierGradients:
    """Whether parameters have gradients, asked at each step.

    Parameters may be exchanged between steps, and some never get a gradient. So it looks at all parameters of
    the modules that had some the last time. It finds these modules anew where one is gone or has a gradient,
    or where the first one is another. It has no weak references to parameters: ``torch.utils.swap_tensors``
    refuses tensors that have some.

    Args:
        modules: Returns the modules.
    """

    def __init__(self, modules: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._find = modules
        self._found: list[weakref.ref[torch.nn.Module]] = []

    def are_there(self) -> bool:
        """Whether a parameter that trains has a gradient."""
        first = next(filter(_has_parameters, self._find()), None)
        known = bool(self._found) and self._found[0]() is first
        if known and not any(map(_has_gradient_or_is_gone, self._found)):
            return False
        modules = list(filter(_has_parameters, self._find()))
        self._found = [weakref.ref(module) for module in modules]
        return any(map(_has_gradient, modules))


def _has_parameters(module: torch.nn.Module) -> bool:
    return bool(module._parameters)


def _has_gradient(module: torch.nn.Module) -> bool:
    return any(
        p is not None and p.requires_grad and p.is_leaf and p.grad is not None
        for p in module._parameters.values()
    )


def _has_gradient_or_is_gone(reference: "weakref.ref[torch.nn.Module]") -> bool:
    module = reference()
    return module is None or _has_gradient(module)


class EarlierBytes:
    """Gradients that were there when a forward began; its backward warns of them.

    Some trainers, Lightning among them, free them between forward and backward: then they add to the memory
    of the forward alone.

    Args:
        plan: The plan, which counts no such gradients.
        model: The module, before its forward.
        told: Called after a warning.
    """

    def __init__(self, plan: PlanRecord, model: torch.nn.Module, told: Callable[[], None]) -> None:
        self._plan, self._told = plan, told
        self._model = weakref.ref(model)  # graphs outlive modules
        self._bytes, self._asked = _bytes_of_gradients(model), False

    def watched(self, output: Any) -> Any:
        """The output of the forward, with hooks that ask when its backward begins."""
        nodes = {tensor.grad_fn: None for tensor in backward_begins_at(output)}
        for node in nodes:
            if node is not None:
                node.register_prehook(self._at_backward)
        return output

    def _at_backward(self, _gradients: Any) -> None:
        model = self._model()
        if self._asked or model is None:
            return
        self._asked = True
        text = f"gradients of {format_bytes(self._bytes)} were there already when the step began"
        if _bytes_of_gradients(model):
            self._told()
            warn(
                f"{text}, as with several micro-batches a step, and the plan counts none: the step may take "
                "as much more than predicted. Plan with accumulate=True, or call optimizer.zero_grad() "
                "before each step"
            )
            return
        line, predicted = self._plan.timeline, self._plan.predicted.dynamic_peak_bytes
        over = max(line.bytes[: line.forward_length], default=0) + self._bytes - predicted
        if over > 0:
            self._told()
            warn(
                f"{text}, and were freed between forward and backward, as Lightning does: the step takes "
                f"{format_bytes(over)} more than predicted. Call optimizer.zero_grad() before the forward; "
                "in Lightning planner.integrations.lightning.PlannerCallback does so"
            )


def _bytes_of_gradients(model: torch.nn.Module) -> int:
    there = (p.grad for p in model.parameters() if p.grad is not None)
    return sum(held.nbytes for gradient in there for held in held_tensors(gradient))
