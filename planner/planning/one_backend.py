"""Capturing a step for one backend, by graphs or for replays, and building its problem."""

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from planner._torch.distributed import holds_dtensors, is_fully_sharded
from planner._torch.modules import compiled_modules
from planner._torch.tracing.hindrances import no_other_thread_traces
from planner.capture.capture import Most, capture
from planner.capture.captured_step import CapturedStep, CudaKernels
from planner.capture.decided_by_data import (
    FUNCTIONS,
    HOUSEHOLDER,
    OPAQUE,
    PRODUCTS,
    PRODUCTS_INSIDE,
    PSEUDOINVERSE,
    SPARSE_TENSORS,
    has_complex_pseudoinverse,
    has_householder,
    has_products,
    has_sparse,
    has_unknown_functions,
)
from planner.capture.writes_through_views import slower_by_writes
from planner.choices import is_recorded
from planner.costs.cuda_scratch import cuda_scratch
from planner.costs.devices import Device, find_device, round_bytes, same_processor
from planner.costs.kernel_timer import MeasuredCosts
from planner.costs.optimizer_step import OF_ANOTHER_MODEL, OptimizerStep, is_of_another_model, optimizer_step
from planner.costs.roofline import Costs
from planner.costs.step_memory import StepMemoryModel
from planner.costs.workspace import WorkspaceMeter
from planner.errors import CaptureError, warn
from planner.graph.joint_graph import JointGraph
from planner.graph.overwritten import checked_inputs
from planner.heap import room_on_the_stack
from planner.interrupts import at_stages, held_interrupts
from planner.module_parts import parameters_of
from planner.parallel.rank import Rank, gradients_there
from planner.parallel.strategies import FSDP2, read_parallel, refuse_for_tensor_parallel
from planner.planfile.fingerprint import state_digest
from planner.planfile.schema import BY_OPERATORS
from planner.planning.backends import check_compiler, check_offload, check_unproven
from planner.planning.cost_source import check_costs, find_costs
from planner.planning.options import PlanOptions
from planner.planning.prepared import Prepared, bytes_throughout, recorded_bytes
from planner.problem.build import Problem, build_problem
from planner.problem.encodings import Packing
from planner.problem.offload import find_kept_otherwise, name_handed_on
from planner.progress import Progress, no_report, part_of
from planner.replay.capture import ReplayedStep, capture_replayed
from planner.replay.masks import find_masks
from planner.replay.problem import build_replayed
from planner.training_step.call import Call
from planner.training_step.inputs import InputError, refuse_sharded, refuse_without_shape, refuse_wrappers
from planner.training_step.regions import RegionError, find_regions
from planner.training_step.step import Step, tensors_in, unique_storages
from solvers.model.schedule import simulate

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
CASTS_INSIDE = (
    "autocast is on around an operator that it has no rule for: what its kernel calls is cast in eager, and "
    "not in a graph. Plan with backend='replay', or call it within torch.autocast(..., enabled=False)"
)

OF_AMD = (
    "what kernels of AMD's libraries (MIOpen, hipBLASLt, AOTriton) allocate inside, and how their results "
    "lie, is not known for {} and does not count: the step may take more than planned. Leave room in the "
    "budget, or plan on that device"
)

_SHOWN = 5
"""Compiled parts that are named."""


@held_interrupts()
@no_other_thread_traces()
@room_on_the_stack
def prepare_for_backend(
    model: torch.nn.Module,
    step: Step,
    options: PlanOptions,
    *,
    progress: Progress = no_report,
    like: Prepared | None = None,
    most: Most | None = None,
) -> Prepared:
    """Capture a step, and build its problem, for the backend that ``options`` name.

    Args:
        model, step, options, progress, like: As for :func:`planner.planning.prepare.prepare`.
        most: More than that is an error; None for no bound.
    """
    progress = at_stages(progress)
    step = replace(step, in_flight=options.in_flight)
    notes = _checked(model, step, options)
    rank, regions = _rank(model, options)
    where = _where(model, step, options)
    started, capturing = time.perf_counter(), time.process_time()
    captured = _captured(model, step, options, where, rank, regions, most, progress)
    capturing = time.process_time() - capturing
    if options.offload != "none":
        name_handed_on(captured)
    captured.notes.extend(notes)
    for note in _findings(captured, model, options):
        _note_and_warn(captured, note)
    if captured.overwritten and options.inputs == "unchanged":
        options = replace(options, inputs="overwritten")
        captured.notes.append(WRITTEN.format(", ".join(dict.fromkeys(captured.overwritten))))
    progress("measuring what kernels allocate inside", 0.8)
    meter = WorkspaceMeter(where.here) if where.at_hand else None
    # No longer than the capture took: planning then takes about twice as long, at most.
    source = find_costs(options.costs, captured, where.target, meter, progress, most_seconds=capturing)
    problem, packings = _problem(captured, step, options, where, meter, source)
    if meter is not None:
        _refuse_what_cannot_run(captured.eager.calls, meter)
    parameters = parameters_of(model)
    if like is None:
        update = _optimizer_step(captured, parameters, options, where, meter, source, rank)
    else:
        update = like.footprint.optimizer
    if isinstance(source, MeasuredCosts):
        source.save()
    if meter is not None and meter.unmeasured:
        warn(unmeasured(meter))
    if where.here.type == "cuda":
        torch.cuda.empty_cache()  # blocks of other sizes than the step's, which it would split
    footprint = _footprint(captured, problem, parameters, step, options, where, update, rank)
    return Prepared(
        model,
        step,
        captured,
        problem,
        footprint,
        meter,
        source,
        time.perf_counter() - started,
        options,
        packings,
        state_digest(model),
        where.cuda,
        tuple(regions),
        rank,
    )


