"""Whether the plan in a file is the one that would be made now."""

import contextlib
import enum
import hashlib
import inspect
import os
from collections.abc import Mapping
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch

from planner._torch.autocast_state import autocast_regions
from planner.costs.devices import Device, find_device
from planner.costs.optimizer_step import optimizer_step
from planner.errors import BudgetError
from planner.module_parts import named_parts, parameters_of
from planner.parallel.rank import Rank
from planner.parallel.recorded import parallel_of
from planner.parallel.strategies import read_parallel
from planner.planfile.budget import Budget, parse_budget
from planner.planfile.fingerprint import class_name, same_class, state_digest
from planner.planfile.plan import PlanRecord, TensorRecord
from planner.planning.make_plan import input_records
from planner.planning.one_backend import device_of
from planner.planning.options import PlanOptions
from planner.training_step.python_state import (
    MOST_ELEMENTS,
    belongs_to,
    globals_named_in,
    is_of_users,
    referred,
    with_those_named,
)
from planner.training_step.step import Step
from planner.version import __version__

_NOT_RECORDED = (
    "solver", "effort", "encodings", "host_budget", "time_limit", "keep", "recompute", "checkpoints",
    "regions", "attention", "costs", "loss", "split",
)  # fmt: skip
"""Options that no other field of a plan records."""


_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEEP = 8
"""So many containers and objects inside each other are looked into."""
_MOST_OBJECTS = 20_000
_OF_EVERY_MODULE = frozenset({*vars(torch.nn.Module()), "_compiled_call_impl"})


def made_of(model: torch.nn.Module, options: Mapping[str, Any], step: Step | None = None) -> dict[str, str]:
    """Entries of ``created_with``: the options, sizes and settings that no other field of a plan records."""
    trainable = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    given = [f"{name}={_shown(options[name])}" for name in _NOT_RECORDED if options.get(name)]
    asked = PlanOptions(**options)
    device, ranks = find_device(asked.device, device_of(model, Step())), read_parallel(asked.parallel)
    shape_of = None if ranks is None else Rank(ranks).shape_of
    update = optimizer_step(asked.optimizer, parameters_of(model), device, shape_of=shape_of)
    which = hashlib.sha256("\n".join(trainable).encode(errors="replace")).hexdigest()[:8]
    return {
        "module code": _code_of(model),
        "arguments": _label(_arguments(step or Step())) or "none",
        "optimizer": f"{update.state_bytes:,} bytes, and {update.transient_bytes:,} in its step",
        "trainable": f"{sum(trainable.values()):,} parameters in {len(trainable)} tensors ({which})",
        "options": _label(" ".join(given)) or "none",
    }


def _code_of(model: torch.nn.Module) -> str:
    """A digest of what decides a forward beside parameters: classes and their code, settings, modes."""
    lines, parts = list[str](), named_parts(model)
    for path, part in parts.items():
        kind, settings = type(part), ""
        # A user's may show what changes from run to run.
        if belongs_to(getattr(kind.extra_repr, "__module__", None), "torch"):
            with contextlib.suppress(Exception):  # as of a class that sets none of what it shows
                settings = part.extra_repr()
        own = {name: value for name, value in vars(part).items() if _is_setting(name)}
        mode = part.training is model.training
        lines.append(f"{path} {kind.__qualname__} {settings} {mode} {_setting(own)}")
    kinds = dict.fromkeys(base for part in parts.values() for base in type(part).__mro__)
    functions = list[FunctionType]()
    for kind in kinds:
        if not belongs_to(kind.__module__, "torch", "builtins"):
            held = {name: getattr(value, "__func__", value) for name, value in vars(kind).items()}
            written = [value for value in held.values() if isinstance(value, FunctionType)]
            functions += [*written, *(f for f in map(inspect.unwrap, written) if isinstance(f, FunctionType))]
            lines.append(_setting({n: v for n, v in held.items() if n[:2] != "__"}))
    known = dict.fromkeys(functions)
    lines += [_setting(_plain_among(globals_named_in(function))) for function in known]
    files = {kind.__module__ for kind in kinds}
    # Those of other files are libraries', and reach as far as what downloads models.
    lines += [_shown(f) for f in with_those_named([*known]) if f in known or f.__module__ in files]
    return hashlib.sha256("\n".join(lines).encode(errors="replace")).hexdigest()[:16]


