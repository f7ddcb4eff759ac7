"""From a solution to a plan: what is kept, what is recomputed, what that promises."""

import platform
from collections.abc import Mapping
from dataclasses import replace

import torch

from planner._torch import pytree
from planner._torch.distributed import tensor_parallel_ranks
from planner._torch.inductor.fusion_names import Fusion
from planner.allocator.arena import THOROUGH_EVENTS
from planner.capture.captured_step import CapturedStep
from planner.choices import is_recorded
from planner.costs.kernel_timer import MeasuredCosts
from planner.module_parts import parameters_of
from planner.parallel.recorded import parallel_record
from planner.planfile.budget import Budget
from planner.planfile.fingerprint import class_name
from planner.planfile.plan import (
    Coverage,
    Footprint,
    LiveModule,
    ModelRecord,
    PlanRecord,
    SolverRecord,
    Target,
    TensorRecord,
    Timeline,
    WholeStep,
)
from planner.planfile.schema import shortened
from planner.planning.cudnn_note import cudnn_note
from planner.planning.encodings import Solved
from planner.planning.graph_records import forward_only, graph_records, views_records, with_digests
from planner.planning.one_backend import strides_in_memory, unmeasured
from planner.planning.prepared import Prepared
from planner.planning.step_record import step_record
from planner.problem.build import Problem
from planner.problem.emitted_step import EmittedStep
from planner.replay.capture import ReplayedStep
from planner.replay.problem import ReplayProblem, replay_record
from planner.training_step.step import Step
from planner.version import __version__
from solvers.model import indices
from solvers.model.schedule import alive_at, simulate
from solvers.model.solution import Solution

IN_SINGLE_OPERATIONS = (
    "Inductor runs this plan: its peak is that of the programs that Inductor emits; seconds are those of "
    "single operations, and what Inductor fuses takes less"
)
UNPROVEN = (
    "nobody has run such plans on a GPU yet: let planner.verify() compare a step, and leave room: the first "
    "steps take more, as kernels are timed, or recorded, and what the allocator reserves between blocks is "
    "that of a step that is neither, or does not count"
)
AS_WRITTEN = (
    "no schedule of the captured step was found that takes as little as the step without a plan: the module "
    "runs as written, and nothing is recomputed. Plan with backend='replay', which recomputes all the same"
)

ENTERING = (
    "Python enters the captured graphs in about {:.0f} ms a step, whatever is recomputed, where the step "
    "without a plan takes {:.1f} ms: extra time leaves that out. Plan larger batches, where it matters less"
)
_MUCH_PYTHON = 0.05
"""The share of a step from which on it is told."""


