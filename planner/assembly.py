"""Putting a plan together: what was captured, what was solved, and what that promises."""

import logging
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch.utils import _pytree as pytree

import planner
from planner._torch_attention import Attention
from planner._torch_compiled import holds_dtensors
from planner.budget import Budget, parse_budget
from planner.capture import CapturedStep, CudaKernels, capture
from planner.costs import Costs, roofline
from planner.devices import Device, find_device, round_bytes, same_processor
from planner.errors import PlannerError, PlanWarning
from planner.fingerprint import class_name, state_digest
from planner.footprint import Footprint as StepFootprint
from planner.inputs import InputError
from planner.interrupts import at_stages, held_interrupts
from planner.optimizer import Optimizer, OptimizerStep, optimizer_step
from planner.origin import Origin
from planner.overwritten import InputsAre, checked_inputs
from planner.plan_file import (
    Footprint,
    GradientLayout,
    GraphRecord,
    Holder,
    ModelRecord,
    OpRecord,
    Plan,
    Resident,
    Rung,
    SolverRecord,
    Target,
    TensorRecord,
    Timeline,
    WholeStep,
)
from planner.problem import Problem, build_problem
from planner.ranks import refuse_wrappers
from planner.runnable import refuse_what_cannot_run
from planner.step import Step, tensors_in, unique_storages
from planner.timing import MeasuredCosts
from planner.unplanned import SHARDED
from planner.workspace import WorkspaceMeter
from solvers.schedule import alive_at, lifetimes, simulate
from solvers.solution import Solution

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
CostSource = Literal["roofline", "measured"]
NEWEST = (9, 0)
"""Compute capability of devices that do not tell theirs."""

IN_EVALUATION = (
    "the model is in evaluation mode, as from_pretrained() returns it, and is planned for training mode: "
    "call model.train() before training, or plan with training=False to train it as it is"
)


class CostsError(PlannerError, ValueError):
    """Costs cannot be had from where they are asked of."""


@dataclass(frozen=True)
class Prepared:
    """A step that is ready to be solved, for any number of budgets."""

    model: torch.nn.Module
    step: Step
    captured: CapturedStep
    problem: Problem
    footprint: StepFootprint
    meter: WorkspaceMeter | None
    costs: Costs
    seconds: float
    origin: Origin

    @property
    def resident(self) -> Resident:
        """Bytes that are there throughout."""
        return self.footprint.resident

    @property
    def device(self) -> Device:
        """Where the step will run."""
        return self.footprint.device

    @property
    def baseline_whole_step(self) -> WholeStep:
        """The unplanned step with the optimizer's own."""
        eager = self.problem.eager
        return self.footprint.whole_step(eager.peak_bytes, eager.final_bytes)

    def budget(self, value: int | str) -> Budget:
        """Read a budget; percentages are of the unplanned step's allocated bytes.

        Raises:
            BudgetError: The budget cannot be read.
        """
        wanted = parse_budget(value, self.baseline_whole_step.allocated_bytes)
        if wanted.bytes is None or not wanted.text.endswith("%"):
            return wanted
        return Budget(self.footprint.around(wanted.bytes), wanted.text)


