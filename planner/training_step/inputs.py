"""Reading what users pass as model, example inputs and loss, and refusing what cannot be planned as it is.

:func:`planner.plan`, ``sweep``, ``auto_checkpoint``, ``verify``, ``max_batch`` and the builders of the
command line all read them here. A value in another form is an error that says what to write.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from planner._torch.modules import calls_forward_as_given, is_compiled
from planner.choices import Outputs
from planner.errors import PlanMismatch, PlannerError
from planner.module_parts import buffers_of, parameters_of, parts_of
from planner.training_step.generators import generators_restored
from planner.training_step.python_state import PythonState
from planner.training_step.step import Loss, Step, checked_outputs

Inputs = Sequence[Any] | Mapping[str, Any] | torch.Tensor | DataLoader[Any] | None
"""Example inputs: a tuple or list of positional arguments, a tensor as the only argument, a mapping of
keyword arguments (such as a batch of Hugging Face's), or a DataLoader, whose first batch is taken."""

SHARDED = (
    "parameters are DTensors that fully_shard made: the memory to gather and reduce them is not predicted, "
    "and the step may take more than predicted. Plan the model before it is sharded, with "
    'parallel="fsdp2:8" for 8 ranks'
)


class InputError(PlannerError, TypeError):
    """A model, example inputs or a loss in a form that cannot be read, or that the model does not take."""


def read_step(
    model: torch.nn.Module,
    args: Inputs = (),
    kwargs: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    outputs: Outputs = "held",
    *,
    of: str,
) -> Step:
    """The training step that a user describes.

    Args:
        model: The module.
        args, kwargs: Its example inputs, in any form of :data:`Inputs`.
        loss: Makes the scalar loss of the module's output, or None.
        outputs: Whether the module's outputs are held while backward runs.
        of: The function that the user called, for messages.

    Raises:
        InputError: A value is in a form that cannot be read, the model's forward does not take the inputs,
            or gradients are switched off.
        OutputsError: ``outputs`` is neither "held" nor "dropped".
    """
    check_model(model)
    _check_gradients_are_on(of)
    given, named, subject = _read(args, of)
    if kwargs is not None:
        more = _read_named(kwargs, len(given))
        if twice := named.keys() & more.keys():
            raise InputError(f"{min(twice)!r} is given twice, in the mapping of inputs and in kwargs=")
        named = {**named, **more}
    step = Step.of(model, given, named, check_loss(loss), checked_outputs(outputs))
    _check_call(model, step, subject)
    return step


def read_inputs(inputs: Any, of: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from inputs in any form, or from a pair of both.

    Args:
        inputs: In any form of :data:`Inputs`, or a tuple or list and a mapping.
        of: Where they come from, for messages.

    Raises:
        InputError: They are in another form.
    """
    if isinstance(inputs, tuple | list) and len(inputs) == 2:
        first, second = inputs
        if isinstance(first, tuple | list) and isinstance(second, Mapping):
            return tuple(first), _read_named(second, len(first))
    given, named, _ = _read(inputs, of)
    return given, named


def check_model(model: object) -> torch.nn.Module:
    """Check that a model is an ``nn.Module``, and return it.

    Raises:
        InputError: It is none, is a trace of one, or its ``__init__`` did not call that of ``nn.Module``.
    """
    if isinstance(model, torch.nn.Module):
        if "_parameters" not in vars(model):
            name = type(model).__name__
            if isinstance(model, torch.jit.ScriptModule):
                raise InputError(
                    f"the model is a {name}, which torch.jit made: plan the module that it was made of, or "
                    "one that calls it"
                )
            raise InputError(f"the {name} is not ready: its __init__ has to call super().__init__() first")
        return model
    if isinstance(model, type):
        raise InputError(
            f"the model is the class {model.__name__}: pass an instance, as {model.__name__}(...) makes it"
        )
    if callable(model):
        raise InputError(
            f"the model is a {_kind(model)}: pass the nn.Module that it runs, whose parameters are trained"
        )
    raise InputError(f"the model is a {_kind(model)}: expected an nn.Module")


def check_loss(loss: Any) -> Loss | None:
    """Check that a loss can be called with a model's output, and return it.

    Raises:
        InputError: It cannot be called, or needs more than the output.
    """
    if loss is None:
        return None
    write = "write loss=lambda output: criterion(output, target)"
    if isinstance(loss, type):
        raise InputError(f"loss= is the class {loss.__name__}, expected a function of the output: {write}")
    if not callable(loss):
        raise InputError(
            f"loss= is a {_kind(loss)}: expected a function from the model's output to its scalar loss, as "
            "in loss=lambda output: output.mean()"
        )
    called = loss.forward if isinstance(loss, torch.nn.Module) else loss
    missing = _does_not_take(called, (object(),), {})
    if missing:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise InputError(
            f"loss={name} is called with the model's output alone, and takes {_parameters(called)}: {write}, "
            "with the target of the example"
        )
    return loss  # type: ignore[no-any-return]


def _read(inputs: Any, of: str) -> tuple[tuple[Any, ...], dict[str, Any], str]:
    """Positional arguments, keyword arguments, and their name in messages."""
    if isinstance(inputs, DataLoader):
        batch = _first_batch(inputs)
        if isinstance(batch, torch.Tensor | Mapping | tuple | list):
            given, named, _ = _read(batch, of)
        else:
            given, named = (batch,), {}
        return given, named, "the first batch of the DataLoader"
    if inputs is None:
        return (), {}, "the inputs"
    if isinstance(inputs, torch.Tensor | PackedSequence):
        return (inputs,), {}, f"a {_kind(inputs)}, which is one argument,"
    if isinstance(inputs, Mapping):
        return (), _read_named(inputs, 0), "a mapping, which is keyword arguments,"
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}, "the inputs"
    raise InputError(
        f"{of}: the inputs are of type {_kind(inputs)}, expected a tuple of arguments, a tensor for one "
        "argument, a mapping of keyword arguments, or a DataLoader. For another object as the only argument "
        "write a tuple: (x,)"
    )


def _read_named(kwargs: Any, positional: int) -> dict[str, Any]:
    if not isinstance(kwargs, Mapping):
        before = ", ".join(["x", "y", "z"][: max(positional, 1)])
        hint = f": several arguments are a tuple, args=({before}, ...)"
        if type(kwargs).__name__ == "Plan":
            hint = ": write plan=plan"
        raise InputError(f"kwargs= is a {_kind(kwargs)}, expected a mapping from names to arguments{hint}")
    for key in kwargs:
        if not isinstance(key, str):
            raise InputError(
                f"keyword arguments have names, and {key!r} is a {_kind(key)}. To pass a mapping as one "
                "argument write a tuple: (mapping,)"
            )
    return dict(kwargs)


def _first_batch(loader: DataLoader[Any]) -> Any:
    """The first batch of a loader; the states of generators are restored."""
    batches = loader.batch_sampler
    holders = (loader, loader.sampler, batches, getattr(batches, "sampler", None), loader.dataset)
    attributes = [vars(holder) for holder in holders if hasattr(holder, "__dict__")]
    with generators_restored(PythonState([], attributes).generators):
        try:
            return next(iter(loader))
        except StopIteration:
            raise InputError("the DataLoader has no batch; one is needed as the example inputs") from None


def _check_gradients_are_on(of: str) -> None:
    instead = "call it outside"
    if torch.is_inference_mode_enabled():
        off = "torch.inference_mode()"
    elif not torch.is_grad_enabled():
        off = "torch.no_grad() (or torch.set_grad_enabled(False), or in a hook of a backward)"
        instead += ", or within torch.enable_grad()"
    else:
        return
    raise InputError(f"{of} was called under {off}, where there is no backward to plan: {instead}")


def _check_call(model: torch.nn.Module, step: Step, subject: str) -> None:
    """Check that a model's forward takes the inputs, where its call hands them on as they are."""
    if not calls_forward_as_given(model):
        return
    problem = _does_not_take(model.forward, step.args, step.kwargs)
    if not problem:
        return
    name = type(model).__name__
    hint = ""
    if not step.args and step.kwargs:
        hint = ". To pass a mapping as one argument write args=(mapping,)"
    elif len(step.args) > 1:
        hint = (
            ". Arguments that only the loss needs go there: args=(x,), "
            "loss=lambda output: criterion(output, y)"
        )
    raise InputError(
        f"{subject} cannot be passed to {name}.forward, which takes {_parameters(model.forward)}: {problem}"
        f"{hint}"
    )


def _does_not_take(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why a function does not take these arguments; empty where it does, or where that is not known."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def _parameters(function: Callable[..., Any]) -> str:
    """The names of a function's parameters; a question mark follows those that may be left out."""
    names = []
    for parameter in inspect.signature(function, follow_wrapped=False).parameters.values():
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        star = "**" if parameter.kind is parameter.VAR_KEYWORD else star
        may_be_left_out = "?" if parameter.default is not parameter.empty else ""
        names.append(f"{star}{parameter.name}{may_be_left_out}")
    return f"({', '.join(names)})"


def _kind(value: object) -> str:
    return "function" if inspect.isroutine(value) else type(value).__name__


def names_of_parameters(function: Callable[..., Any]) -> list[str]:
    """The parameters that may be given by position; those that no name gives are called by their place."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        f"args[{i}]" if p.kind is p.POSITIONAL_ONLY else p.name
        for i, p in enumerate(parameters)
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]


def without_shape(model: torch.nn.Module) -> str | None:
    """The first parameter or buffer without a shape yet, as of ``nn.LazyLinear``; None where all have one."""
    if not any(map(is_lazy, (*parameters_of(model), *buffers_of(model)))):
        return None
    named = [*model.named_parameters(), *model.named_buffers()]
    return next((name for name, tensor in named if is_lazy(tensor)), None)


def refuse_without_shape(model: torch.nn.Module, doing: str) -> None:
    """Refuse a module with parameters that have no shape yet.

    Raises:
        PlanMismatch: It has some.
    """
    lazy = without_shape(model)
    if lazy is not None:
        raise PlanMismatch(
            f"{lazy} has no shape yet, as in nn.LazyLinear before its first call: {doing} the module "
            "after one forward, model(*args)"
        )


def refuse_wrappers(model: torch.nn.Module, doing: str) -> None:
    """Refuse a data-parallel wrapper and a compiled module: the module inside is to be planned.

    Raises:
        PlanMismatch: If ``model`` is one of these.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise PlanMismatch(
            f"this is a {type(model).__name__}: {doing} the module inside, as model.module or before it is "
            "wrapped; the wrapper then trains by the plan"
        )
    if isinstance(model, FullyShardedDataParallel):
        raise PlanMismatch(
            f"this is a FullyShardedDataParallel: {doing} the module inside before it is wrapped, and wrap "
            "it with use_orig_params=True"
        )
    if isinstance(model, FSDPModule):
        refuse_sharded(model, doing)
    if is_compiled(model):
        raise PlanMismatch(
            f"this is a torch.compile()d module: {doing} the module inside, model._orig_mod, or before it is "
            "compiled; in training it then runs by the plan, and the code around it runs compiled"
        )


def refuse_sharded(model: torch.nn.Module, doing: str) -> None:
    """Refuse a module that ``fully_shard`` sharded, whole or in part.

    Raises:
        PlanMismatch: It is sharded.
    """
    sharded = next((part for part in parts_of(model) if isinstance(part, FSDPModule)), None)
    if sharded is None:
        return
    subject = "this module" if sharded is model else f"a part of this module, a {type(sharded).__name__},"
    raise PlanMismatch(
        f"{subject} is sharded by fully_shard: {doing} it before it is sharded. Where Accelerate or a "
        "trainer shards it, call planner.auto_checkpoint(model, args, budget=..., "
        "parallel=planner.FSDP2(...)) with example inputs before you give the model to them: a trainer's "
        "callback, or auto_checkpoint without inputs, plans when the model is sharded already"
    )
