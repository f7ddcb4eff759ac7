"""One training step, which runs the same way on fake tensors, unplanned, and planned."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch.autograd.graph import get_gradient_edge

from planner._torch import pytree
from planner._torch.autocast_state import without_autocast
from planner._torch.distributed import pipelines_free_early
from planner._torch.tensors import held_tensors, storage_number
from planner.addresses import identity
from planner.choices import Outputs
from planner.errors import CaptureError, PlannerError
from planner.module_parts import parts_of

Loss = Callable[[Any], torch.Tensor]

NESTED = (
    "nested tensors cannot be planned: pad them, or leave the layers that use them out of the planned module"
)
"""The message about steps with nested tensors."""


class OutputsError(PlannerError, ValueError):
    """``outputs=`` is neither "held" nor "dropped"."""


def checked_outputs(outputs: str) -> Outputs:
    """Check ``outputs=``, and return it.

    Raises:
        OutputsError: It is neither "held" nor "dropped".
    """
    if not isinstance(outputs, str) or outputs not in get_args(Outputs):
        raise OutputsError(
            f"outputs={outputs!r}: expected 'held', where the training loop still has the module's outputs "
            "when backward runs, or 'dropped', where it has only the loss"
        )
    return outputs  # type: ignore[return-value]


@dataclass(frozen=True)
class Step:
    """The arguments of a training step, and the way to its loss.

    Attributes:
        args: Positional arguments of the module.
        kwargs: Keyword arguments of the module.
        loss: Makes a scalar of the module's output; None to find it (see :func:`find_loss`).
        outputs: Whether the module's outputs are held while backward runs.
        training: True for training mode, False for evaluation mode, None for the module's own mode.
        in_flight: The number of micro-batches of a pipeline whose forward has run when the first backward
            begins. Their outputs are held until their backward has run, unless the pipeline lets go of them
            before. None if the module is no stage of a pipeline.
        module_losses: Finds the losses that the forward leaves in attributes; None if `loss` is given, which
            then counts alone.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Loss | None = None
    outputs: Outputs = "held"
    training: bool | None = None
    in_flight: int | None = None
    module_losses: "ModuleLosses | None" = None

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss: Loss | None,
        outputs: Outputs,
    ) -> "Step":
        """The step of a module. If no loss is given, the losses in the module's attributes count."""
        found = ModuleLosses(module) if loss is None else None
        return cls(args, kwargs, loss, outputs, module_losses=found)

    def module_losses_of(self, module: torch.nn.Module) -> "ModuleLosses | None":
        """``module_losses`` for a copy of the module."""
        return None if self.module_losses is None else ModuleLosses(module)

    def in_mode(self, module: torch.nn.Module) -> bool:
        """Whether the step runs in training mode."""
        return module.training if self.training is None else self.training

    @property
    def lets_go_of_outputs(self) -> bool:
        """Whether a pipeline frees a stage's outputs once the next stage has received them, and allocates
        their gradients only when it receives these, at the beginning of their backward."""
        return self.in_flight is not None and self.outputs == "dropped" and pipelines_free_early()

    def run(
        self,
        module: torch.nn.Module,
        arriving: Callable[[], AbstractContextManager[object]] = nullcontext,
        sent: Callable[[Sequence[torch.Tensor]], object] = lambda outputs: None,
    ) -> tuple[Any, torch.Tensor | None]:
        """Run forward and backward.

        Args:
            module: The module.
            arriving: Opened around making the gradients that the next stage of a pipeline would send.
            sent: Called with the outputs that the next stage is sent, before a pipeline frees them.

        Returns:
            The output and the loss. If the step's outputs are held, the output is the module's. If they are
            dropped, it is the loss; without a loss the tensors that were differentiated, or empty tensors of
            their shapes where a pipeline freed them. The loss is None if the outputs themselves were
            differentiated, with gradients of ones.
        """
        # By weak references: a loss that the forward replaces is freed then.
        earlier = [weakref.ref(t) for t in self.module_losses()] if self.module_losses is not None else []
        output = module(*self.args, **self.kwargs)
        if isinstance(output, Generator):
            raise CaptureError(
                "the forward is a generator (yield), whose code runs while its results are taken; under a "
                "plan all of it would run before that, and gradients would be added up in another order. "
                "Return a list, or plan the parts between the yields"
            )
        loss = self.loss(output) if self.loss is not None else find_loss(output)
        if loss is not None:
            if not isinstance(loss, torch.Tensor):
                raise CaptureError(
                    f"loss= returned a {type(loss).__name__}, expected a scalar tensor. Return the tensor "
                    "itself, not loss.item(), and of several results the one to differentiate"
                )
            if not loss.requires_grad:
                raise CaptureError(
                    "loss= returned a tensor without a gradient: it was detached, or computed under "
                    "torch.no_grad(), or nothing that it depends on requires a gradient. "
                    "Return one that is computed of the module's output"
                )
            if loss.numel() != 1:
                raise CaptureError(
                    f"the loss must be a scalar, but loss= gave shape "
                    f"{tuple(loss.shape)}: return its mean() or sum()"
                )
            if self.outputs == "dropped" and self.in_flight is None:
                output = loss
            with without_autocast():
                loss.backward()
            return output, loss
        outputs = differentiable_outputs(output)
        if self.module_losses is not None and self.in_flight is None:
            known = {id(t) for t in (*outputs, *(reference() for reference in earlier))}
            outputs += [t for t in self.module_losses() if id(t) not in known]
        if not outputs:
            raise CaptureError(f"nothing to differentiate: {self._why_nothing(module, output)}")
        if self.lets_go_of_outputs:
            with arriving():  # stand-ins, which the caller holds in place of the outputs
                output = [torch.empty_like(o, requires_grad=True) for o in outputs]
            sent(outputs)
            edges = [get_gradient_edge(o) for o in outputs]  # the backward needs these, not the outputs
            del outputs
            gradients = [torch.ones_like(o) for o in output]
            with without_autocast():
                torch.autograd.backward(edges, gradients)
            return output, None
        if self.outputs == "dropped":
            output = outputs
        with arriving() if self.in_flight is not None else nullcontext():
            gradients = [torch.ones_like(o) for o in outputs]
        with without_autocast():
            torch.autograd.backward(outputs, gradients)
        return output, None

    def _why_nothing(self, module: torch.nn.Module, output: Any) -> str:
        """The reason why no tensor that a module returned can be differentiated."""
        if not tensors_in(output):
            returned = "None" if output is None else f"a {type(output).__name__} without a tensor"
            return (
                f"the module returned {returned}: return the loss, or the tensors that loss= computes it of"
            )
        of = module if self.module_losses is None else self.module_losses.module
        if not differentiates(of, self.args, self.kwargs):
            return "no parameter of the module requires a gradient, and no input: see requires_grad_()"
        return (
            "the module's output requires no gradient: it was detached, or made under torch.no_grad(). "
            "Return it with its history"
        )


