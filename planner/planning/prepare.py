"""Putting a plan together: what was captured, what was solved, and what that promises."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from planner._torch.compat import graphs_are_off
from planner._torch.distributed import holds_dtensors, is_fully_sharded
from planner._torch.dynamo import NOT_A_GRAPH
from planner._torch.tracing.callbacks import compiled_modules
from planner._torch.tracing.hindrances import no_other_thread_traces
from planner.capture.capture import Most, capture, record_eagerly
from planner.capture.captured_step import CapturedStep, CudaKernels
from planner.capture.decided_by_data import (
    HOUSEHOLDER,
    PRODUCTS,
    PRODUCTS_INSIDE,
    SPARSE_TENSORS,
    has_householder,
    has_products,
    has_sparse,
)
from planner.capture.writes_through_views import slower_by_writes
from planner.costs.cuda_scratch import cuda_scratch
from planner.costs.devices import Device, find_device, round_bytes, same_processor
from planner.costs.eager_timeline import EagerTimeline, eager_timeline
from planner.costs.kernel_timer import MeasuredCosts
from planner.costs.optimizer_step import OF_ANOTHER_MODEL, is_of_another_model, optimizer_step
from planner.costs.roofline import Costs
from planner.costs.step_memory import StepMemoryModel
from planner.costs.workspace import WorkspaceMeter
from planner.errors import CaptureError, PlannerError, warn, warnings_collected
from planner.graph.overwritten import checked_inputs
from planner.heap import room_on_the_stack
from planner.interrupts import at_stages, held_interrupts
from planner.parallel.rank import Rank, gradients_there
from planner.parallel.strategies import FSDP2, read_parallel, refuse_for_tensor_parallel
from planner.planfile.budget import Budget, parse_budget
from planner.planfile.fingerprint import state_digest
from planner.planfile.plan import (
    Resident,
    WholeStep,
)
from planner.planning.backends import check_backend, check_offload
from planner.planning.cost_source import check_costs, find_costs
from planner.planning.options import PlanOptions
from planner.planning.runnable import refuse_what_cannot_run
from planner.planning.throughout import bytes_throughout
from planner.problem.allocations import planned_allocations
from planner.problem.build import Problem, build_problem
from planner.problem.encodings import Packing, find_packings
from planner.problem.offload import find_sendable
from planner.progress import Progress, no_report
from planner.replay.capture import ReplayedStep, capture_replayed
from planner.replay.masks import find_masks
from planner.replay.problem import build_replayed
from planner.training_step.inputs import InputError
from planner.training_step.regions import RegionError, find_regions
from planner.training_step.step import Step, tensors_in, unique_storages
from planner.training_step.wrappers import refuse_sharded, refuse_without_shape, refuse_wrappers
from solvers.model.arrays import Schedule
from solvers.model.schedule import simulate

if TYPE_CHECKING:
    from planner.problem.emitted_step import EmittedStepModel  # which imports Inductor

NEWEST = (9, 0)
"""Compute capability of devices that do not tell theirs."""

WRITTEN = (
    "the forward changes in place what a plan might read again in the backward ({}): re-runs read copies, as "
    "with inputs='overwritten', and the plan counts these"
)
IN_EVALUATION = (
    "the model is in evaluation mode, as from_pretrained() returns it, and is planned for training mode: "
    "call model.train() before training, or plan with training=False to train it as it is"
)


MOST_GRAPHS = 12
"""Of how many graphs a step may be that "auto" plans by graphs. The masks of Hugging Face's encoders and
decoders ask data, and make 6 to 10; graphs then take less extra time than replays, and more are slow to
plan."""

MOST_OPERATIONS = 2_000
"""Of how many operations a forward may be that "auto" plans by graphs: of 6,000, planning and a first step
take three minutes by graphs, and a quarter of one by replays."""

_SHOWN = 5
"""Compiled parts that are named."""


@dataclass(frozen=True)
class Prepared:
    """A step that is ready to be solved, for any number of budgets."""

    model: torch.nn.Module
    step: Step
    captured: CapturedStep
    problem: Problem
    footprint: StepMemoryModel
    meter: WorkspaceMeter | None
    costs: Costs
    seconds: float
    options: PlanOptions
    packings: tuple[Packing, ...]
    """The masks that can be kept as bits; with ``offload`` the results that can be kept on the host."""
    state_digest: str
    """Of the model as it was, see :func:`planner.planfile.fingerprint.state_digest`."""
    cuda: CudaKernels | None
    """What CUDA does where the CPU would do something else; None where the device is at hand."""
    regions: tuple[str, ...] = ()
    """Names of the submodules that are graphs of their own."""
    rank: Rank | None = None
    """What the step is one of several ranks'; None for a single process."""
    as_run_bytes: int | None = None
    """What the step allocates as the user runs it, with checkpoints that the plan goes in the place of;
    percentages are of these. None where there are none."""
    emitted_models: "dict[Any, EmittedStepModel]" = field(default_factory=dict, compare=False)
    """What says what schedules take under Inductor, by its options: each is lowered once for all budgets."""

    @property
    def resident(self) -> Resident:
        """Bytes that are there throughout."""
        return self.footprint.resident

    @property
    def device(self) -> Device:
        """Where the step will run."""
        return self.footprint.device

    @cached_property
    def baseline_whole_step(self) -> WholeStep:
        """The unplanned step with the optimizer's own."""
        eager = self.problem.eager
        return self.footprint.whole_step(eager.peak_bytes, eager.final_bytes, eager.allocations)

    @cached_property
    def reserving_whole_step(self) -> WholeStep:
        """The unplanned step with segments reserved for it beforehand."""
        eager = self.problem.eager
        return self.footprint.whole_step(eager.peak_bytes, eager.final_bytes, eager.allocations, arena=True)

    def whole_step(self, schedule: Schedule) -> WholeStep:
        """The step by a schedule, with the optimizer's own."""
        problem = self.problem
        peak = simulate(problem.graph, schedule).peak_bytes
        allocations = planned_allocations(problem.graph, schedule) if self.device.kind == "cuda" else None
        return self.footprint.whole_step(peak, problem.final_bytes, allocations, arena=True)

    def changed(self, change: Callable[[torch.nn.Module], object]) -> tuple[EagerTimeline, WholeStep]:
        """The unplanned step of a copy of the model that is changed before, as by checkpoints.

        Raises:
            CaptureError: It cannot be run so.
        """
        options = self.options
        recording = record_eagerly(
            self.model, self.step, change, cuda=self.cuda, accumulate=options.accumulate, rank=self.rank
        )
        line = eager_timeline(recording, self.device, self.meter, self.costs)
        return line, self.footprint.whole_step(line.peak_bytes, line.final_bytes, line.allocations)

    def budget(self, value: int | str) -> Budget:
        """Read a budget; percentages are of the unplanned step's allocated bytes, and bound allocated bytes.

        Raises:
            BudgetError: The budget cannot be read.
        """
        now = self.baseline_whole_step.allocated_bytes if self.as_run_bytes is None else self.as_run_bytes
        wanted = parse_budget(value, now)
        if wanted.bytes is None or not wanted.relative:
            return wanted
        return replace(wanted, bytes=self.footprint.around(wanted.bytes))


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
    if options.split != "none" or options.offload != "none":
        if off is not None:
            name = "split" if options.split != "none" else "offload"
            raise PlannerError(f"{name}={getattr(options, name)!r}: {off}. Plan with {name}='none'")
        options = replace(options, backend="eager")
        most = Most(MOST_GRAPHS) if options.regions is None else None
        return _prepare(model, step, options, progress=progress, like=like, most=most)
    if options.backend != "auto":
        if off is not None and options.backend != "replay":
            raise PlannerError(f"backend={options.backend!r}: {off}. Plan with backend='replay'")
        return _prepare(model, step, options, progress=progress, like=like)
    if off is not None:
        replayed = _prepare(model, step, replace(options, backend="replay"), progress=progress, like=like)
        replayed.captured.notes.append(f"followed by replaying operators, not by a graph: {off}")
        return replayed
    if not _can_replay(model, options):
        return _prepare(model, step, replace(options, backend="eager"), progress=progress, like=like)
    graphs, told, why = None, list[str](), ""
    try:
        with warnings_collected() as told:
            eager = replace(options, backend="eager")
            most = Most(MOST_GRAPHS, MOST_OPERATIONS)
            graphs = _prepare(model, step, eager, progress=progress, like=like, most=most)
    except CaptureError as error:
        why = f"{error}".removesuffix(f". {NOT_A_GRAPH}")
    if graphs is not None:
        captured = graphs.captured
        if captured.eager_operations or captured.untraced:
            why = "parts of the forward are no graphs"
        if not (why or told):
            return graphs
    with warnings_collected() as also:
        replayed = _prepare(model, step, replace(options, backend="replay"), progress=progress, like=like)
    of_graphs = [text for text in told if text not in also]
    if graphs is not None and not why and not of_graphs:
        return _said(graphs, told)  # what is warned of is the step's, whatever follows the plan
    replayed.captured.notes.append(f"followed by replaying operators, not by a graph: {why or of_graphs[0]}")
    return _said(replayed, also)


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


