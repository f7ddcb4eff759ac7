"""The public functions estimate and suggest: the memory of a step as it is, and with checkpoints placed by
hand. Nothing is solved.

Elsewhere: the checkpoints' estimate that Paddle's guide to recomputation asks for; torchinfo's table.
"""

import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from planner.capture.capture import record_eagerly
from planner.costs.eager_timeline import eager_timeline
from planner.errors import PlannerError
from planner.estimation.module_memory import module_memory
from planner.estimation.table import Checkpointed, Estimate
from planner.planning.options import StepKeywords, check_options, read_options, shows_options
from planner.planning.prepare import Prepared, prepare
from planner.problem.selection import SelectionError
from planner.progress import Progress, no_report
from planner.training_step.inputs import Inputs, check_model, read_step
from solvers.model.arrays import Schedule
from solvers.model.graph import Graph
from solvers.model.schedule import simulate
from solvers.whole_blocks import OUTSIDE, recompute_blocks

Change = Callable[[torch.nn.Module], None]
"""Changes a copy of the model."""

_CANDIDATES = 48
"""Of a model's modules so many of those that hold most are tried, for each name that is suggested."""


class EstimateError(PlannerError, ValueError):
    """Nothing can be suggested, or an argument is out of range."""


@shows_options(StepKeywords)
def estimate(
    model: torch.nn.Module,
    args: Inputs = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    checkpoints: Sequence[str] = (),
    progress: Progress | None = None,
    **options: Unpack[StepKeywords],
) -> Estimate:
    """What a training step takes as it is, module by module, and with checkpoints around some modules.

    Args:
        model, args, kwargs: As for :func:`planner.plan`. Nothing is run.
        checkpoints: Modules that would be wrapped in ``torch.utils.checkpoint`` each, as paths
            ("encoder.layer.0") or patterns ("encoder.layer.*"); of modules inside each other the outermost.
        progress: Called with a text and a fraction from 0 to 1.
        **options: See :class:`planner.planning.options.PlanOptions`.

    Raises:
        SelectionError: If ``checkpoints`` names what is not there.
        CaptureError, InputError: As :func:`planner.plan` does.
    """
    check_options(checkpoints=checkpoints)
    check_model(model)
    names = _matching(model, checkpoints)
    prepared = prepared_step("estimate", model, args, kwargs, progress, options)
    return _estimate(prepared, names, progress or no_report)


def estimate_suggested(
    model: torch.nn.Module,
    args: Inputs = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    k: int,
    progress: Progress | None = None,
    **options: Unpack[StepKeywords],
) -> Estimate:
    """:func:`estimate` with checkpoints around the modules that :func:`suggest` names, ``k`` at most: the
    step is captured once."""
    _check_count(k)
    prepared = prepared_step("estimate", model, args, kwargs, progress, options)
    report = progress or no_report
    return _estimate(prepared, _chosen(prepared, k, report), report)


def _estimate(prepared: Prepared, names: Sequence[str], report: Progress) -> Estimate:
    report("recording the step with checkpoints", 0.95)
    made = Estimate(
        whole_step=prepared.baseline_whole_step,
        dynamic_peak_bytes=prepared.problem.eager.peak_bytes,
        resident_bytes=prepared.resident.total,
        optimizer_bytes=prepared.resident.optimizer_bytes,
        modules=module_memory(prepared),
        checkpointed=_checkpointed(prepared, names) if names else None,
        gradient_checkpointing=_as_hugging_face(prepared),
    )
    report("estimated", 1.0)
    return made


@shows_options(StepKeywords)
def suggest(
    model: torch.nn.Module,
    args: Inputs = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    k: int = 4,
    progress: Progress | None = None,
    **options: Unpack[StepKeywords],
) -> list[Checkpointed]:
    """The modules whose checkpointing lowers the peak most, for those who write checkpoints by hand.

    One module is added after the other, each the one with which the peak is least; of equal ones the one
    that takes least time.

    Args:
        model, args, kwargs: As for :func:`planner.plan`. Nothing is run.
        k: How many at most.
        progress: Called with a text and a fraction from 0 to 1.
        **options: See :class:`planner.planning.options.PlanOptions`.

    Returns:
        The steps with the first module, the first two, and so on; fewer than ``k`` where no further module
        lowers the peak.

    Raises:
        EstimateError: If ``k`` is not a positive number.
        CaptureError, InputError: As :func:`planner.plan` does.
    """
    _check_count(k)
    prepared = prepared_step("suggest", model, args, kwargs, progress, options)
    report = progress or no_report
    chosen = _chosen(prepared, k, report)
    found = [_checkpointed(prepared, chosen[: i + 1]) for i in range(len(chosen))]
    report("suggested", 1.0)
    return found