def make_plan(
    prepared: Prepared,
    solved: Solution | Solved,
    budget: Budget,
    emitted: tuple[EmittedStep, EmittedStep] | None = None,
    *,
    as_written: bool = False,
) -> PlanRecord:
    """The plan that a solution is.

    Args:
        prepared: The captured step.
        solved: The solution.
        budget: What it was asked for.
        emitted: What the programs of Inductor take that run it, and those that recompute nothing; None
            where eager's operators run it.
        as_written: The module is to run as written instead.
    """
    if isinstance(solved, Solution):
        solved = Solved(solved, prepared.problem)
    solution, problem = solved.solution, solved.problem
    if isinstance(problem, ReplayProblem):
        room = None if budget.bytes is None else prepared.footprint.room_bytes(budget.bytes)
        problem = problem.as_it_runs(solution.schedule, room)
    captured, resident = prepared.captured, prepared.resident
    model, meter = prepared.model, prepared.meter
    graph = problem.graph
    timeline = simulate(graph, solution.schedule)
    peak_bytes, step_bytes = timeline.peak_bytes, timeline.step_bytes
    whole = replace(prepared, problem=problem).whole_step(solution.schedule, THOROUGH_EVENTS)
    whole = whole.model_copy(update={"host_bytes": problem.host_bytes})
    nothing = simulate(prepared.problem.graph, prepared.problem.graph.base_schedule)
    coverage, reached = _coverage(captured)
    forward_steps, nothing_bytes = graph.forward_length, nothing.peak_bytes
    if emitted is not None:
        planned, kept_all = emitted
        peak_bytes, step_bytes, nothing_bytes = planned.peak_bytes, planned.step_bytes, kept_all.peak_bytes
        forward_steps = planned.forward_length
        whole = prepared.footprint.whole_step(peak_bytes, problem.final_bytes)
    seconds, eager_forward = timeline.seconds, sum(not e.backward for e in captured.eager.events)
    replayed = isinstance(problem, ReplayProblem)
    if replayed and (len(solution.schedule) > graph.base_length or peak_bytes < problem.eager.peak_bytes):
        seconds += problem.following_seconds
    if as_written:
        unplanned = problem.eager
        peak_bytes, step_bytes, seconds = unplanned.peak_bytes, unplanned.step_bytes, unplanned.seconds
        whole, forward_steps = prepared.reserving_whole_step, eager_forward

    def footprint(peak: int, seconds: float) -> Footprint:
        return Footprint(
            peak_bytes=resident.total + peak,
            dynamic_peak_bytes=peak,
            resident_bytes=resident.total,
            seconds=seconds,
        )

    notes = [*reached, *captured.notes]
    if as_written:
        notes.append(AS_WRITTEN)
    entering = 0.0 if replayed or as_written else problem.following_seconds
    if entering > _MUCH_PYTHON * problem.eager.seconds > 0:
        notes.append(ENTERING.format(entering * 1e3, problem.eager.seconds * 1e3))
    of_cudnn = None if emitted else cudnn_note(prepared, graph, solution.schedule, timeline.step_bytes)
    if of_cudnn is not None:
        notes.append(of_cudnn)
    if meter is not None and meter.failures:
        notes.append(failed(meter.failures))
    if meter is not None and meter.unmeasured:
        notes.append(unmeasured(meter))
    if isinstance(prepared.costs, MeasuredCosts) and prepared.costs.failures:
        notes.append(
            f"{len(prepared.costs.failures)} operations could not be timed; their seconds are the roofline's"
        )
    if isinstance(prepared.costs, MeasuredCosts) and prepared.costs.left_out:
        notes.append(
            f"{len(prepared.costs.left_out)} operations were not timed, as that had taken as long as the "
            "capture; their seconds are the roofline's, in proportion to what was timed. costs='measured' "
            "times all"
        )
    graphs = graph_records(captured, problem, solution)
    fusion: Fusion = "in-order" if emitted is None else emitted[0].fusion
    if prepared.options.unproven and (
        is_recorded(prepared.options.backend, prepared.options.backend_options)
        or (emitted is not None and prepared.device.kind == "cuda")
    ):
        notes.append(UNPROVEN)
    if emitted is not None:
        notes.append(IN_SINGLE_OPERATIONS)
        graphs = with_digests(graphs, captured, emitted[0].digests)
    return PlanRecord(
        created_with={
            "planner": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **({} if prepared.device.kind == "cuda" else {"threads": str(torch.get_num_threads())}),
        },
        coverage=coverage,
        model=ModelRecord(
            class_name=class_name(model),
            training=prepared.step.in_mode(model),
            inputs=input_records(prepared.step),
            outputs=prepared.step.outputs,
            parameter_count=sum(p.numel() for p in parameters_of(model)),
            state_digest=prepared.state_digest,
            autocast=captured.autocast,
            torch_version=torch.__version__,
            regions=list(prepared.regions),
        ),
        target=Target(
            budget_bytes=bound_bytes(budget, whole),
            budget_text=budget.text,
            device=prepared.device.name,
            inputs=prepared.options.inputs,
            costs=prepared.costs.name,
            workspace=_workspace_source(prepared),
            parallel=parallel_record(
                None if prepared.rank is None else prepared.rank.options, tensor_parallel_ranks(model)
            ),
            in_flight=prepared.step.in_flight,
            backend=prepared.options.backend,
            backend_options=dict(prepared.options.backend_options),
            offload=prepared.options.offload,
        ),
        solver=SolverRecord(
            name=solution.solver,
            status=str(solution.status),
            gap=solution.gap,
            bound_seconds=solution.bound_seconds,
            bound_covers=solved.bound_covers,
            solve_seconds=solution.solve_seconds,
            capture_seconds=prepared.seconds,
        ),
        resident=resident,
        predicted=footprint(peak_bytes, seconds),
        baseline=footprint(problem.eager.peak_bytes, problem.eager.seconds),
        no_recompute=footprint(nothing_bytes, nothing.seconds),
        whole_step=whole,
        baseline_whole_step=prepared.baseline_whole_step,
        graphs=graphs,
        forward_only=forward_only(captured),
        views=views_records(captured),
        as_written=as_written,
        fusion=fusion,
        timeline=Timeline.downsample(step_bytes, forward_steps),
        baseline_timeline=Timeline.downsample(problem.eager.step_bytes, eager_forward),
        peak_holders=_holders(problem, solution, timeline.peak_step)
        if emitted is None and not as_written
        else [LiveModule(module="", bytes=peak_bytes)],
        notes=[*map(shortened, notes)],
        step=step_record(captured, problem) if emitted is None and not as_written else None,
        replay=replay_record(problem) if isinstance(problem, ReplayProblem) and not as_written else None,
    ).remember(prepared.options)


