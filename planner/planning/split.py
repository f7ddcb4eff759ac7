"""Steps whose loss is computed in pieces: which splits there are, and the best of them for a budget."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from planner._torch.joint import aot_metadata
from planner.capture.captured_step import CapturedGraph
from planner.costs.cuda_scratch import cuda_scratch
from planner.costs.kernel_timer import MeasuredCosts
from planner.errors import CaptureError, InfeasibleBudget
from planner.graph.joint_graph import read_joint
from planner.graph.spec import Split, SplitForm
from planner.graph.split.pieces import NothingToSplit, split_joint, splittable
from planner.planfile.budget import Budget, format_bytes
from planner.planfile.plan import PlanRecord
from planner.planning.prepare import Prepared
from planner.problem.build import build_problem
from planner.problem.encodings import find_packings
from planner.progress import Progress, part_of
from solvers.model.schedule import simulate

LEAST_ROWS = 128
"""Of a piece, where there are more: products of fewer rows take longer for each."""

_TIMED_SECONDS = 5.0
"""How long the operations of pieces are timed, where those of the step are."""

_MUCH = 1 / 20
"""Of the peak: smaller results are not worth pieces."""

_SLOWER = 1.02
"""By how much a plan in the form "forward" is slower than the step for the other form to be looked at."""


def planned_in_pieces(
    prepared: Prepared,
    wanted: Budget,
    room: int | None,
    plan: Callable[[Prepared, Budget, Progress], PlanRecord],
    progress: Progress,
) -> PlanRecord:
    """The best plan of a step in pieces, in one form or the other; where all fits as it is, one in one piece.

    Args:
        prepared: The step, in one piece.
        wanted, room: The budget, and what of it is for forward and backward; None for the least.
        plan: Plans a step.
        progress: Called with what is being done, and how much of it is done.

    Raises:
        CaptureError: There is nothing to split.
        InfeasibleBudget: No plan fits.
    """
    problem = prepared.problem
    whole = simulate(problem.graph, problem.graph.base_schedule)
    if room is not None and whole.peak_bytes <= room:
        return plan(prepared, wanted, progress)
    enough, most = _pieces(prepared)
    if isinstance(prepared.costs, MeasuredCosts):
        prepared.costs.allow(_TIMED_SECONDS)
    tried: list[tuple[SplitForm, int]] = [("forward", most), ("backward", most)]
    if room is not None and enough < most:
        tried.insert(0, ("forward", enough))
    best: PlanRecord | None = None
    refused: list[InfeasibleBudget] = []
    impossible: CaptureError | None = None
    for number, (form, pieces) in enumerate(tried):
        if best is not None and room is not None and not _is_slow(best):
            break
        try:
            split = _split(prepared, Split(form, pieces))
            made = plan(split, wanted, part_of(progress, number / len(tried), (number + 1) / len(tried)))
        except InfeasibleBudget as error:
            refused.append(error)
            continue
        except CaptureError as error:
            impossible = error
            continue
        if best is None or _rank(made, room) < _rank(best, room):
            best = made
    if best is not None:
        return best
    if refused:
        raise min(refused, key=lambda error: error.minimum_bytes)
    assert impossible is not None
    raise impossible


def _rank(plan: PlanRecord, room: int | None) -> tuple[float, float]:
    peak, seconds = plan.predicted.dynamic_peak_bytes, plan.predicted.seconds
    return (peak, seconds) if room is None else (seconds, peak)


def _is_slow(plan: PlanRecord) -> bool:
    return plan.predicted.seconds > plan.no_recompute.seconds * _SLOWER


def _pieces(prepared: Prepared) -> tuple[int, int]:
    """How many pieces are so small that the step hardly takes more for them, and how many at most."""
    enough = most = 2
    for graph in prepared.captured.graphs:
        if graph.joint is None:
            continue
        try:
            runs = splittable(graph.joint.module, graph.joint.forward_outputs)[1]
        except NothingToSplit:
            continue
        for run in runs:
            while run.rows >= 2 * most * LEAST_ROWS:
                most *= 2
            while enough < most and run.bytes > enough * prepared.problem.final_bytes // 2:
                enough *= 2
    return enough, most


def split_hint(prepared: Prepared) -> str:
    """The sentence to add where a budget is too small and pieces would help; empty where they would not."""
    options = prepared.options
    if options.split != "none" or options.backend != "eager" or options.in_flight or options.parallel:
        return ""
    held = prepared.problem.eager.peak_bytes
    for graph in prepared.captured.graphs:
        if graph.joint is None:
            continue
        try:
            _, runs = splittable(graph.joint.module, graph.joint.forward_outputs)
        except NothingToSplit:
            continue
        largest = max(runs, key=lambda run: run.bytes)
        if largest.bytes >= held * _MUCH:
            return (
                f". {format_bytes(largest.bytes)} of it come from {largest.modules[0] or 'the module'}: plan "
                "with split='loss', outputs='dropped' to compute what ends in the loss in pieces of rows"
            )
    return ""


def split_as(plan: PlanRecord, prepared: Prepared) -> Prepared:
    """A step that is captured in one piece, in the pieces of a plan."""
    splits = {Split(graph.split.form, graph.split.pieces) for graph in plan.graphs if graph.split is not None}
    return _split(prepared, min(splits)) if splits else prepared


def _split(prepared: Prepared, split: Split) -> Prepared:
    graphs, why = (
        list[CapturedGraph](),
        CaptureError("split='loss': no graph is captured. Plan with split='none'"),
    )
    for graph in prepared.captured.graphs:
        try:
            graphs.append(_split_graph(prepared, graph, split))
        except NothingToSplit as error:
            graphs.append(graph)
            why = error
    if not any(graph.spec.split for graph in graphs):
        raise why
    captured = replace(
        prepared.captured, graphs=graphs, notes=[*prepared.captured.notes, _note(graphs, split)]
    )
    device, meter, costs = prepared.device, prepared.meter, prepared.costs
    problem = build_problem(
        captured,
        device,
        meter or cuda_scratch(device),
        costs,
        copying=prepared.options.inputs == "overwritten",
        in_flight=prepared.step.in_flight,
    )
    packings = find_packings(captured, problem, device, meter, costs)
    if isinstance(costs, MeasuredCosts):
        costs.save()
    return replace(prepared, captured=captured, problem=problem, packings=packings)


def _split_graph(prepared: Prepared, graph: CapturedGraph, split: Split) -> CapturedGraph:
    joint = graph.joint
    if joint is None:
        return graph
    made, runs, dropped = split_joint(joint.module, joint.forward_outputs, split)
    positions = aot_metadata.output_positions(joint.module, joint.forward_outputs)
    for place, value in dropped.items():
        if prepared.step.outputs != "dropped" or positions.get(place) not in graph.spec.unused_outputs:
            shape = "x".join(map(str, value.shape))
            raise CaptureError(
                f"split='loss': the module returns a result of {shape} of which the loss is computed, and "
                "the training loop may use it. Where it uses nothing but the loss, as in "
                "model(...).loss.backward(), plan with outputs='dropped'; else with split='none'"
            )
    reading = read_joint(made, joint.forward_outputs)
    copied = {p for p, old in zip(reading.primals, joint.primals, strict=True) if old in joint.to_copy}
    reading.to_copy = frozenset(copied)
    rows = tuple((module, run.rows) for run in runs for module in run.modules)
    return replace(graph, joint=reading, spec=replace(graph.spec, split=split), split_runs=rows)


def _note(graphs: Sequence[CapturedGraph], split: Split) -> str:
    runs = [
        f"{module or 'the module'} ({rows:,} rows)" for graph in graphs for module, rows in graph.split_runs
    ]
    how = "gradients with each piece in the forward" if split.form == "forward" else "in the backward again"
    return (
        f"the loss is computed in {split.pieces} pieces of what begins at {', '.join(dict.fromkeys(runs))}, "
        f"{how}: gradients are as near to the true ones as without a plan, and not equal in the last bits; "
        "what is computed there is not returned whole"
    )
