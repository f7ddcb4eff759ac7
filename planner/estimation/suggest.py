"""The public function suggest: which modules to checkpoint, for those who write checkpoints by hand."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import torch

from planner.errors import CaptureError, warn
from planner.estimation.checkpointed import is_called, record_checkpointed
from planner.estimation.estimate import EstimateError, estimate_prepared, prepared_step
from planner.estimation.module_memory import module_memory
from planner.estimation.table import Checkpointed, Estimate
from planner.planning.options import StepKeywords, shows_options
from planner.planning.prepared import Prepared
from planner.progress import Progress, no_report
from planner.training_step.inputs import Inputs
from solvers.model.arrays import Schedule
from solvers.model.graph import Graph
from solvers.model.schedule import simulate
from solvers.whole_blocks import OUTSIDE, recompute_blocks

_CANDIDATES = 48
"""The number of modules, those that hold most, that are tried for each name that is suggested."""


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

    One module is added after the other: each time the one with the least peak, and among equal ones the one
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
    found = _suggested(prepared, k, report)
    report("suggested", 1.0)
    return found


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
    found = _suggested(prepared, k, report)
    return estimate_prepared(prepared, found[-1] if found else None, report)


def _check_count(k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise EstimateError(f"k={k!r}: expected how many modules to name, 1 or more")


def _suggested(prepared: Prepared, k: int, report: Progress) -> list[Checkpointed]:
    graph, model = prepared.problem.graph, prepared.model
    holding = [row for row in module_memory(prepared)[1:] if row.activation_bytes]
    held = sorted(holding, key=lambda row: -row.activation_bytes)
    candidates = [row.module for row in held if is_called(model.get_submodule(row.module))][:_CANDIDATES]
    found: list[Checkpointed] = []
    chosen: tuple[str, ...] = ()
    unfit: dict[str, CaptureError] = {}
    least = simulate(graph, graph.base_schedule).peak_bytes
    while candidates and len(found) < k:
        report(f"trying modules for place {len(found) + 1} of {k}", 0.8 + 0.15 * len(found) / k)
        tried = {name: simulate(graph, _whole(graph, [*chosen, name])) for name in candidates}
        name = min(tried, key=lambda name: (tried[name].peak_bytes, tried[name].seconds))
        if tried[name].peak_bytes >= least:
            break
        try:
            found.append(record_checkpointed(prepared, [*chosen, name]))
        except CaptureError as error:
            unfit[name] = error
            like = repr(model.get_submodule(name))  # a layer that cannot run twice is seldom alone
            candidates = [c for c in candidates if repr(model.get_submodule(c)) != like]
            continue
        least, chosen = tried[name].peak_bytes, (*chosen, name)
        candidates = [c for c in candidates if not _nested(c, name)]
    if unfit:
        why = next(iter(unfit.values()))
        warn(
            f"not suggested are {', '.join(unfit)} and the like, which cannot run twice. Leave them as they "
            f"are. {why}"
        )
    return found


def _whole(graph: Graph, names: Sequence[str]) -> Schedule:
    """The schedule that recomputes each of some modules whole. Each call is a block of its own."""
    block = np.full(graph.forward_length, OUTSIDE, dtype=np.int64)
    count, before = -1, None
    for row, op in enumerate(graph.ops[: graph.forward_length]):
        inside = next((name for name in names if op.module == name or op.module.startswith(name + ".")), None)
        count += inside is not None and inside != before
        block[row] = OUTSIDE if inside is None else count
        before = inside
    return recompute_blocks(graph, block)


def _nested(a: str, b: str) -> bool:
    return a == b or a.startswith(b + ".") or b.startswith(a + ".")
