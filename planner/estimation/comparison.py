"""The public function compare: for one step, solvers beside the checkpoints of PyTorch and Hugging Face."""

import contextlib
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Unpack

import torch

from planner._torch import partitioner
from planner.blocks.running import blocks_run_as_written
from planner.errors import InfeasibleBudget, PlannerError
from planner.estimation.checkpointed import Change, enable_checkpointing, with_checkpoints
from planner.estimation.comparison_table import Comparison, Way
from planner.estimation.estimate import prepared_step
from planner.estimation.table import Checkpointed
from planner.planfile.budget import Budget, parse_budget
from planner.planfile.plan import PlanRecord
from planner.planning.options import StepKeywords, check_options, shows_options
from planner.planning.prepared import Prepared
from planner.planning.solve import find_solver, plan_prepared
from planner.progress import Progress, no_report
from planner.runtime.install import apply
from planner.training_step.copies import real_copy
from planner.training_step.inputs import Inputs, check_model
from planner.training_step.snapshot import StepSnapshot
from planner.verification.measure import measure_peak, time_steps

RATIOS = (0.75, 0.5, 0.25)
"""Ratios of activation_memory_budget that are measured."""


class ComparisonError(PlannerError, ValueError):
    """The ways that are asked for cannot be compared."""


@shows_options(StepKeywords)
def compare(
    model: torch.nn.Module,
    args: Inputs = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | str,
    solvers: Sequence[str] = ("auto",),
    blocks: Sequence[str] = (),
    measure: bool = False,
    time_limit: float = 60.0,
    progress: Progress | None = None,
    **options: Unpack[StepKeywords],
) -> Comparison:
    """The step unplanned, by each solver, and with the checkpoints that PyTorch and Hugging Face offer.

    Args:
        model, args, kwargs: As for :func:`planner.plan`.
        budget: As for :func:`planner.plan`.
        solvers: Names of solvers, each a row.
        blocks: Modules that ``torch.utils.checkpoint`` is put around; if none are named, each element of the
            outermost lists of modules (``nn.ModuleList``, ``nn.Sequential``).
        measure: Run each way on a copy of the model and measure its peak and time. Then there is also a row
            for ``torch.compile``'s ``activation_memory_budget``, without a prediction; its partition runs
            without generated kernels.
        time_limit: Wall seconds for each solver.
        progress: Called with a text and a fraction from 0 to 1.
        **options: See :class:`planner.planning.options.PlanOptions`.

    Raises:
        ComparisonError: If measuring is asked for on a device that is not here, or with ``accumulate``.
        BudgetError, SelectionError, CaptureError, InputError: As :func:`planner.plan` does.
    """
    check_model(model)
    check_options(time_limit=time_limit, progress=progress)
    solvers, blocks = ([names] if isinstance(names, str) else names for names in (solvers, blocks))
    for name in solvers:
        find_solver(name)
    parse_budget(budget, 2**60)
    if measure and any(options.get(name) for name in ("device", "accumulate", "parallel")):
        raise ComparisonError(
            "measure runs the step here, in one process, and from no gradients: leave out device, accumulate "
            "and parallel"
        )
    if measure:
        options = {**options, "accumulate": False}  # the copies that are measured have no gradients
    report = progress or no_report
    prepared = prepared_step("compare", model, args, kwargs, lambda t, f: report(t, 0.5 * f), options)
    ways = _Rows(prepared, prepared.budget(budget), measure)
    unplanned = prepared.problem.eager
    peak, total = prepared.resident.total + unplanned.peak_bytes, prepared.baseline_whole_step.total_bytes
    ways.add("unplanned", peak, total, unplanned.seconds, _as_it_is)
    for i, name in enumerate(solvers):
        report(f"solving ({name})", 0.5 + 0.3 * i / len(solvers))
        ways.solver(name, budget, time_limit)
    report("recording the step with checkpoints", 0.8)
    names = list(blocks) or block_names(model)
    if names:
        change, made = with_checkpoints(prepared, names)
        ways.checkpoints(f"torch.utils.checkpoint of {_shortened(made.modules)}", made, change)
    enabled = enable_checkpointing(prepared)
    if enabled is not None:
        ways.checkpoints("gradient_checkpointing_enable()", enabled[1], enabled[0])
    if measure:
        for ratio in RATIOS:
            report(f"measuring activation_memory_budget={ratio}", 0.9)
            ways.compiled(ratio)
    report("compared", 1.0)
    return Comparison(str(budget), ways.budget.bytes, ways.rows())


def block_names(model: torch.nn.Module) -> list[str]:
    """The elements of the outermost lists of two modules or more, by path; those with parameters."""
    found: list[str] = []
    lists: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{known}.") or not known for known in lists)
        is_list = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
        if is_list and len(list(module.children())) > 1 and not inside:
            lists.append(path)
            prefix = f"{path}." if path else ""
            found += [
                f"{prefix}{n}" for n, part in module.named_children() if any(True for _ in part.parameters())
            ]
    return found