_NO_LOSS = frozenset({type(None), bool, int, float, str, torch.nn.Parameter})
"""Types of attributes that are no loss and hold none."""
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
"""Types of attributes that hold none if they are empty."""


class ModuleLosses:
    """Finds the scalar losses that a forward leaves in attributes of its module.

    Mixtures of experts leave their balancing losses there, and quantisers those of their codes. Training
    loops add them to the loss that they compute from the module's output.

    Attributes:
        module: The module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self) -> list[torch.Tensor]:
        """The losses in the attributes now, each once, in order."""
        found: dict[int, torch.Tensor] = {}
        seen: set[int] = set()
        parts = parts_of(self.module)
        # For speed: nearly all values in modules are switches, parameters, modules, or empty dictionaries.
        no_loss = _NO_LOSS.union(map(type, parts))

        def may_hold_losses(values: Iterable[Any]) -> list[Any]:
            some = [v for v in values if type(v) not in no_loss and (type(v) not in _CONTAINERS or v)]
            return [v for v in some if type(v) is not dict or not no_loss.issuperset(map(type, v.values()))]

        pending = [value for part in parts for value in may_hold_losses(vars(part).values())][::-1]
        while pending:  # a stack, reversed: losses are found in the order of the attributes
            held = pending.pop()
            if isinstance(held, torch.Tensor):
                if held.grad_fn is not None and held.numel() == 1:
                    found[identity(held)] = held
            elif isinstance(held, dict | list | tuple) and identity(held) not in seen:
                seen.add(identity(held))
                pending += may_hold_losses(_members(held))[::-1]
        return list(found.values())


def _members(held: Any) -> Iterable[Any]:
    """The values in a dictionary, list or tuple, even if its class iterates over others."""
    if isinstance(held, dict):
        return dict.values(held)
    return list.__iter__(held) if isinstance(held, list) else tuple.__iter__(held)


def find_loss(output: Any) -> torch.Tensor | None:
    """The scalar to differentiate: the output itself, its ``loss`` attribute or entry, or None."""
    candidate = output
    if not isinstance(output, torch.Tensor):
        candidate = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(candidate, torch.Tensor) and candidate.numel() == 1 and candidate.requires_grad:
        return candidate
    return None


def differentiable_outputs(output: Any) -> list[torch.Tensor]:
    """Tensors in a module's output that require a gradient, in order."""
    return [t for t in tensors_in(output) if t.requires_grad]


def backward_begins_at(output: Any) -> list[torch.Tensor]:
    """The differentiable tensors in an output; the loss where it is an object with a ``loss``, which nothing
    takes apart."""
    found = differentiable_outputs(output)
    loss = None if found else find_loss(output)
    return found if loss is None else [loss]


def differentiates(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a parameter of a module, or an argument of its call, requires a gradient."""
    return any(t.requires_grad for t in module.parameters()) or any(
        t.requires_grad for t in tensors_in((args, dict(kwargs)))
    )


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Tensors anywhere in nested containers, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """A copy of nested containers with ``function`` applied to every tensor."""
    return pytree.tree_map(lambda x: function(x) if isinstance(x, torch.Tensor) else x, tree)


def unique_storages(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor of each distinct storage, in order; for DTensors their local tensors."""
    seen: dict[int, torch.Tensor] = {}
    for tensor in (held for one in tensors for held in held_tensors(one)):
        seen.setdefault(storage_number(tensor.untyped_storage()), tensor)
    return list(seen.values())