@held_interrupts()
@no_other_thread_traces()
@room_on_the_stack
def _prepare(
    model: torch.nn.Module,
    step: Step,
    options: PlanOptions,
    *,
    progress: Progress = no_report,
    like: Prepared | None = None,
    most: Most | None = None,
) -> Prepared:
    """What :func:`prepare` does for one backend; ``most``: more is an error."""
    progress = at_stages(progress)
    step = replace(step, in_flight=options.in_flight)
    refuse_without_shape(model, "plan")
    refuse_wrappers(model, "plan")
    if not isinstance(step.training, bool | None):
        raise InputError(f"training is {step.training!r}; expected True or False")
    notes = []
    if step.training and not model.training:
        notes.append(IN_EVALUATION)
    refuse_sharded(model, "plan")  # also inside
    for note in notes:
        warn(note)
    checked_inputs(options.inputs)
    rank, regions = _rank(model, options)
    here = device_of(model, step)
    target = find_device(options.device, here)
    at_hand = here.type in ("cpu", "cuda") and same_processor(target, find_device(None, here))
    check_costs(options.costs, here, target, at_hand=at_hand)
    started = time.perf_counter()
    check_offload(options, target)
    elsewhere = target.kind == "cuda" and here.type != "cuda"
    if options.attention is not None and not elsewhere:
        warn(
            f"attention={options.attention!r} is for plans for a GPU that is not here, and {here} does not "
            "use it: leave it out"
        )
    cuda = CudaKernels(target.capability or NEWEST, options.attention, target.cudnn) if elsewhere else None
    replaying = options.backend == "replay"
    if replaying and holds_dtensors(model):
        raise CaptureError(
            "parameters of the model are distributed by parallelize_module, and replays follow plain "
            "tensors: plan it with backend='graph'"
        )
    capturing = time.process_time()
    if replaying:
        captured: CapturedStep = capture_replayed(
            model,
            step,
            lambda text, fraction: progress(text, 0.8 * fraction),
            cuda=cuda,
            accumulate=options.accumulate,
            rank=rank,
        )
    else:
        captured = capture(
            model,
            step,
            lambda text, fraction: progress(text, 0.8 * fraction),
            cuda=cuda,
            accumulate=options.accumulate,
            regions=regions,
            rank=rank,
            decided=options.backend == "inductor",
            most=most,
        )
    capturing = time.process_time() - capturing
    captured.notes.extend(notes)
    joints = [g.joint for g in captured.graphs if g.joint is not None]
    if options.backend == "eager" and has_products(joints):
        captured.notes.append(PRODUCTS)
        warn(PRODUCTS)
    if isinstance(captured, ReplayedStep) and captured.otherwise_rounded:
        captured.notes.append(PRODUCTS_INSIDE)
        warn(PRODUCTS_INSIDE)
    if replaying and has_householder(captured.eager):
        captured.notes.append(HOUSEHOLDER)
        warn(HOUSEHOLDER)
    # Replays are recorded with the data of lists of indices, and what their kernels take is measured.
    if has_sparse(captured.eager, compressed=replaying):
        captured.notes.append(SPARSE_TENSORS)
        warn(SPARSE_TENSORS)
    if captured.overwritten and options.inputs == "unchanged":
        options = replace(options, inputs="overwritten")
        captured.notes.append(WRITTEN.format(", ".join(dict.fromkeys(captured.overwritten))))
    compiled = [*compiled_modules(model), *captured.uncompiled]
    if compiled and options.backend != "inductor":
        captured.notes.append(uncompiled(compiled))
        warn(uncompiled(compiled))
    progress("measuring what kernels allocate inside", 0.8)
    meter = WorkspaceMeter(here) if at_hand else None
    # No longer than the capture took: planning then takes about twice as long, at most.
    source = find_costs(options.costs, captured, target, meter, progress, most_seconds=capturing)
    workspaces = meter or cuda_scratch(target)
    copying = options.inputs == "overwritten"
    if isinstance(captured, ReplayedStep):
        replayed = build_replayed(captured, target, workspaces, source)
        problem: Problem = replayed
        packings = find_masks(captured, replayed, target, meter, source)
    else:
        problem = build_problem(
            captured, target, workspaces, source, copying=copying, in_flight=step.in_flight
        )
        as_traced = simulate(problem.graph, problem.graph.base_schedule).seconds
        slower = slower_by_writes(joints, as_traced, problem.eager.seconds)
        if slower is not None and options.backend == "eager":
            captured.notes.append(slower)
            warn(slower)
        packings = find_packings(captured, problem, target, meter, source)
        if options.offload != "none":
            packings = find_sendable(captured, problem, target, packings)
    if meter is not None:
        refuse_what_cannot_run(captured.eager.calls, meter)
    if like is not None:
        update = like.footprint.optimizer
    else:
        if is_of_another_model(options.optimizer, model):
            captured.notes.append(OF_ANOTHER_MODEL)
            warn(OF_ANOTHER_MODEL)
        shape_of = None if rank is None else rank.shape_of
        update = optimizer_step(options.optimizer, model, target, meter, source, shape_of)
        if options.optimizer is None and captured.state_in_hooks:
            held = unique_storages(captured.state_in_hooks)
            sizes = [round_bytes(target, int(t.untyped_storage().nbytes())) for t in held]
            update = replace(update, state_bytes=sum(sizes))
    if isinstance(source, MeasuredCosts):
        source.save()
    if meter is not None and meter.unmeasured:
        warn(unmeasured(meter))
    if here.type == "cuda":
        torch.cuda.empty_cache()  # blocks of other sizes than the step's, which it would split
    added_to = gradients_there(model, options.accumulate)
    there = bytes_throughout(captured, rank, model, added_to, step.in_flight)
    reduced = 0 if rank is None else rank.reduced_bytes(model, added_to)
    footprint = StepMemoryModel(
        target, there.resident(update, target), update, there.tensors(target), reduced
    )
    seconds = time.perf_counter() - started
    return Prepared(
        model,
        step,
        captured,
        problem,
        footprint,
        meter,
        source,
        seconds,
        options,
        packings,
        state_digest(model),
        cuda,
        tuple(regions),
        rank,
    )


