"""Does the planned module do what the unplanned one does, in the memory that was promised?"""

import contextlib
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from planner._torch import modules
from planner._torch.autocast_state import notes_on_region_stay
from planner._torch.tensors import is_view
from planner._torch.tracing.callbacks import parts_run_uncompiled
from planner.blocks.running import blocks_run_as_written
from planner.choices import CUDA_GRAPHS, Outputs
from planner.errors import PlanMismatch
from planner.interrupts import at_stages, held_interrupts
from planner.planfile.plan import PlanRecord
from planner.planning.options import check_options
from planner.progress import Progress
from planner.runtime.install import check_fits, installed_plan, put_in
from planner.runtime.plan_call import PlanCall
from planner.training_step.arrivals.suspended import only_hooks_that_are_put_back
from planner.training_step.inputs import InputError, Inputs, read_step, refuse_without_shape
from planner.training_step.step import Loss, Step, checked_outputs, map_tensors, tensors_in
from planner.verification.compared_steps import ComparedSteps
from planner.verification.measure import MemoryMeasurement
from planner.verification.outcomes import Outcome, Spread, difference
from planner.verification.recheck import recheck
from planner.verification.yardstick import Yardstick


@dataclass(frozen=True)
class Report:
    """The findings of :func:`verify`.

    Attributes:
        loss_equal, gradients_equal, buffers_equal, rng_equal: Whether the planned step left the same as the
            unplanned one. Weights with hooks count among the gradients: a hook may step an optimizer.
        exact: Whether equality was bit for bit; zeros of either sign are equal. Where PyTorch itself is not
            deterministic, on CUDA, differences are compared with those between unplanned steps; a tensor that
            differs more must be equal bit for bit under deterministic kernels. A plan that Inductor runs, or
            that computes a loss in pieces, rounds otherwise than eager: there the distance from the step in
            double precision is compared. It may be 2 times that of an unplanned step, in pieces 1.5 times.
        measured_dynamic_peak_bytes, predicted_dynamic_peak_bytes: The dynamic peak of the planned step.
        baseline_measured_dynamic_peak_bytes, baseline_predicted_dynamic_peak_bytes: The dynamic peak of the
            unplanned step.
        unsplit_bytes, baseline_unsplit_bytes: How much more ``torch.cuda.max_memory_allocated`` counts in
            these steps, see :class:`~planner.verification.measure.MemoryMeasurement`. 0 on the CPU.
        measured_peak_bytes: The measured peak of the planned step, resident bytes included.
        budget_bytes: The budget of the plan; None for "min".
        seconds, baseline_seconds: Seconds of a planned and an unplanned step, the median of steps that take
            turns; process time on the CPU.
        overheads: The relative extra time of the planned step in each timed pair. The further they are apart,
            the less sure `overhead` is.
        problems: A line for each broken promise; empty if there is none.
    """

    loss_equal: bool
    gradients_equal: bool
    buffers_equal: bool
    rng_equal: bool
    exact: bool
    measured_dynamic_peak_bytes: int
    predicted_dynamic_peak_bytes: int
    baseline_measured_dynamic_peak_bytes: int
    baseline_predicted_dynamic_peak_bytes: int
    measured_peak_bytes: int
    budget_bytes: int | None
    seconds: float
    baseline_seconds: float
    problems: list[str] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    unsplit_bytes: int = 0
    baseline_unsplit_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Everything is equal, and the measured peak is within the budget, or as predicted for "min"."""
        return not self.problems

    @property
    def overhead(self) -> float:
        """The relative extra time of a planned step, by the medians."""
        return self.seconds / self.baseline_seconds - 1.0 if self.baseline_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {**asdict(self), "ok": self.ok, "overhead": self.overhead}


@held_interrupts()
def verify(
    model: torch.nn.Module,
    args: Inputs = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: PlanRecord | None = None,
    loss: Loss | None = None,
    outputs: Outputs | None = None,
    repeats: int = 3,
    progress: Progress | None = None,
) -> Report:
    """Run the unplanned and the planned step from the same state; compare losses, gradients and buffers, the
    states of random generators, and peaks.

    Args:
        model: The module, planned or not. It is left as it was: parameters, gradients, buffers, attributes,
            random generators, and whether a plan is installed. So are the objects that the inputs, the loss
            and hooks on weights refer to. A hook after accumulation does not run if it refers to an object
            that cannot be put back.
        args, kwargs: Inputs of the step, in any form that :func:`planner.plan` takes.
        plan: The plan to verify; None for the one that is installed.
        loss: As for :func:`planner.plan`.
        outputs: Whether the measured steps hold the module's outputs while backward runs, as for
            :func:`planner.plan`; None: as planned.
        repeats: Timed steps of each kind; 0 measures no time.
        progress: Called with a text and a fraction from 0 to 1.

    Raises:
        InputError: If model, inputs, loss or plan cannot be read.
        PlanMismatch: If there is no plan, or it is for another model.
    """
    report = at_stages(progress)
    step = _apart_from_views(read_step(model, args, kwargs, loss, of="verify"))
    check_options(repeats=repeats, progress=progress)
    plan = _checked_plan(plan, model)
    step = replace(step, outputs=checked_outputs(plan.model.outputs if outputs is None else outputs))
    tensors = [*model.parameters(), *model.buffers(), *tensors_in((step.args, dict(step.kwargs)))]
    device = tensors[0].device if tensors else torch.device("cpu")
    unplanned_count = _unplanned_count(device)
    installed = modules.installed_call(model)
    folder = installed.offload_folder if isinstance(installed, PlanCall) else None
    steps = ComparedSteps(
        model,
        step,
        _parameters_with_gradients(plan, model),
        outcomes=unplanned_count + 2,  # and two planned ones
        repeats=repeats,
        report=report,
    )
    with contextlib.ExitStack() as contexts:
        contexts.callback(steps.put_back)
        contexts.enter_context(notes_on_region_stay())
        contexts.enter_context(only_hooks_that_are_put_back(model, none=not plan.is_exact))
        check_fits(plan, model)
        # An arena would be one block of memory; without it the measured peak is that of tensors.
        planned = put_in(plan, model, arena=False, offload_folder=folder)
        planned.retire()  # unplanned steps take its place on purpose: no warning that it was displaced
        contexts.enter_context(blocks_run_as_written())
        if plan.target.backend != "inductor":  # such a plan runs functions that the user compiled as written
            contexts.enter_context(parts_run_uncompiled())
        steps.begin(planned)
        compared = _compare(model, step, plan, steps, unplanned_count, spread_allowed=device.type != "cpu")
        peaks = steps.peaks(device)
        times = steps.times(device)
    return _report(plan, device, compared, peaks, times)


def _apart_from_views(step: Step) -> Step:
    """The step with tensors of their own in the place of views among its inputs, over the same memory.

    An operation with a weight that writes to an input gives it a history, which PyTorch takes from no view.
    """
    given = (step.args, dict(step.kwargs))
    made = {id(t): t.detach() for t in tensors_in(given) if is_view(t) and not t.requires_grad}
    if not made:
        return step
    args, kwargs = map_tensors(lambda tensor: made.get(id(tensor), tensor), given)
    return replace(step, args=args, kwargs=kwargs)


def _checked_plan(plan: PlanRecord | None, model: torch.nn.Module) -> PlanRecord:
    """The plan that is given, or else the one that is installed.

    Raises:
        InputError: It is no plan.
        PlanMismatch: There is none, it is for the other mode (train, eval), or a parameter has no shape yet.
    """
    if plan is not None and not isinstance(plan, PlanRecord):
        raise InputError(f"plan= is a {type(plan).__name__}: pass the plan, from a file as Plan.load(path)")
    refuse_without_shape(model, "verify")
    plan = plan or installed_plan(model)
    if plan is None:
        raise PlanMismatch("verify needs a plan: pass plan=, or apply one to the model")
    if model.training != plan.model.training:
        modes = {True: "train", False: "eval"}
        mode = modes[plan.model.training]
        raise PlanMismatch(
            f"the plan is for {mode} mode, the model is in {modes[model.training]} mode: call model.{mode}() "
            f"first, or plan with training={model.training}"
        )
    return plan


class _Compared(NamedTuple):
    """The outcomes of an unplanned and a planned step, and what says whether they count as the same.

    That is `spread`, how far unplanned steps are apart; for a plan that rounds otherwise than eager it is
    `yardstick`, the step in double precision, which else is None.
    """

    unplanned: Outcome
    planned: Outcome
    spread: Spread
    yardstick: Yardstick | None


def _compare(
    model: torch.nn.Module,
    step: Step,
    plan: PlanRecord,
    steps: ComparedSteps,
    unplanned_count: int,
    *,
    spread_allowed: bool,
) -> _Compared:
    """Run so many unplanned steps, the one in double precision if the plan needs it, and two planned ones."""
    reference = steps.reference()
    spread = Spread(reference, allowed=spread_allowed)
    for _ in range(unplanned_count - 1):
        spread.add(steps.outcome(planned=False))
    yardstick = None
    if not plan.is_exact:
        steps.tell("running the step in double precision")
        modules.install_call(model, None)  # the yardstick runs copies of the module without a plan
        options = None
        if plan.target.backend == "inductor":
            given = plan.target.backend_options.items()
            options = {name: value for name, value in given if name != CUDA_GRAPHS}  # it runs once
        yardstick = Yardstick(model, step, options, steps.restore, reference)
    steps.outcome(planned=True)  # the first planned step captures, and is not compared
    planned = steps.outcome(planned=True)
    if yardstick is None and spread.allowed:
        recheck(spread, planned, partial(steps.outcome, planned=False), partial(steps.outcome, planned=True))
    return _Compared(reference, planned, spread, yardstick)


def _parameters_with_gradients(plan: PlanRecord, model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that have gradients when a step begins: the plan counts them, the step adds to them.

    They are those that have some now, or else all that are trained. Where the plan is not exact there are
    none: its steps are compared with one in double precision, which begins without gradients.
    """
    if not plan.resident.gradient_bytes or not plan.is_exact:
        return []
    trained = [p for p in model.parameters() if p.requires_grad]
    return [p for p in trained if p.grad is not None] or trained