def _checked(model: torch.nn.Module, step: Step, options: PlanOptions) -> list[str]:
    """See that a module can be planned for a step; what is to be noted of it."""
    refuse_without_shape(model, "plan")
    refuse_wrappers(model, "plan")
    if not isinstance(step.training, bool | None):
        raise InputError(f"training is {step.training!r}; expected True or False")
    refuse_sharded(model, "plan")  # also inside
    checked_inputs(options.inputs)
    if options.backend == "replay" and holds_dtensors(model):
        raise CaptureError(
            "parameters of the model are distributed by parallelize_module, and replays follow plain "
            "tensors: plan it with backend='graph'"
        )
    if not step.training or model.training:
        return []
    warn(IN_EVALUATION)
    return [IN_EVALUATION]


@dataclass(frozen=True)
class _Where:
    """The device of the module, and the one that is planned for.

    Attributes:
        here, target: These two.
        at_hand: Whether operations can be run here as the target runs them.
        cuda: What CUDA does where the CPU would do something else; None where the target is no GPU, or is
            at hand.
    """

    here: torch.device
    target: Device
    at_hand: bool
    cuda: CudaKernels | None


def _where(model: torch.nn.Module, step: Step, options: PlanOptions) -> _Where:
    here = device_of(model, step)
    target = find_device(options.device, here)
    at_hand = here.type in ("cpu", "cuda") and same_processor(target, find_device(None, here))
    check_costs(options.costs, here, target, at_hand=at_hand)
    check_offload(options, target)
    check_unproven(options, target)
    if target.kind == here.type:
        check_compiler(options, target)
    if target.kind == "cuda" and here.type != "cuda":
        kernels = CudaKernels(target.capability or NEWEST, options.attention, target.cudnn)
        return _Where(here, target, at_hand, kernels)
    if options.attention is not None:
        warn(
            f"attention={options.attention!r} is for plans for a GPU that is not here, and {here} does not "
            "use it: leave it out"
        )
    return _Where(here, target, at_hand, None)


def _captured(
    model: torch.nn.Module,
    step: Step,
    options: PlanOptions,
    where: _Where,
    rank: Rank | None,
    regions: Sequence[str],
    most: Most | None,
    progress: Progress,
) -> CapturedStep:
    report = part_of(progress, 0.0, 0.8)
    if options.backend == "replay":
        return capture_replayed(
            model, step, report, cuda=where.cuda, accumulate=options.accumulate, rank=rank
        )
    return capture(
        model,
        step,
        report,
        cuda=where.cuda,
        accumulate=options.accumulate,
        regions=regions,
        rank=rank,
        compiling=options.backend == "inductor",
        most=most,
    )


def _joints(captured: CapturedStep) -> list[JointGraph]:
    return [graph.joint for graph in captured.graphs if graph.joint is not None]


def _note_and_warn(captured: CapturedStep, text: str) -> None:
    captured.notes.append(text)
    warn(text)