def _check_count(k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise EstimateError(f"k={k!r}: expected how many modules to name, 1 or more")


def _chosen(prepared: Prepared, k: int, report: Progress) -> list[str]:
    """The modules to suggest, the first first."""
    graph = prepared.problem.graph
    holding = [row for row in module_memory(prepared)[1:] if row.activation_bytes]
    held = sorted(holding, key=lambda row: -row.activation_bytes)
    called = [row.module for row in held if _is_called(prepared.model.get_submodule(row.module))]
    candidates = called[:_CANDIDATES]
    chosen: list[str] = []
    least = simulate(graph, graph.base_schedule).peak_bytes
    while candidates and len(chosen) < k:
        report(f"trying modules for place {len(chosen) + 1} of {k}", 0.8 + 0.15 * len(chosen) / k)
        tried = {name: simulate(graph, _whole(graph, [*chosen, name])) for name in candidates}
        name = min(tried, key=lambda name: (tried[name].peak_bytes, tried[name].seconds))
        if tried[name].peak_bytes >= least:
            break
        least = tried[name].peak_bytes
        chosen.append(name)
        candidates = [c for c in candidates if not _nested(c, name)]
    return chosen


def _whole(graph: Graph, names: Sequence[str]) -> Schedule:
    """The schedule that recomputes each of some modules whole; modules that run again are further blocks."""
    block = np.full(graph.forward_length, OUTSIDE, dtype=np.int64)
    count, before = -1, None
    for row, op in enumerate(graph.ops[: graph.forward_length]):
        inside = next((name for name in names if op.module == name or op.module.startswith(name + ".")), None)
        count += inside is not None and inside != before
        block[row] = OUTSIDE if inside is None else count
        before = inside
    return recompute_blocks(graph, block)


def prepared_step(
    of: str,
    model: torch.nn.Module,
    args: Inputs,
    kwargs: Mapping[str, Any] | None,
    progress: Progress | None,
    options: StepKeywords,
) -> Prepared:
    """The step that a function of this package is about, captured; ``of`` is the function's name."""
    check_options(progress=progress)
    wanted = read_options(of, StepKeywords, options)
    report = progress or no_report
    step = read_step(model, args, kwargs, wanted.loss, wanted.outputs, of=of)
    return prepare(
        model,
        replace(step, training=wanted.training),
        wanted,
        progress=lambda text, fraction: report(text, 0.8 * fraction),
    )


def with_checkpoints(prepared: Prepared, patterns: Sequence[str]) -> tuple[Change, Checkpointed]:
    """What puts a checkpoint around each of some modules, and the step with it."""
    names = _matching(prepared.model, patterns)
    return wrap_in_checkpoints(names), _checkpointed(prepared, names)


def enable_checkpointing(prepared: Prepared) -> tuple[Change, Checkpointed] | None:
    """What Hugging Face's models do themselves, and the step with it; None for others."""
    made = _as_hugging_face(prepared)
    return None if made is None else (enable, made)


def _checkpointed(prepared: Prepared, names: Sequence[str]) -> Checkpointed:
    """The step with a checkpoint around each of some modules, recorded."""
    return _recorded(prepared, wrap_in_checkpoints(names), names)


def wrap_in_checkpoints(names: Sequence[str]) -> Change:
    """What puts ``torch.utils.checkpoint`` around each of some modules."""

    def wrap(copied: torch.nn.Module) -> None:
        for name in names:
            part = copied.get_submodule(name)
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)

    return wrap


def _as_hugging_face(prepared: Prepared) -> Checkpointed | None:
    """The step with what Hugging Face's models checkpoint themselves; None for others."""
    model = prepared.model
    layers = [
        path
        for path, module in model.named_modules()
        if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)
    ]
    if not layers or not getattr(model, "supports_gradient_checkpointing", False):
        return None
    return _recorded(prepared, enable, layers)


def enable(copied: torch.nn.Module) -> None:
    """Switch on the checkpointing that a model of Hugging Face brings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is to have another name one day
        copied.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]


def _recorded(prepared: Prepared, change: Change, names: Sequence[str]) -> Checkpointed:
    recording = record_eagerly(
        prepared.model,
        prepared.step,
        change,
        cuda=prepared.cuda,
        accumulate=prepared.options.accumulate,
        rank=prepared.rank,
    )
    timeline = eager_timeline(recording, prepared.device, prepared.meter, prepared.costs)
    before = prepared.problem.eager.seconds
    whole = prepared.footprint.whole_step(timeline.peak_bytes, timeline.final_bytes, timeline.allocations)
    return Checkpointed(
        modules=tuple(names),
        peak_bytes=prepared.resident.total + timeline.peak_bytes,
        dynamic_peak_bytes=timeline.peak_bytes,
        total_bytes=whole.total_bytes,
        overhead=timeline.seconds / before - 1 if before else 0.0,
    )


def _matching(model: torch.nn.Module, patterns: Sequence[str] | str) -> list[str]:
    """The modules that patterns match; of those inside each other the outermost."""
    paths = [path for path, _ in model.named_modules() if path]
    found: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = [path for path in paths if fnmatchcase(path, pattern)]
        if not matching:
            near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.4)
            hint = f"; near to it are {', '.join(near)}" if near else ""
            raise SelectionError(f"checkpoints= names {pattern!r}, but no module of the model matches{hint}")
        called = [path for path in matching if _is_called(model.get_submodule(path))]
        if not called:
            raise SelectionError(
                f"checkpoints= names {pattern!r}, a container without a forward, which is never called: name "
                f"what is in it, as '{pattern}.*'"
            )
        found += called
    outermost = [a for a in found if not any(a.startswith(b + ".") for b in found)]
    return list(dict.fromkeys(outermost))


def _is_called(module: torch.nn.Module) -> bool:
    # An nn.ModuleList has no forward: a checkpoint around it would never run.
    return type(module).forward is not torch.nn.Module.forward or "forward" in vars(module)


def _nested(a: str, b: str) -> bool:
    return a == b or a.startswith(b + ".") or b.startswith(a + ".")