def failed(failures: Mapping[str, str]) -> str:
    """The text about operations whose workspace could not be measured.

    Args:
        failures: By the signature of the call: the reason.
    """
    count = "1 operation" if len(failures) == 1 else f"{len(failures)} operations"
    call, reason = next(iter(failures.items()))
    first = f"{call.partition('(')[0]}: {reason.strip()[:120]}"
    which = first if len(failures) == 1 else f"the first is {first}"
    return f"workspace of {count} could not be measured and counts as 0 ({which})"


def _coverage(captured: CapturedStep) -> tuple[Coverage, list[str]]:
    """How much of the forward the graphs cover, and what to know about that."""
    if isinstance(captured, ReplayedStep):
        return "replayed", []
    count = sum(g.joint is not None for g in captured.graphs)
    notes = []
    if captured.breaks:
        more = f"; and at {len(captured.breaks) - 1} other places" if len(captured.breaks) > 1 else ""
        graphs = (
            f"{count} graphs, planned as one step" if count > 1 else "one graph, and what needs no gradients"
        )
        notes.append(f"the forward is {graphs}; one ends at {captured.breaks[0]}{more}")
    if captured.eager_operations:
        notes.append(
            f"{captured.eager_operations} operations between the graphs run as written; their memory "
            "counts as measured"
        )
    if captured.with_data:
        notes.append(
            "data decide what runs, so the step was captured by running a copy of it; sizes that depend on "
            "data are those of the example"
        )
    if captured.eager_operations:
        return "partly-captured", notes
    return ("one-graph" if count == 1 else "several-graphs"), notes


def _holders(problem: Problem, solution: Solution, step: indices.Step) -> list[LiveModule]:
    graph = problem.graph
    by_module: dict[str, int] = {}
    producer = indices.listed(indices.BaseOp, graph.producer)
    for value in indices.listed(indices.ValueId, alive_at(graph, solution.schedule, step)):
        module = graph.ops[producer[value]].module
        by_module[module] = by_module.get(module, 0) + graph.values[value].bytes
    return [LiveModule(module=m, bytes=b) for m, b in sorted(by_module.items(), key=lambda item: -item[1])]


def input_records(step: Step) -> list[TensorRecord]:
    """The tensors among a step's arguments."""
    leaves, _ = pytree.tree_flatten_with_path((step.args, dict(step.kwargs)))
    records = []
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            where = ("args" if path[0] == pytree.SequenceKey(0) else "kwargs") + pytree.keystr(path[1:])
            records.append(
                TensorRecord(
                    path=where,
                    shape=list(leaf.shape),
                    dtype=str(leaf.dtype).removeprefix("torch."),
                    device=str(leaf.device),
                    requires_grad=leaf.requires_grad,
                    strides=strides_in_memory(leaf),
                )
            )
    return records


def bound_bytes(budget: Budget, whole: WholeStep) -> int | None:
    """The most bytes of a plan's whole step: a percentage bounds those that are allocated."""
    if budget.bytes is None:
        return None
    return budget.bytes + whole.fragmentation_bytes * budget.relative


def _workspace_source(prepared: Prepared) -> str:
    """Where the scratch bytes of operations come from."""
    if prepared.meter is not None:
        return "measured"
    return "formulas" if prepared.device.kind == "cuda" and prepared.device.cudnn else "none"
