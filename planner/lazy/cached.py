"""Whether the plan in a file is the one that would be made now."""

import contextlib
import hashlib
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
from planner.training_step.python_state import belongs_to, referred
from planner.training_step.step import Step
from planner.version import __version__

_NOT_RECORDED = (
    "solver", "effort", "encodings", "host_budget", "time_limit", "keep", "recompute", "checkpoints",
    "regions", "attention", "costs", "loss", "split",
)  # fmt: skip
"""Options that no other field of a plan records."""


def made_of(model: torch.nn.Module, options: Mapping[str, Any]) -> dict[str, str]:
    """Entries of ``created_with``: the options and sizes that no other field of a plan records."""
    trainable = [p.numel() for p in model.parameters() if p.requires_grad]
    given = [f"{name}={_shown(options[name])}" for name in _NOT_RECORDED if options.get(name)]
    asked = PlanOptions(**options)
    device, ranks = find_device(asked.device, device_of(model, Step())), read_parallel(asked.parallel)
    shape_of = None if ranks is None else Rank(ranks).shape_of
    update = optimizer_step(asked.optimizer, parameters_of(model), device, shape_of=shape_of)
    return {
        "module code": _code_of(model),
        "optimizer": f"{update.state_bytes:,} bytes, and {update.transient_bytes:,} in its step",
        "trainable": f"{sum(trainable):,} parameters in {len(trainable)} tensors",
        "options": _label(" ".join(given)) or "none",
    }


def _code_of(model: torch.nn.Module) -> str:
    """A digest of what decides a forward beside parameters: classes and their code, settings, modes."""
    lines, parts = list[str](), named_parts(model)
    for path, part in parts.items():
        kind, own, settings = type(part), vars(part), ""
        # A user's may show what changes from run to run.
        if belongs_to(getattr(kind.extra_repr, "__module__", None), "torch"):
            with contextlib.suppress(Exception):  # as of a class that sets none of what it shows
                settings = part.extra_repr()
        replaced = _shown(own["forward"]) if "forward" in own else ""
        mode = part.training is model.training
        lines.append(f"{path} {kind.__qualname__} {settings} {mode} {replaced}")
    for kind in dict.fromkeys(base for part in parts.values() for base in type(part).__mro__):
        if not belongs_to(kind.__module__, "torch", "builtins"):
            lines += [_read(f.__code__) for f in vars(kind).values() if isinstance(f, FunctionType)]
    return hashlib.sha256("\n".join(lines).encode(errors="replace")).hexdigest()[:16]


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
        *((name, plan.created_with.get(name), now) for name, now in made_of(model, options).items()),
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
        named = [f"{name}={_shown(part)}" for name, part in value.keywords.items()]
        return f"partial({', '.join([*map(_shown, (value.func, *value.args)), *named])})"
    if not callable(value):
        return type(value).__name__ if str(value) == object.__repr__(value) else str(value)
    name = str(getattr(value, "__qualname__", type(value).__name__))
    code = getattr(value, "__code__", None)
    if code is None:
        return name
    around = (*around, value)
    others = [f for f in referred(value) if isinstance(f, FunctionType | partial) and f not in around]
    does = "".join([_read(code), *(_shown(f, around) for f in others)])
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