def _is_setting(name: str) -> bool:
    """Whether an attribute of a module may decide what its forward does, by its name."""
    return name not in _OF_EVERY_MODULE and name[:2] != "__"


def _plain_among(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in variables.items() if isinstance(value, _PLAIN)}


def _arguments(step: Step) -> str:
    """The arguments of a step that are no tensors and no data."""
    named = {**{f"args[{place}]": value for place, value in enumerate(step.args)}, **step.kwargs}
    found = {name: _setting(value) for name, value in named.items() if not _is_data(value)}
    return " ".join(f"{name}={text}" for name, text in found.items() if text)


def _is_data(value: Any) -> bool:
    """Whether an argument is a part of a batch, which differs from run to run, as captions and ids do."""
    if isinstance(value, Mapping):
        return any(map(_is_data, value.values()))
    if isinstance(value, tuple):
        return any(isinstance(held, str) or _is_data(held) for held in value)
    return isinstance(value, list | torch.Tensor)


def _setting(value: Any, seen: dict[int, Any] | None = None, deep: int = _DEEP) -> str:
    """A value that may decide what a forward does, in words that other runs use too.

    Empty where it is something else, and for an object that holds something else: a trainer among the
    attributes of a module has files and times of its run.

    Args:
        value: An argument, or an attribute of a module.
        seen: Containers and objects that were looked into.
        deep: How many of these may yet be inside each other.
    """
    seen = {} if seen is None else seen
    if isinstance(value, str) and os.sep in value:
        return "path"  # of a folder of this run, say
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, _OF_TORCH):
        return str(value)
    if id(value) in seen:
        return "again"
    if isinstance(value, torch.Tensor | torch.nn.Module) or not deep or len(seen) > _MOST_OBJECTS:
        return ""
    if isinstance(value, dict | list | tuple | set | frozenset):
        if len(value) > MOST_ELEMENTS:
            return ""
        if value and not isinstance(value, tuple | frozenset):  # equal ones of these may be one object
            seen[id(value)] = value
        items = list(value.items()) if isinstance(value, dict) else [(None, held) for held in value]
        found = [(_setting(name), _setting(held, seen, deep - 1)) for name, held in items]
        found = [(name, text) for name, text in found if text]
        return f"{type(value).__name__} {sorted(found) if isinstance(value, set | frozenset) else found}"
    if not is_of_users(value):
        return _shown(value) if callable(value) else ""
    seen[id(value)] = value
    found = []
    for name, held in vars(value).items():
        if not (text := _setting(held, seen, deep - 1)):
            return ""
        found.append((name, text))
    return f"{type(value).__qualname__} {found}"


def _threads(device: Device) -> str | None:
    """On a CPU each has scratch memory of its own."""
    return None if device.kind == "cuda" else str(torch.get_num_threads())


def _label(text: str) -> str:
    """A text as plan files take it; the end of a longer one is a digest of the whole."""
    return text if len(text) <= 256 else f"{text[:180]}... {hashlib.sha256(text.encode()).hexdigest()}"


