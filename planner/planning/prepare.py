"""A step captured and its problem built, for the backend that is asked for, or the better one of two."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from planner._torch.compat import graphs_are_off
from planner._torch.distributed import holds_dtensors
from planner._torch.dynamo import NOT_A_GRAPH
from planner.capture.capture import Most
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
"""Of how many graphs a step may be that "auto" plans by graphs. The masks of Hugging Face's encoders and
decoders ask data, and make 6 to 10; graphs then take less extra time than replays, and more are slow to
plan."""

MOST_OPERATIONS = 2_000
"""Of how many operations a forward may be that "auto" plans by graphs: of 6,000, planning and a first step
take three minutes by graphs, and a quarter of one by replays."""


def prepare(
    model: torch.nn.Module,
    step: Step,
    options: PlanOptions,
    *,
    progress: Progress = no_report,
    like: Prepared | None = None,
) -> Prepared:
    """Capture a step and build its problem, for the backend that is asked for, or the better one of two.

    Args:
        model: The module.
        step: Its step; its loss, outputs and mode count, not those of ``options``.
        options: All else that decides what the step takes.
        progress: Called with what is being done, and how much of it is done.
        like: The same model's step of another size, by the same options: the optimizer's step is as there.

    Raises:
        PlannerError: As :func:`planner.plan` does.
    """
    check_backend(options)
    off = graphs_are_off()

    def by(backend: BackendChoice, most: Most | None = None) -> Prepared:
        chosen = replace(options, backend=backend)
        return prepare_for_backend(model, step, chosen, progress=progress, like=like, most=most)

    if options.split != "none" or options.offload != "none":
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
    graphs, told, why = None, list[str](), ""
    try:
        with warnings_collected() as told:
            graphs = by("eager", Most(MOST_GRAPHS, MOST_OPERATIONS))
    except CaptureError as error:
        why = f"{error}".removesuffix(f". {NOT_A_GRAPH}")
    if graphs is not None:
        if graphs.captured.eager_operations:
            why = "parts of the forward are no graphs"
        if not (why or told):
            return graphs
    with warnings_collected() as also:
        replayed = by("replay")
    of_graphs = [text for text in told if text not in also]
    if graphs is not None and not why and not of_graphs:
        return _said(graphs, told)  # what is warned of is the step's, whatever follows the plan
    return _said(_replayed(replayed, why or of_graphs[0]), also)


def _replayed(prepared: Prepared, why: str) -> Prepared:
    prepared.captured.notes.append(f"followed by replaying operators, not by a graph: {why}")
    return prepared


def _said(prepared: Prepared, told: Sequence[str]) -> Prepared:
    for text in told:
        warn(text)
    return prepared


def _can_replay(model: torch.nn.Module, options: PlanOptions) -> bool:
    """Whether a step can be followed by replaying at all."""
    parallel = read_parallel(options.parallel)
    return (
        options.regions is None
        and options.in_flight is None
        and not isinstance(parallel, FSDP2)
        and not holds_dtensors(model)
    )