@held_interrupts()
def prepare(
    model: torch.nn.Module,
    step: Step,
    *,
    optimizer: Optimizer | None,
    device: str | torch.device | Device | None,
    progress: Progress,
    attention: Attention | None = None,
    accumulate: bool | None = None,
    costs: CostSource = "roofline",
    inputs: InputsAre = "unchanged",
) -> Prepared:
    """Capture a step and turn it into a problem; see :func:`planner.plan` for what is raised."""
    progress = at_stages(progress)
    refuse_wrappers(model, "plan")
    if not isinstance(step.training, bool | None):
        raise InputError(f"training is {step.training!r}; expected True or False")
    notes = []
    if step.training and not model.training:
        notes.append(IN_EVALUATION)
    if holds_dtensors(model):
        notes.append(SHARDED)
    for note in notes:
        logger.warning(note)
        warnings.warn(note, PlanWarning, stacklevel=4)
    checked_inputs(inputs)
    here = _device_of(model, step)
    target = find_device(device, here)
    at_hand = here.type in ("cpu", "cuda") and same_processor(target, find_device(None, here))
    if costs not in get_args(CostSource):
        raise CostsError(f"costs={costs!r}: expected {' or '.join(map(repr, get_args(CostSource)))}")
    if costs == "measured" and not at_hand:
        raise CostsError(
            f"costs='measured' times operations where the model is, on {here.type}, not on {target.name}: "
            "plan with costs='roofline', or on that device"
        )
    started = time.perf_counter()
    elsewhere = target.kind == "cuda" and here.type != "cuda"
    captured = capture(
        model,
        step,
        lambda text, fraction: progress(text, 0.8 * fraction),
        cuda=CudaKernels(target.capability or NEWEST, attention, target.cudnn) if elsewhere else None,
        accumulate=accumulate,
    )
    captured.notes.extend(notes)
    progress("measuring what kernels allocate inside", 0.8)
    meter = WorkspaceMeter(here) if at_hand else None
    source: Costs = roofline(target)
    if costs == "measured" and meter is not None:
        source = MeasuredCosts(
            meter,
            roofline(target),
            progress=lambda n, name: progress(f"timing operation {n + 1}: {name}", 0.9),
        )
    problem = build_problem(captured, target, meter, source, copying=inputs == "overwritten")
    if meter is not None:
        refuse_what_cannot_run(captured.eager.calls, meter)
    update = optimizer_step(optimizer, model, target, meter, source)
    if isinstance(source, MeasuredCosts):
        source.save()
    if meter is not None and meter.unmeasured:
        warnings.warn(_unmeasured(meter), PlanWarning, stacklevel=3)
    footprint = StepFootprint(target, _resident(captured, update, target), update)
    origin = Origin(step.loss, step.outputs, optimizer, device, attention, accumulate, costs, inputs)
    seconds = time.perf_counter() - started
    return Prepared(model, step, captured, problem, footprint, meter, source, seconds, origin)


def make_plan(prepared: Prepared, solution: Solution, budget: Budget) -> Plan:
    """The plan that a solution is."""
    captured, problem, resident = prepared.captured, prepared.problem, prepared.resident
    model, meter = prepared.model, prepared.meter
    graph = problem.graph
    timeline = simulate(graph, solution.schedule)
    nothing = simulate(graph, graph.base_schedule)
    rung, reached = _rung(captured)
    forward_steps = graph.forward_length
    eager_forward = sum(not e.backward for e in captured.eager.events)

    def footprint(peak: int, seconds: float) -> Footprint:
        return Footprint(
            peak_bytes=resident.total + peak,
            dynamic_peak_bytes=peak,
            resident_bytes=resident.total,
            seconds=seconds,
        )

    notes = [*reached, *captured.notes]
    if meter is not None and meter.failures:
        notes.append(f"workspace of {len(meter.failures)} operations could not be measured and counts as 0")
    if meter is not None and meter.unmeasured:
        notes.append(_unmeasured(meter))
    if isinstance(prepared.costs, MeasuredCosts) and prepared.costs.failures:
        notes.append(
            f"{len(prepared.costs.failures)} operations could not be timed; their seconds are the roofline's"
        )
    return Plan(
        created_with={
            "planner": planner.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        rung=rung,
        model=ModelRecord(
            class_name=class_name(model),
            training=prepared.step.in_mode(model),
            inputs=input_records(prepared.step),
            outputs=prepared.step.outputs,
            parameter_count=sum(p.numel() for p in model.parameters()),
            state_digest=state_digest(model),
            autocast=captured.autocast,
            torch_version=torch.__version__,
        ),
        target=Target(
            budget_bytes=budget.bytes,
            budget_text=budget.text,
            device=prepared.device.name,
            inputs=prepared.origin.inputs,
            costs=prepared.costs.name,
            workspace="measured" if meter is not None else "none",
        ),
        solver=SolverRecord(
            name=solution.solver,
            status=str(solution.status),
            gap=solution.gap,
            bound_seconds=solution.bound_seconds,
            solve_seconds=solution.solve_seconds,
            capture_seconds=prepared.seconds,
        ),
        resident=resident,
        predicted=footprint(timeline.peak_bytes, timeline.seconds),
        baseline=footprint(problem.eager.peak_bytes, problem.eager.seconds),
        no_recompute=footprint(nothing.peak_bytes, nothing.seconds),
        whole_step=prepared.footprint.whole_step(timeline.peak_bytes, problem.final_bytes),
        baseline_whole_step=prepared.baseline_whole_step,
        graphs=_graph_records(captured, problem, solution),
        timeline=Timeline.downsample(timeline.step_bytes, forward_steps),
        baseline_timeline=Timeline.downsample(problem.eager.step_bytes, eager_forward),
        peak_holders=_holders(problem, solution, timeline.peak_step),
        notes=notes,
    ).made_with(prepared.origin)


def _unmeasured(meter: WorkspaceMeter) -> str:
    return (
        f"a torch.profiler session was open, in which the workspace of {len(meter.unmeasured)} operations "
        "could not be measured; it counts as 0, and the peak may be higher than predicted. Plan outside of it"
    )


def _rung(captured: CapturedStep) -> tuple[Rung, list[str]]:
    """How much of the forward the graphs cover, and what to know about that."""
    count = sum(g.joint is not None for g in captured.graphs)
    notes = []
    if captured.breaks:
        more = f"; and at {len(captured.breaks) - 1} other places" if len(captured.breaks) > 1 else ""
        notes.append(
            f"the forward is {count} graphs, planned as one step; one ends at {captured.breaks[0]}{more}"
        )
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


def _graph_records(captured: CapturedStep, problem: Problem, solution: Solution) -> list[GraphRecord]:
    sequences = problem.backward_sequences(captured, solution.schedule)
    cost: dict[tuple[int, int], float] = {}
    size: dict[tuple[int, int], int] = {}
    for row, source in enumerate(problem.sources):
        if source.graph >= 0:
            key = (source.graph, source.op)
            cost[key] = problem.graph.ops[row].seconds
            outputs = problem.graph.ops[row].outputs
            size[key] = sum(
                problem.graph.values[v].bytes for v in outputs if not problem.graph.values[v].on_demand
            )
    kept = _kept(problem, solution)
    records = []
    for index, (captured_graph, backward) in enumerate(zip(captured.graphs, sequences, strict=True)):
        joint = captured_graph.joint
        if joint is None:
            continue
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
                turn=captured_graph.turn,
                turns=captured_graph.turns,
                unused_outputs=list(captured_graph.unused_outputs),
                inputs_by_use=list(captured_graph.inputs_by_use),
                gradient_layouts=[
                    GradientLayout(output=output, dimensions=list(dimensions))
                    for output, dimensions in sorted(captured_graph.gradient_layouts.items())
                ],
                ops=ops,
                backward=backward,
                kept=kept.get(index, []),
            )
        )
    return records