def _findings(captured: CapturedStep, model: torch.nn.Module, options: PlanOptions) -> Iterator[str]:
    """What users are told of a captured step."""
    replaying = options.backend == "replay"
    if options.backend in BY_OPERATORS and has_products(_joints(captured)):
        yield PRODUCTS
    if has_unknown_functions(_joints(captured)):
        yield FUNCTIONS
    if options.backend in BY_OPERATORS and not replaying and captured.eager.casting:
        yield CASTS_INSIDE
    if isinstance(captured, ReplayedStep) and captured.otherwise_rounded:
        yield PRODUCTS_INSIDE
    if replaying and has_householder(captured.eager):
        yield HOUSEHOLDER
    if replaying and has_complex_pseudoinverse(captured.eager):
        yield PSEUDOINVERSE
    # Replays are recorded with the data of lists of indices, and what their kernels take is measured.
    if has_sparse(captured.eager, compressed=replaying):
        yield SPARSE_TENSORS
    if captured.eager.opaque is not None:
        yield OPAQUE.format(captured.eager.opaque.__name__)
    compiled = [*compiled_modules(model), *captured.uncompiled]
    if compiled and options.backend != "inductor":
        yield uncompiled(compiled)


def _problem(
    captured: CapturedStep,
    step: Step,
    options: PlanOptions,
    where: _Where,
    meter: WorkspaceMeter | None,
    source: Costs,
) -> tuple[Problem, tuple[Packing, ...]]:
    """The problem of a captured step, and what of it can be packed."""
    target = where.target
    workspaces = meter or cuda_scratch(target)
    if workspaces is None and target.kind == "cuda":
        _note_and_warn(captured, OF_AMD.format(target.name))
    if isinstance(captured, ReplayedStep):
        replayed = build_replayed(captured, target, workspaces, source)
        return replayed, find_masks(captured, replayed, target, meter, source)
    copying = options.inputs == "overwritten"
    problem = build_problem(captured, target, workspaces, source, copying=copying, in_flight=step.in_flight)
    as_traced = simulate(problem.graph, problem.graph.base_schedule).seconds
    slower = slower_by_writes(_joints(captured), as_traced, problem.eager.seconds)
    if slower is not None and options.backend in BY_OPERATORS:
        _note_and_warn(captured, slower)
    sends = options.offload != "none"
    return problem, find_kept_otherwise(captured, problem, target, meter, source, sends=sends)


def _optimizer_step(
    captured: CapturedStep,
    parameters: Sequence[torch.Tensor],
    options: PlanOptions,
    where: _Where,
    meter: WorkspaceMeter | None,
    source: Costs,
    rank: Rank | None,
) -> OptimizerStep:
    """What the optimizer's step takes, and its state: of one that steps in hooks, what these refer to."""
    if is_of_another_model(options.optimizer, parameters):
        _note_and_warn(captured, OF_ANOTHER_MODEL)
    shape_of = None if rank is None else rank.shape_of
    update = optimizer_step(options.optimizer, parameters, where.target, meter, source, shape_of)
    if options.optimizer is None and captured.state_in_hooks:
        held = unique_storages(captured.state_in_hooks)
        sizes = [round_bytes(where.target, int(t.untyped_storage().nbytes())) for t in held]
        update = replace(update, state_bytes=sum(sizes))
    return update


def _footprint(
    captured: CapturedStep,
    problem: Problem,
    parameters: Sequence[torch.Tensor],
    step: Step,
    options: PlanOptions,
    where: _Where,
    update: OptimizerStep,
    rank: Rank | None,
) -> StepMemoryModel:
    """The bytes around forward and backward."""
    added_to = gradients_there(parameters, options.accumulate)
    there = bytes_throughout(captured, rank, parameters, added_to, step.in_flight)
    reduced = 0 if rank is None else rank.reduced_bytes(parameters, added_to)
    target = where.target
    resident, recorded = there.resident(update, target), None
    if is_recorded(options.backend, options.backend_options):
        recorded = recorded_bytes(captured, problem, resident, target, dropped=step.outputs == "dropped")
    return StepMemoryModel(target, resident, update, there.tensors(target), reduced, recorded)


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


_DATA_DO_NOT_MATTER = re.compile(r"dtype|scalar type|not implemented for '", re.IGNORECASE)


def _refuse_what_cannot_run(calls: Iterable[Call], meter: WorkspaceMeter) -> None:
    """See that an unplanned step would not fail on this device.

    Shapes are checked where there are no data, dtypes mostly in the kernels. The meter has run each
    operation on inputs of the same dtypes, with data that were made up; what it says about dtypes holds.

    Args:
        calls: The operations of the unplanned step, which the meter has measured.
        meter: It knows what failed.

    Raises:
        CaptureError: An operation does not run on such inputs.
    """
    for call, reason in meter.failed(calls):
        # What a backward is given the meter makes up too, and autograd casts on the way: only forwards tell.
        if _DATA_DO_NOT_MATTER.search(reason) and "backward" not in str(call.func):
            text = " ".join(reason.split())
            raise CaptureError(
                f"the step does not run without a plan either: {call.func} fails with {text}. Give the model "
                "inputs of the dtype that it takes"
            )
