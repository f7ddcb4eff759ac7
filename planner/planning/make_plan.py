"""From a solution to a plan: what is kept, what is recomputed, what that promises."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from planner._torch import pytree
from planner._torch.distributed import tensor_parallel_ranks
from planner._torch.inductor.fusion_names import Fusion
from planner.capture.captured_step import CapturedGraph, CapturedStep
from planner.costs.kernel_timer import MeasuredCosts
from planner.lowering.partition import no_recomputation
from planner.module_parts import parameters_of
from planner.parallel.recorded import parallel_record
from planner.planfile.budget import Budget
from planner.planfile.fingerprint import class_name
from planner.planfile.plan import (
    Coverage,
    Footprint,
    GradientLayout,
    GraphRecord,
    LiveModule,
    ModelRecord,
    OpRecord,
    PlanRecord,
    Program,
    SolverRecord,
    SplitRecord,
    SplitRun,
    Target,
    TensorRecord,
    Timeline,
    ViewsRecord,
)
from planner.planfile.schema import shortened
from planner.planning.cudnn_note import cudnn_note
from planner.planning.encodings import Solved
from planner.planning.prepare import strides_in_memory, unmeasured
from planner.planning.prepared import Prepared
from planner.planning.step_record import step_record
from planner.problem.build import Problem
from planner.problem.emitted_step import EmittedStep
from planner.replay.capture import ReplayedStep
from planner.replay.problem import ReplayProblem, replay_record
from planner.training_step.step import Step
from planner.version import __version__
from solvers.model import indices
from solvers.model.schedule import alive_at, lifetimes, simulate
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
    whole = replace(prepared, problem=problem).whole_step(solution.schedule)
    whole = whole.model_copy(update={"host_bytes": problem.host_bytes})
    budget_bytes = budget.bytes
    if budget_bytes is not None and budget.relative:
        budget_bytes += whole.fragmentation_bytes
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
    graphs = _graph_records(captured, problem, solution)
    fusion: Fusion = "in-order" if emitted is None else emitted[0].fusion
    if prepared.options.unproven and (
        prepared.options.backend == "cudagraphs" or (emitted is not None and prepared.device.kind == "cuda")
    ):
        notes.append(UNPROVEN)
    if emitted is not None:
        notes.append(IN_SINGLE_OPERATIONS)
        graphs = _with_digests(graphs, captured, emitted[0].digests)
    return PlanRecord(
        created_with={
            "planner": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
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
            budget_bytes=budget_bytes,
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
        forward_only=_forward_only(captured),
        views=_views(captured),
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
    """What to say of operations whose workspace could not be measured.

    Args:
        failures: Why, by the signature of the call.
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


def _with_digests(
    records: Sequence[GraphRecord],
    captured: CapturedStep,
    digests: Mapping[tuple[int, tuple[int, ...]], tuple[str, str]],
) -> list[GraphRecord]:
    """Records that say which programs of Inductor were planned."""
    indices = [i for i, graph in enumerate(captured.graphs) if graph.joint is not None]

    def identified(graph: int, program: Program) -> Any:
        found = digests.get((graph, tuple(program.backward)), ())
        return program.model_copy(update={"emitted": list(found)})

    return [
        identified(graph, record).model_copy(
            update={"other_programs": [identified(graph, program) for program in record.other_programs]}
        )
        for graph, record in zip(indices, records, strict=True)
    ]


