"""The public function ``step``: a plan for a function that trains, its models and the code around them."""

import functools
import os
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch

from planner._torch import pytree
from planner.blocks.replay import from_around, inner_function
from planner.errors import CaptureError, SkippedStep, warn
from planner.lazy.auto_checkpoint import auto_checkpoint
from planner.lazy.wrapped import call_inside, sequence_like, without_wrapper, without_wrappers
from planner.module_parts import parameters_of, parts_of
from planner.planning.options import PlanKeywords, shows_options
from planner.progress import Progress
from planner.runtime.install import installed_plan
from planner.runtime.shapes.policy import OnNewShape
from planner.training_step.inputs import refuse_without_shape, refuse_wrappers
from planner.training_step.python_state import is_of_users, names_attribute
from planner.training_step.step import find_loss
from planner.user_plan import Plan

TrainStep = Callable[..., Any]


class StepError(CaptureError, TypeError):
    """A function is no training step that can be planned."""


@shows_options(PlanKeywords)
def step(
    train_step: TrainStep | None = None,
    *,
    budget: int | str | None = None,
    on_new_shape: OnNewShape = "replan",
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **options: Unpack[PlanKeywords],
) -> Any:
    """Make a function that trains run within a memory budget: its models, and the loss outside of them.

    ``train_step(model, batch)`` returns the loss, and the training loop goes on as before::

        train_step = planner.step(train_step, budget="8GiB")   # or @planner.step(budget="8GiB") above it
        loss = train_step(model, batch)   # the first call plans, see :func:`planner.auto_checkpoint`
        loss.backward()

    The plan covers all that the function does with the models among its arguments: several calls of one
    model, several models, losses that need both, autocast regions. An argument may be a model, or a tuple,
    list or mapping of models; each set of models gets a plan. While no model trains, or without gradients,
    the function runs as it is. Pass it its batches: one that takes them from an iterator is not planned, as
    planning would use them up. Models that only objects among its arguments have are not counted.

    The loop calls ``backward()`` and steps the optimizers. A model may be wrapped in
    ``DistributedDataParallel``: the function then gets the module inside, and runs within the wrapper's
    forward, which prepares the reduction.

    Args:
        train_step: The function, or a method of a module (``module.training_step``), which is a model then.
            It returns a scalar loss, or an object that has one as ``.loss`` or ``["loss"]``.
        budget, on_new_shape, cache, progress: See :func:`planner.auto_checkpoint`.
        **options: See :class:`planner.planning.options.PlanOptions`; ``keep=`` and the like name modules as
            ``models.0.layers.3``. ``loss=`` is not among them: the function returns it.

    Raises:
        StepError: It is no function; it calls ``backward()``; it takes a model, or a tensor that requires a
            gradient, from an enclosing scope instead of an argument; or, when it is called, no argument is a
            model, a model is deeper inside an argument, or its result is no loss.

    All other errors are those of :func:`planner.auto_checkpoint`.

    Returns:
        A :class:`PlannedStep`; a decorator where ``train_step`` is left out.
    """
    if train_step is None:
        return functools.partial(
            step, budget=budget, on_new_shape=on_new_shape, cache=cache, progress=progress, **options
        )
    if "loss" in options:
        raise StepError("step takes no loss=: the function that is planned returns the loss")
    _check(train_step)
    return PlannedStep(
        train_step,
        {"budget": budget, "on_new_shape": on_new_shape, "cache": cache, "progress": progress, **options},
    )