def _kept(problem: Problem, solution: Solution) -> dict[int, list[int]]:
    """For each captured graph the forward operations whose results live on into the backward."""
    graph = problem.graph
    lives = lifetimes(graph, solution.schedule)
    first = np.append(True, lives.value[1:] != lives.value[:-1])
    outlive = first & (lives.start < graph.forward_length) & (lives.end >= graph.forward_length)
    kept: dict[int, set[int]] = {}
    for value in lives.value[outlive].tolist():
        source = problem.sources[int(graph.producer[value])]
        if source.graph >= 0:
            kept.setdefault(source.graph, set()).add(source.op)
    return {index: sorted(ops) for index, ops in kept.items()}


def _holders(problem: Problem, solution: Solution, step: int) -> list[Holder]:
    graph = problem.graph
    by_module: dict[str, int] = {}
    for value in alive_at(graph, solution.schedule, step).tolist():
        module = graph.ops[int(graph.producer[value])].module
        by_module[module] = by_module.get(module, 0) + graph.values[value].bytes
    return [Holder(module=m, bytes=b) for m, b in sorted(by_module.items(), key=lambda item: -item[1])]


def _resident(captured: CapturedStep, update: OptimizerStep, device: Device) -> Resident:
    def size(tensors: Sequence[torch.Tensor]) -> int:
        return sum(round_bytes(device, int(t.untyped_storage().nbytes())) for t in unique_storages(tensors))

    return Resident(
        parameter_bytes=size(captured.parameters),
        buffer_bytes=size(captured.buffers),
        input_bytes=size(captured.inputs),
        gradient_bytes=size(captured.gradients),
        optimizer_bytes=update.state_bytes,
    )


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


def _device_of(model: torch.nn.Module, step: Step) -> torch.device:
    for tensor in [*model.parameters(), *model.buffers(), *tensors_in((step.args, dict(step.kwargs)))]:
        return tensor.device
    return torch.device("cpu")


def strides_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """The strides of a tensor; None where it is contiguous, or has none."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    return list(tensor.stride())