def mismatch(
    plan: PlanRecord, model: torch.nn.Module, step: Step, budget: int | str, options: Mapping[str, Any]
) -> str:
    """Why a plan is not the one that would be made now; empty where it is.

    Inputs that are larger than the plan's in no dimension are no reason: the plan covers them.
    """
    asked = PlanOptions(**options)
    device = find_device(asked.device, device_of(model, step))
    ranks = read_parallel(asked.parallel)
    counts_gradients = plan.resident.gradient_bytes > 0
    accumulate = asked.accumulate
    if accumulate is None:  # a plan that counts existing gradients also covers steps without them
        accumulate = counts_gradients or any(p.grad is not None for p in model.parameters())
    compared: list[tuple[str, Any, Any]] = [
        ("planner", plan.created_with.get("planner"), __version__),
        ("torch", plan.created_with.get("torch"), torch.__version__),
        ("threads", plan.created_with.get("threads"), _threads(device)),
        ("budget", _amount(plan.target.budget_text), _amount(budget)),
        ("device", plan.target.device, device.name),
        ("training mode", plan.model.training, step.in_mode(model)),
        ("outputs", plan.model.outputs, step.outputs),
        ("inputs", plan.target.inputs, asked.inputs),
        ("autocast", plan.model.autocast, autocast_regions()),
        ("accumulate", counts_gradients, accumulate),
        ("backend", plan.target.backend, _backend(plan, asked.backend)),
        ("offload", plan.target.offload, asked.offload),
        ("in_flight", plan.target.in_flight, asked.in_flight),
        ("backend_options", plan.target.backend_options, dict(asked.backend_options)),
        ("parallel", parallel_of(plan.target.parallel), ranks),
        *((name, plan.created_with.get(name), now) for name, now in made_of(model, options, step).items()),
    ]
    if not same_class(plan.model.class_name, class_name(model)):
        return f"of a {plan.model.class_name}"
    if plan.model.state_digest != state_digest(model):
        return "of other parameters or buffers"
    if not set(plan.model.regions) <= named_parts(model).keys():
        return "with regions that the model has not"
    for name, then, now in compared:
        if then != now:
            return f"{name} {_shown(then)}, now {_shown(now)}"
    return _other_inputs(plan.model.inputs, input_records(step))


def _other_inputs(planned: list[TensorRecord], found: list[TensorRecord]) -> str:
    there, now = ({record.path: record for record in records} for records in (planned, found))
    for path in [*now, *there]:
        if path not in now or path not in there:
            return f"{path} is {'an' if path in now else 'no'} input now"
        then, record = there[path], now[path]
        kinds = [(r.dtype, r.device, r.requires_grad, len(r.shape)) for r in (then, record)]
        if kinds[0] != kinds[1] or any(a > b for a, b in zip(record.shape, then.shape, strict=True)):
            return f"{path} of {_tensor(then)}, now {_tensor(record)}"
    return ""


def _tensor(record: TensorRecord) -> str:
    return f"{record.dtype} {'x'.join(map(str, record.shape)) or 'scalar'}"


def _amount(budget: int | str) -> Any:
    """A budget to compare: "8GiB" is 8 * 2**30; shares as they are written."""
    try:
        read: Budget = parse_budget(budget, 2**60)
    except BudgetError:  # of a file that was changed: the budget that is asked for now was read before
        return budget
    return read.text if read.bytes is None or read.text.endswith("%") else read.bytes


def _shown(value: Any, around: tuple[Any, ...] = ()) -> str:
    """A value in words that other runs use too: without the numbers of tensors and without addresses.

    Args:
        value: An option, or a part of one.
        around: The functions that hold it.
    """
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, partial):
        around = (*around, value)
        given = [_shown(part, around) for part in (value.func, *value.args) if part not in around]
        given += [f"{name}={_shown(part, around)}" for name, part in value.keywords.items()]
        return f"partial({', '.join(given)})"
    if not callable(value):
        return type(value).__name__ if str(value) == object.__repr__(value) else str(value)
    name = str(getattr(value, "__qualname__", type(value).__name__))
    code = getattr(value, "__code__", None)
    if code is None:
        return name
    around = (*around, value)
    held = referred(value)
    others = [f for f in held if isinstance(f, FunctionType | partial) and f not in around]
    plain = [v for v in held if isinstance(v, _PLAIN)]
    does = "".join([_read(code), *(_shown(f, around) for f in others), *map(_setting, plain)])
    return f"{name} {hashlib.sha256(does.encode()).hexdigest()[:12]}"


def _read(code: CodeType) -> str:
    """What a function does, without where it is written: many losses are named ``<lambda>``."""
    constants = [_read(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts]
    return f"{code.co_code!r} {constants} {code.co_names} {code.co_freevars}"


def _constant(value: object) -> str:
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)  # sets have no order


def _backend(plan: PlanRecord, asked: str) -> str:
    """The name in plans of the backend that was asked for; for "auto" that of the plan."""
    if asked == "auto" and plan.target.backend in ("eager", "replay"):
        return plan.target.backend
    return "eager" if asked == "graph" else asked
