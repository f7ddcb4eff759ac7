"""The public function estimate: the memory of a step as it is, and with checkpoints placed by hand.

Nothing is solved. Similar elsewhere: torchinfo's table of modules; Paddle's guide to recomputation, which
asks for such an estimate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch

from planner.errors import PlannerError
from planner.estimation.checkpointed import matching_modules, record_checkpointed, record_hugging_face
from planner.estimation.module_memory import module_memory
from planner.estimation.table import Checkpointed, Estimate
from planner.planning.options import (
    StepKeywords,
    check_options,
    read_options,
    refuse_in_flight,
    shows_options,
)
from planner.planning.prepare import prepare
from planner.planning.prepared import Prepared
from planner.progress import Progress, no_report
from planner.training_step.inputs import Inputs, check_model, read_step


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
    """The memory of a training step as it is, module by module, and with checkpoints around some modules.

    Args:
        model, args, kwargs: As for :func:`planner.plan`. Nothing is run.
        checkpoints: Modules that would be wrapped in ``torch.utils.checkpoint`` each, as paths
            ("encoder.layer.0") or patterns ("encoder.layer.*"); of modules inside each other the outermost.
        progress: Called with a text and a fraction from 0 to 1.
        **options: See :class:`planner.planning.options.PlanOptions`.

    Raises:
        SelectionError: If ``checkpoints`` names a module that is not there.
        CaptureError, InputError: As :func:`planner.plan` does.
    """
    check_options(checkpoints=checkpoints)
    check_model(model)
    names = matching_modules(model, checkpoints)
    prepared = prepared_step("estimate", model, args, kwargs, progress, options)
    report = progress or no_report
    report("recording the step with checkpoints", 0.9)
    return estimate_prepared(prepared, record_checkpointed(prepared, names) if names else None, report)


def estimate_prepared(prepared: Prepared, checkpointed: Checkpointed | None, report: Progress) -> Estimate:
    """The estimate of a captured step; ``checkpointed`` is the step with checkpoints, recorded."""
    report("recording the step with checkpoints", 0.95)
    made = Estimate(
        whole_step=prepared.baseline_whole_step,
        dynamic_peak_bytes=prepared.problem.eager.peak_bytes,
        resident_bytes=prepared.resident.total,
        optimizer_bytes=prepared.resident.optimizer_bytes,
        modules=module_memory(prepared),
        checkpointed=checkpointed,
        gradient_checkpointing=record_hugging_face(prepared),
        reserving=prepared.reserving_whole_step,
    )
    report("estimated", 1.0)
    return made


def prepared_step(
    of: str,
    model: torch.nn.Module,
    args: Inputs,
    kwargs: Mapping[str, Any] | None,
    progress: Progress | None,
    options: StepKeywords,
) -> Prepared:
    """The captured step of a model, for the public function whose name is ``of``."""
    check_options(progress=progress)
    wanted = read_options(of, StepKeywords, options).without_timing()
    refuse_in_flight(of, wanted)
    report = progress or no_report
    step = read_step(model, args, kwargs, wanted.loss, wanted.outputs, of=of)
    return prepare(
        model,
        replace(step, training=wanted.training),
        wanted,
        progress=lambda text, fraction: report(text, 0.8 * fraction),
    )
