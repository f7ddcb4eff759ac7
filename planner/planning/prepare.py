"""Captures a step and builds its problem, and chooses between graphs and replay for ``backend="auto"``."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from planner._torch.compat import graphs_are_off
from planner._torch.distributed import holds_dtensors
from planner._torch.dynamo import NOT_A_GRAPH
from planner.capture.capture import Most
from planner.capture.uncaptured import AROUND
from planner.choices import BackendChoice
from planner.errors import CaptureError, PlannerError, warn, warnings_collected
from planner.parallel.strategies import FSDP2, read_parallel
from planner.planning.backends import check_backend
from planner.planning.one_backend import prepare_for_backend
from planner.planning.options import PlanOptions
from planner.planning.prepared import Prepared
from planner.progress import Progress, no_report
from planner.training_step.step import Step

MOST_GRAPHS = 12
"""The most graphs of a step that "auto" plans by graphs. Hugging Face's encoders and decoders have 6 to
10, as Python reads data for their masks. With these, graphs take less extra time than replays. More graphs
are slow to plan."""

MOST_OPERATIONS = 2_000
"""The most operations of a forward that "auto" plans by graphs. With 6,000, planning and a first step take
three minutes by graphs, and 15 seconds by replays."""


def prepare(
    model: torch.nn.Module,
    step: Step,
    options: PlanOptions,
    *,
    progress: Progress = no_report,
    like: Prepared | None = None,
) -> Prepared:
    """Capture a step and build its problem.

    With ``backend="auto"`` graphs are tried first. They are taken if they are few and small enough,
    nothing of the forward lies between them, and they cause no warning that a replay would not cause.

    Args:
        model: The module.
        step: Its step. Its loss, outputs and mode count, not those of ``options``.
        options: All other options that the step's memory and time depend on.
        progress: Called with a text and with the share of the work that is done, from 0 to 1.
        like: The same model's step of another size, prepared by the same options: its prediction of the
            optimizer's step is taken over.

    Raises:
        PlannerError: As :func:`planner.plan` does.
    """
    check_backend(options)
    off = graphs_are_off()

    def by(backend: BackendChoice, most: Most | None = None) -> Prepared:
        chosen = replace(options, backend=backend)
        return prepare_for_backend(model, step, chosen, progress=progress, like=like, most=most)

    if options.split != "none" or options.offload != "none":  # only graphs can
        if off is not None:
            name = "split" if options.split != "none" else "offload"
            raise PlannerError(f"{name}={getattr(options, name)!r}: {off}. Plan with {name}='none'")
        return by("eager", Most(MOST_GRAPHS) if options.regions is None else None)
    if options.backend != "auto":
        if off is not None and options.backend != "replay":
            raise PlannerError(f"backend={options.backend!r}: {off}. Plan with backend='replay'")
        return by(options.backend)
    if off is not None:
        return _replayed(by("replay"), off)
    if not _can_replay(model, options):
        return by("eager")
    sharded = _is_sharded(options)
    graphs, told, why = None, list[str](), ""
    try:
        with warnings_collected() as told:  # graphs of units that are alike are captured once
            graphs = by("eager", None if sharded else Most(MOST_GRAPHS, MOST_OPERATIONS))
    except CaptureError as error:
        why = f"{error}".removesuffix(f". {NOT_A_GRAPH}").removesuffix(f". {AROUND}")
    if graphs is not None:
        # Between the units of fully_shard some operations always run as written.
        if graphs.captured.breaks if sharded else graphs.captured.eager_operations:
            why = "parts of the forward are no graphs"
        if not (why or told):
            return graphs
    with warnings_collected() as also:
        replayed = by("replay")
    caused = [text for text in told if text not in also]  # the warnings that graphs alone cause
    if graphs is not None and not why and not caused:
        return _warned(graphs, told)  # of the step itself, whichever way the plan is followed
    return _warned(_replayed(replayed, why or caused[0]), also)


def _replayed(prepared: Prepared, why: str) -> Prepared:
    """Note why replays, not graphs, follow the plan."""
    prepared.captured.notes.append(f"followed by replaying operators, not by a graph: {why}")
    return prepared


def _warned(prepared: Prepared, told: Sequence[str]) -> Prepared:
    """Warn now of texts that were collected while both ways were tried."""
    for text in told:
        warn(text)
    return prepared


def _can_replay(model: torch.nn.Module, options: PlanOptions) -> bool:
    """Whether replays can follow a step: one without pipelines and tensor parallelism, whose regions are
    units of ``fully_shard``."""
    other_regions = options.regions is not None and not _is_sharded(options)
    return not other_regions and options.in_flight is None and not holds_dtensors(model)


def _is_sharded(options: PlanOptions) -> bool:
    return isinstance(read_parallel(options.parallel), FSDP2)