def _rank(model: torch.nn.Module, options: PlanOptions) -> tuple[Rank | None, list[str]]:
    """Which rank a step is of, and its regions, which are what ``fully_shard`` shards."""
    parallel = read_parallel(options.parallel)
    if holds_dtensors(model) and not is_fully_sharded(model):
        refuse_for_tensor_parallel(parallel, options.backend)
    if isinstance(parallel, FSDP2) and options.regions is None:
        try:
            regions = find_regions(model, "auto")
        except RegionError:
            regions = []  # the whole is one unit
    else:
        regions = find_regions(model, options.regions)
    if isinstance(parallel, FSDP2):
        parallel.units(regions)  # says which are none
    return (None if parallel is None else Rank(parallel, tuple(regions))), regions


def uncompiled(parts: Sequence[str]) -> str:
    shown = ", ".join(parts[:_SHOWN]) + (f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else "")
    return (
        f"torch.compile is put around {shown}. By the plan these run operation by operation, as they were "
        "written: gradients are those of the step with them uncompiled, and so are its memory and its "
        "percentages. Plan the step as a whole with backend='inductor' to have it compiled"
    )


def unmeasured(meter: WorkspaceMeter) -> str:
    return (
        f"a torch.profiler session was open, in which the workspace of {len(meter.unmeasured)} operations "
        "could not be measured; it counts as 0, and the peak may be higher than predicted. Plan outside of it"
    )


def device_of(model: torch.nn.Module, step: Step) -> torch.device:
    inputs = tensors_in((step.args, dict(step.kwargs)))
    first = next(itertools.chain(model.parameters(), model.buffers(), inputs), None)
    return torch.device("cpu") if first is None else first.device


def strides_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """The strides of a tensor; None where it is contiguous, or has none."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    return list(tensor.stride())