class PlannedStep:
    """A function that trains within a budget; called as the function is.

    Attributes:
        train_step: The function as it was.
        plan: The plan that the last call ran by; None before there is one.
    """

    def __init__(self, train_step: TrainStep, options: dict[str, Any]) -> None:
        functools.update_wrapper(self, inner_function(train_step), updated=())
        self.train_step = train_step
        self._options = options
        self._runs: weakref.WeakValueDictionary[tuple[Any, ...], _Step] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_Step] | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan that the last call ran by; None before there is one."""
        last = self._last() if self._last is not None else None
        found = None if last is None else installed_plan(last)
        return None if found is None else Plan.of(found)

    def __get__(self, instance: Any, _owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self.train_step
        if isinstance(function, types.MethodType):
            args = (function.__self__, *args)
            function = function.__func__
        held, data, named = _split(args, kwargs)
        models = [model for value in held.values() for model in _models(value)]
        held = {place: without_wrappers(value) for place, value in held.items()}
        key = tuple((place, _identity(value)) for place, value in held.items())
        run = self._runs.get(key)
        if run is None:
            run = _made(function, held)
            _look_for_others(function, run, (data, named))
            auto_checkpoint(run, loss=_loss_of(function), **self._options)
            _held_by(run.models[0]).setdefault(self, []).append(run)
            self._runs[key] = run
        self._last = weakref.ref(run)
        # Not train(): which of the models train is the loop's to say.
        run.training = any(model.training for model in run.models)
        return call_inside(models, run, data, named)

    def __deepcopy__(self, _memo: Any) -> "PlannedStep":
        return self  # as functions are copied: a model may have it as an attribute

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By its name, as functions are pickled, or as another one of the same function."""
        named: Any = sys.modules.get(self.__module__)
        for part in (name := str(getattr(self, "__qualname__", ""))).split("."):
            named = getattr(named, part, None)
        return name if named is self else (PlannedStep, (self.train_step, self._options))

    def __repr__(self) -> str:
        return f"<planned {self.train_step!r}>"


class _Step(torch.nn.Module):
    """A step as the call of a module, whose parts are the models."""

    def __init__(self, function: TrainStep, held: Mapping[int | str, Any]) -> None:
        super().__init__()
        found = [model for value in held.values() for model in _models(value)]
        self.models = torch.nn.ModuleList(dict.fromkeys(found))
        self._function = function
        self._places = {
            place: _numbered(value, {id(m): i for i, m in enumerate(self.models)})
            for place, value in held.items()
        }

    def forward(self, *data: Any, **named: Any) -> Any:
        args = list(data)
        for place, value in self._places.items():  # positions in ascending order, then names
            if isinstance(place, int):
                args.insert(place, _with_models(value, self.models))
            else:
                named[place] = _with_models(value, self.models)
        return self._function(*args, **named)


class _Held(weakref.WeakKeyDictionary[PlannedStep, list[_Step]]):
    """The runs of one model, among its attributes: they live as long as the model and the planned step do."""

    NAME = "_planner_steps"

    def __deepcopy__(self, _memo: Any) -> "_Held":
        return _Held()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()  # a model that is only an argument can be loaded without this package


def _held_by(model: torch.nn.Module) -> _Held:
    held = vars(model).get(_Held.NAME)
    if not isinstance(held, _Held):
        held = vars(model)[_Held.NAME] = _Held()
    return held


def _made(function: TrainStep, held: Mapping[int | str, Any]) -> _Step:
    plain = inner_function(function)
    name = getattr(plain, "__name__", type(plain).__name__)
    # A class of its own, by which a plan file knows which function it is for.
    kind = type(name, (_Step,), {"__module__": getattr(plain, "__module__", None) or __name__})
    made: _Step = kind(function, held)
    return made


def _split(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[int | str, Any], tuple[Any, ...], dict[str, Any]]:
    """The arguments that are models, by position or name; and the others."""
    held: dict[int | str, Any] = {i: x for i, x in enumerate(args) if _models(x)}
    held |= {name: x for name, x in kwargs.items() if _models(x)}
    data = tuple(x for i, x in enumerate(args) if i not in held)
    named = {name: x for name, x in kwargs.items() if name not in held}
    if any(isinstance(x, torch.nn.Module) for x in pytree.tree_leaves((data, named))):
        raise StepError(
            "a model is inside an argument among other things: pass it as an argument of its own, or in a "
            "tuple, list or mapping of models alone"
        )
    if not held:
        raise StepError(
            "none of the arguments of the training step is a model: write train_step(model, batch)"
        )
    for value in held.values():
        for model in _models(value):
            refuse_without_shape(without_wrapper(model), "pass")
            refuse_wrappers(without_wrapper(model), "pass")
    return held, data, named