def _graph_records(captured: CapturedStep, problem: Problem, solution: Solution) -> list[GraphRecord]:
    sequences = problem.backward_sequences(captured, solution.schedule)
    cost: dict[tuple[int, int], float] = {}
    size: dict[tuple[int, int], int] = {}
    for row, source in indices.numbered(indices.BaseOp, problem.sources):
        key = (source.graph, source.op)
        if source.graph >= 0 and key not in cost:  # alike in all executions
            cost[key] = problem.graph.ops[row].seconds
            outputs = problem.graph.ops[row].outputs
            size[key] = sum(
                problem.graph.values[v].bytes for v in outputs if not problem.graph.values[v].on_demand
            )
    kept = _kept(problem, solution)
    packed: dict[tuple[int, int], list[int]] = {}
    completed: dict[tuple[int, int], list[int]] = {}
    joints = {i: g.joint for i, g in enumerate(captured.graphs) if g.joint is not None}
    for mask in sorted(problem.packed, key=lambda source: source.op):
        packed.setdefault((mask.graph, mask.instance), []).append(mask.op)
        if problem.host_bytes and mask.op < joints[mask.graph].forward_length:
            last = problem.completed.get(mask, mask)
            completed.setdefault((mask.graph, mask.instance), []).append(last.op)
    records = []
    for index, (captured_graph, executions) in enumerate(zip(captured.graphs, sequences, strict=True)):
        joint = captured_graph.joint
        if joint is None:
            continue
        # One that the recorded step did not run has no execution there.
        decided = [
            (tuple(b), tuple(packed.get((index, n), ())), tuple(completed.get((index, n), ())))
            for n, b in enumerate(executions)
        ]
        found = {execution: n for n, execution in reversed(list(enumerate(decided)))}
        programs = [
            Program(
                backward=list(backward),
                packed=list(masks),
                completed=list(later),
                kept=kept.get((index, n), []),
            )
            for (backward, masks, later), n in sorted(found.items(), key=lambda item: item[1])
        ] or [Program(backward=no_recomputation(joint))]
        numbers = {
            (tuple(p.backward), tuple(p.packed), tuple(p.completed)): n for n, p in enumerate(programs)
        }
        ops = [
            OpRecord(
                name=op.name,
                module=op.module,
                bytes=size.get((index, op.index), 0),
                phase="backward" if op.backward else "forward",
                seconds=cost.get((index, op.index), 0.0),
            )
            for op in joint.ops
        ]
        records.append(
            GraphRecord(
                fingerprint=joint.fingerprint,
                structure=captured_graph.structure,
                occurrence=captured_graph.occurrence,
                occurrences=captured_graph.occurrences,
                places=list(captured_graph.places[: max(len(decided), 1)]),
                unused_outputs=list(captured_graph.spec.unused_outputs),
                per_use_inputs=sorted(captured_graph.spec.per_use_inputs),
                handed_inputs=sorted(captured_graph.spec.handed_inputs),
                gradient_layouts=[
                    GradientLayout(
                        output=output,
                        dimensions=list(layout.dimensions),
                        inside=list(layout.inside),
                        step=layout.step,
                    )
                    for output, layout in sorted(captured_graph.spec.tangent_layouts.items())
                ],
                split=_split_record(captured_graph),
                ops=ops,
                backward=programs[0].backward,
                packed=programs[0].packed,
                completed=programs[0].completed,
                kept=programs[0].kept,
                other_programs=programs[1:],
                executions=[numbers[execution] for execution in decided] or [0],
            )
        )
    return records


def _split_record(graph: CapturedGraph) -> SplitRecord | None:
    split = graph.spec.split
    if split is None:
        return None
    runs = [SplitRun(module=module, rows=rows) for module, rows in graph.split_runs]
    return SplitRecord(form=split.form, pieces=split.pieces, what=split.what, runs=runs)


def _kept(problem: Problem, solution: Solution) -> dict[tuple[int, int], list[int]]:
    """For each execution of each captured graph the forward operations whose results live on into the
    backward."""
    graph = problem.graph
    lives = lifetimes(graph, solution.schedule)
    first = np.append(True, lives.value[1:] != lives.value[:-1])
    outlive = first & (lives.start < graph.forward_length) & (lives.end >= graph.forward_length)
    kept: dict[tuple[int, int], set[int]] = {}
    for value in lives.value[outlive].tolist():
        source = problem.sources[int(graph.producer[value])]
        if source.graph >= 0:
            kept.setdefault((source.graph, source.instance), set()).add(source.op)
    return {execution: sorted(ops) for execution, ops in kept.items()}


def _forward_only(captured: CapturedStep) -> list[str]:
    """Structures of graphs at whose outputs no gradient arrives."""
    found = {g.structure for g in captured.graphs if g.joint is None and g.occurrences}
    return sorted(found - {g.structure for g in captured.graphs if g.passes_gradients})


def _views(captured: CapturedStep) -> list[ViewsRecord]:
    """The graphs at whose outputs gradients arrive that go on to their inputs as they are, and that have
    others, or have the structure of graphs with a schedule."""
    scheduled = {graph.structure for graph in captured.graphs if graph.joint is not None}
    return [
        ViewsRecord(
            structure=graph.structure,
            occurrence=graph.occurrence,
            occurrences=graph.occurrences,
            unused_outputs=list(graph.spec.unused_outputs),
        )
        for graph in captured.graphs
        if graph.joint is None and graph.passes_gradients and graph.occurrences
        if graph.spec.unused_outputs or graph.structure in scheduled
    ]


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


def _workspace_source(prepared: Prepared) -> str:
    """Where the scratch bytes of operations come from."""
    if prepared.meter is not None:
        return "measured"
    return "formulas" if prepared.device.kind == "cuda" and prepared.device.cudnn else "none"