_AS_PREDICTED = 0.01
"""The share of its prediction by which a peak may be over it where no budget bounds it. The zoo's table
(benchmarks/zoo.py) counts the plans that are within the same share."""
NOT_TWICE = (
    "; so does that of a second step without the plan: the module depends on a state that cannot be put "
    "back, and its steps cannot be compared"
)


def _report(
    plan: PlanRecord,
    device: torch.device,
    compared: _Compared,
    peaks: tuple[MemoryMeasurement, MemoryMeasurement],
    times: tuple[list[float], list[float]],
) -> Report:
    """The findings; of `peaks` and `times` the first is of unplanned steps, the second of planned ones."""
    reference, planned, spread, yardstick = compared
    baseline_peak, peak = peaks
    problems: list[str] = []
    exact = yardstick is None
    if yardstick is not None and yardstick.problem is not None:
        problems.append(yardstick.problem)

    equal = {"loss": True, "gradient of": True, "parameter": True, "buffer": True}
    for name, value in reference.tensors.items():
        exact = exact and spread.exact(name)
        kind, called = name
        planned_value = planned.tensors.get(name)
        if not (spread.agrees(name, planned) if yardstick is None else yardstick.holds(name, planned_value)):
            equal[kind] = False
            not_twice = NOT_TWICE if spread.incomparable(name) else ""
            problems.append(f"{kind} {called} differs: {difference(value, planned_value)}{not_twice}")
    rng_equal = reference.rng.same_as(planned.rng)
    if not rng_equal:
        problems.append("the random generators are in another state after the planned step")
    measured_total = plan.resident.total + peak.peak_bytes
    budget, whole = plan.target.budget_bytes, plan.whole_step
    if plan.target.parallel is not None:
        budget = None  # the budget is for one rank, and this process holds the whole model
    beside_tensors = 0  # bytes of libraries, fragmentation and context, which are not there on the CPU
    if whole is not None and device.type == "cuda":
        beside_tensors = whole.total_bytes - whole.allocated_bytes
    if budget is not None and measured_total + beside_tensors > budget:
        over = measured_total + beside_tensors - budget
        problems.append(f"the measured peak of {measured_total:,} bytes is {over:,} over the budget")
    predicted = plan.resident.total + plan.predicted.dynamic_peak_bytes
    bounded = plan.target.budget_bytes is not None or plan.target.parallel is not None
    if not bounded and measured_total > predicted * (1 + _AS_PREDICTED):
        over = measured_total - predicted
        problems.append(f"the measured peak of {measured_total:,} bytes is {over:,} over the prediction")
    return Report(
        loss_equal=equal["loss"],
        gradients_equal=equal["gradient of"] and equal["parameter"],
        buffers_equal=equal["buffer"],
        rng_equal=rng_equal,
        exact=exact,
        measured_dynamic_peak_bytes=peak.peak_bytes,
        predicted_dynamic_peak_bytes=plan.predicted.dynamic_peak_bytes,
        baseline_measured_dynamic_peak_bytes=baseline_peak.peak_bytes,
        baseline_predicted_dynamic_peak_bytes=plan.baseline.dynamic_peak_bytes,
        measured_peak_bytes=measured_total,
        budget_bytes=plan.target.budget_bytes,
        seconds=statistics.median(times[1] or [0.0]),
        baseline_seconds=statistics.median(times[0] or [0.0]),
        problems=problems,
        overheads=[after / before - 1 for before, after in zip(*times, strict=True) if before],
        unsplit_bytes=peak.unsplit_bytes,
        baseline_unsplit_bytes=baseline_peak.unsplit_bytes,
    )


def _unplanned_count(device: torch.device) -> int:
    """How many unplanned steps show which tensors differ from run to run.

    On a GPU two are too few, as its sums in any order are often equal twice. Where five are, and the planned
    step is not, :func:`recheck` runs more.
    """
    return 2 if device.type == "cpu" else 5