def _look_for_others(function: TrainStep, run: _Step, given: Any) -> None:
    """Warn of models that a step uses and that are attributes of its arguments: they are not counted."""
    plain, own = inner_function(function), set(parts_of(run))
    for holder in filter(is_of_users, pytree.tree_leaves(given)):
        for name, value in vars(holder).items():
            if not isinstance(value, torch.nn.Module) or without_wrapper(value) in own:
                continue
            uses = isinstance(plain, types.FunctionType) and names_attribute([plain], type(holder), name)
            if uses and parameters_of(value):
                warn(
                    f"{_name_of(plain)} uses {type(holder).__name__}.{name}, whose parameters the plan does "
                    f"not count: pass that {type(value).__name__} as an argument of its own"
                )


def _models(value: Any) -> list[torch.nn.Module]:
    """The models that an argument is made of; none where it is anything else."""
    if isinstance(value, torch.nn.Module):
        return [value]
    parts = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(parts, list | tuple) and parts and all(isinstance(x, torch.nn.Module) for x in parts):
        return list(parts)
    return []


def _identity(value: Any) -> Any:
    """What tells an argument made of models from others: which models, and how it holds them."""
    if isinstance(value, torch.nn.Module):
        return id(value)
    if isinstance(value, Mapping):
        return tuple((name, id(model)) for name, model in value.items())
    return type(value), *map(id, value)


def _numbered(value: Any, numbers: Mapping[int, int]) -> Any:
    """The same with numbers in place of models."""
    if isinstance(value, torch.nn.Module):
        return numbers[id(value)]
    if isinstance(value, Mapping):
        return {name: numbers[id(model)] for name, model in value.items()}
    return sequence_like(value, (numbers[id(model)] for model in value))


def _with_models(numbered: Any, models: torch.nn.ModuleList) -> Any:
    if isinstance(numbered, int):
        return models[numbered]
    if isinstance(numbered, dict):
        return {name: models[i] for name, i in numbered.items()}
    return sequence_like(numbered, (models[i] for i in numbered))


def _loss_of(function: TrainStep) -> Callable[[Any], torch.Tensor]:
    plain = inner_function(function)

    def loss(output: Any) -> torch.Tensor:
        found = find_loss(output)
        if found is None:
            name = _name_of(plain)  # it refers to the function, of which `cache=` compares the code
            if output is None or (isinstance(output, Mapping) and output.get("loss", output) is None):
                raise SkippedStep(f"{name} returned no loss: this batch is skipped, and has no plan")
            raise StepError(
                f"{name} returned {_described(output)}, expected a scalar loss that requires a gradient: "
                'return it, or an object or mapping with it as .loss or ["loss"]'
            )
        return found

    loss.__qualname__ = f"returned by {_name_of(plain)}"
    return loss


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", "the training step"))


def _described(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {tuple(output.shape)}" + (
            "" if output.requires_grad else " without gradient"
        )
    return f"a {type(output).__name__}"


def _check(train_step: Any) -> None:
    if not callable(train_step) or isinstance(train_step, torch.nn.Module | type):
        write = (
            "planner.auto_checkpoint(model, ...)" if isinstance(train_step, torch.nn.Module) else "a function"
        )
        raise StepError(
            f"step plans a function that trains, as train_step(model, batch), not a "
            f"{type(train_step).__name__}: write {write}"
        )
    plain = inner_function(train_step)
    name = getattr(plain, "__name__", type(plain).__name__)
    called = set(getattr(getattr(plain, "__code__", None), "co_names", ()))
    if found := called & {"backward", "manual_backward"}:
        raise StepError(
            f"{name} calls {min(found)}(): return the loss, and call backward() and the optimizer in the loop"
        )
    own = getattr(train_step, "__self__", None)
    for value in from_around(train_step):
        if isinstance(value, torch.nn.Module) and value is not own and any(True for _ in value.parameters()):
            raise StepError(
                f"{name} uses a {type(value).__name__} from an enclosing scope: pass it as an argument, as "
                "train_step(model, batch), so that its parameters are planned for"
            )
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise StepError(
                f"{name} uses a tensor that requires a gradient from an enclosing scope: pass it as an "
                "argument"
            )