def _as_it_is(_: torch.nn.Module) -> None:
    pass


def _shortened(names: Sequence[str]) -> str:
    lists = dict.fromkeys(name.rpartition(".")[0] for name in names)
    return ", ".join(f"{name}.*" if name else "*" for name in lists)


class _Rows:
    """The rows of a comparison while it is made."""

    def __init__(self, prepared: Prepared, budget: Budget, measure: bool) -> None:
        self.prepared, self.budget, self.measure = prepared, budget, measure
        self._ways: list[Way] = []

    def rows(self) -> list[Way]:
        """All rows, with measured times against the first."""
        first = self._ways[0].measured_seconds
        if not first:
            return self._ways
        return [
            way
            if way.measured_seconds is None
            else replace(way, measured_overhead=way.measured_seconds / first - 1)
            for way in self._ways
        ]

    def add(self, name: str, peak_bytes: int, total_bytes: int, seconds: float, change: Change) -> None:
        before = self.prepared.problem.eager.seconds
        way = Way(
            name, peak_bytes, seconds / before - 1 if before else 0.0, self._fits(peak_bytes, total_bytes)
        )
        self._ways.append(self._measured(way, change))

    def solver(self, name: str, budget: int | str, time_limit: float) -> None:
        options = replace(self.prepared.options, solver=name, time_limit=time_limit)
        try:
            plan = plan_prepared(replace(self.prepared, options=options), budget)
        except InfeasibleBudget as error:
            note = f"reaches {error.minimum_bytes:,} bytes at least"
            self._ways.append(Way(f"planner, {name}", fits=False, note=note))
            return
        peak, seconds = plan.predicted.peak_bytes, plan.predicted.seconds
        assert plan.whole_step is not None
        self.add(
            f"planner, {name}",
            peak,
            plan.whole_step.total_bytes,
            seconds,
            lambda copied: _apply(plan, copied),
        )

    def checkpoints(self, name: str, made: Checkpointed, change: Change) -> None:
        way = Way(name, made.peak_bytes, made.overhead, self._fits(made.peak_bytes, made.total_bytes))
        self._ways.append(self._measured(way, change))

    def compiled(self, ratio: float) -> None:
        way = Way(f"torch.compile, activation_memory_budget={ratio}")
        self._ways.append(
            self._measured(way, _as_it_is, lambda copied: partitioner.within_ratio(copied, ratio))
        )

    def _fits(self, peak_bytes: int, total_bytes: int) -> bool | None:
        if self.budget.bytes is None:
            return None
        if not self.budget.relative:
            return total_bytes <= self.budget.bytes
        # A percentage bounds allocated bytes, without the allocator's reserve.
        dynamic = peak_bytes - self.prepared.resident.total
        whole = self.prepared.footprint.whole_step(dynamic, self.prepared.problem.final_bytes)
        return whole.total_bytes <= self.budget.bytes

    def _measured(
        self,
        way: Way,
        change: Change,
        runs: Callable[[torch.nn.Module], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> Way:
        if not self.measure:
            return way
        try:
            peak, seconds = _measure(self.prepared, change, runs)
        except PlannerError:
            raise
        except Exception as error:  # checkpoints and torch.compile may fail where the step itself does not
            first_line = (str(error).splitlines() or [""])[0]
            return replace(way, note=f"{type(error).__name__}: {first_line[:120]}")
        return replace(way, measured_peak_bytes=self.prepared.resident.total + peak, measured_seconds=seconds)


def _apply(plan: PlanRecord, copied: torch.nn.Module) -> None:
    apply(plan, copied)


def _measure(
    prepared: Prepared, change: Change, runs: Callable[[torch.nn.Module], AbstractContextManager[Any]]
) -> tuple[int, float]:
    """The dynamic peak and the median seconds of the step on a copy of the model."""
    before = StepSnapshot.take(prepared.model, prepared.step, "copy")
    try:
        return _measure_copy(prepared, change, runs)
    finally:
        before.restore()


def _measure_copy(
    prepared: Prepared, change: Change, runs: Callable[[torch.nn.Module], AbstractContextManager[Any]]
) -> tuple[int, float]:
    copied = real_copy(prepared.model, prepared.step)
    change(copied.module)
    device = next((p.device for p in copied.module.parameters()), torch.device("cpu"))
    with runs(copied.module) as module, blocks_run_as_written():

        def step() -> object:
            copied.module.zero_grad(set_to_none=True)
            return copied.step.run(module)

        step()
        copied.module.zero_grad(set_to_none=True)
        gc.collect()
        peak = measure_peak(lambda: copied.step.run(module), device).peak_bytes
        (seconds,) = time_steps([step], 3, device=device)
    return peak, statistics.median(seconds)
