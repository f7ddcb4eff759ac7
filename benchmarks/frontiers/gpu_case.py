"""A model in a precision, run in many ways: how much memory each takes, how long, and whether it is right."""

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

import planner
from benchmarks.frontiers.gpu_models import CASES, Inputs
from benchmarks.frontiers.gpu_results import Row
from benchmarks.frontiers.gpu_ways import arithmetic, checkpointed, compiled
from benchmarks.frontiers.stand_in_recorder import stand_in
from planner.allocator.recorded import RecordedRun, SnapshotError, recorded_run, replay
from planner.allocator.settings import AllocatorSettings
from planner.choices import CUDA_GRAPHS, CostSource, is_recorded
from planner.planfile.schema import BackendName, WholeStep
from planner.planning.options import PlanKeywords
from planner.training_step.step import find_loss
from planner.verification.measure import measure_peak, measure_seconds
from planner.verification.verify import Report

AS_CHECKPOINT = "plan as checkpoint"
COMPILED_CHECKPOINT = "compile, checkpoint per block"
AS_COMPILED = "inductor as compiled checkpoint"
IN_A_ROW = 5
"""Steps on a GPU between two waits for it, as in a loop that does not look at the loss of each."""


@dataclass
class Bench:
    """The benchmark on one device.

    Attributes:
        deadline: When to start nothing more, in seconds of :func:`time.monotonic`.
        costs: Of operations, as for :func:`planner.plan`.
        memory, times: Which of them is measured.
        plans: A folder of plans, which are used, and made where they are missing; None for none.
        changed: Called after every row, with what is running then.
    """

    device: torch.device
    small: bool
    repeats: int
    deadline: float
    costs: CostSource = "measured"
    memory: bool = True
    times: bool = True
    plans: Path | None = None
    changed: Callable[["Bench", str], None] = lambda bench, running: None
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def run(self, name: str, precision: str, ways: Sequence[str]) -> None:
        """Some ways of one model in one precision."""
        ways = [way for way in ways if not self._has(name, precision, way)]
        if not ways:
            return
        if time.monotonic() > self.deadline:
            self._leave_out(name, precision, ways)
            return
        with arithmetic(precision):
            case = None
            try:
                torch.manual_seed(0)
                with self.device:
                    model, inputs = CASES[name].build(self.small)
                case = _CaseRun(self, name, precision, model.train(), inputs)
            except Exception as error:
                self.add(Row(name, precision, ways[0], problem=shortened(error)))
            for i, way in enumerate(ways if case is not None else ()):
                assert case is not None
                if time.monotonic() > self.deadline:
                    self._leave_out(name, precision, ways[i:])
                    break
                print(f"  {name} {precision} {way}", file=sys.stderr)
                self.changed(self, f"{name} {precision} {way}")
                try:
                    self.add(case.row(way))
                except Exception as error:
                    self.add(Row(name, precision, way, problem=shortened(error)))
                case.clear()
            del case
        self.changed(self, "")
        _empty(self.device)

    def add(self, row: Row) -> None:
        """Put a row among the results, in the place of one of the same name."""
        with self.lock:
            names = [(r.model, r.precision, r.way) for r in self.rows]
            name = (row.model, row.precision, row.way)
            if name not in names:
                self.rows.append(row)
            elif self.memory:
                self.rows[names.index(name)] = row
            else:
                self.rows[names.index(name)] = self.rows[names.index(name)].with_times(row)
            self.changed(self, "")

    def _has(self, name: str, precision: str, way: str) -> bool:
        """Whether all that is measured of a way is in its row: it was run before the others."""
        rows = [r for r in self.rows if (r.model, r.precision, r.way) == (name, precision, way)]
        return bool(rows) and (bool(rows[0].problem) or not self.times or rows[0].seconds is not None)

    def _leave_out(self, name: str, precision: str, ways: Sequence[str]) -> None:
        self.left_out += [f"{name} {precision} {way}" for way in ways]
        self.changed(self, "")


@dataclass
class _CaseRun:
    """One model in one precision."""

    bench: Bench
    name: str
    precision: str
    model: nn.Module
    inputs: Inputs
    unplanned: Row | None = None
    checkpoint_bytes: int | None = None
    compiled_bytes: int | None = None
    plan: planner.Plan | None = None

    def __post_init__(self) -> None:
        for row in self.bench.rows:
            if (row.model, row.precision, row.way) == (self.name, self.precision, "unplanned"):
                self.unplanned = row

    def row(self, way: str) -> Row:
        """Measures one way to run the step; an error that is raised is its problem."""
        if way == "unplanned":
            self.unplanned = self._measured(way, self._step(self.model))
            self.unplanned = self._with_an_arena(self.unplanned)
            return self.unplanned
        kind, _, budget = way.partition(" ")
        if way in (AS_CHECKPOINT, AS_COMPILED):
            return self._planned(way, None, "inductor" if way == AS_COMPILED else "eager")
        if kind in _PLANNED:
            return self._planned(way, budget, **_PLANNED[kind])
        if kind == "offload":
            return self._planned(way, budget, "eager", offload="disk" if self._on_cpu else "host")
        if way == "checkpoint per block":
            with checkpointed(self.model, CASES[self.name].blocks):
                row = self._measured(way, self._step(self.model))
            self.checkpoint_bytes = row.measured_bytes
            return row
        if way == COMPILED_CHECKPOINT:
            with checkpointed(self.model, CASES[self.name].blocks), compiled(self.model) as module:
                row = self._measured(way, self._step(module))
            self.compiled_bytes = row.measured_bytes
            return row
        with compiled(self.model, None if way == "compile" else 0.5) as module:
            return self._measured(way, self._step(module))

    @property
    def _on_cpu(self) -> bool:
        return self.bench.device.type == "cpu"

    def clear(self) -> None:
        """No gradients, no cached blocks, and no workspaces of cuBLAS, which can lie anywhere among them."""
        self.model.zero_grad(set_to_none=True)
        if self.bench.device.type == "cuda":
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
        _empty(self.bench.device)

    def _as_checkpoint(self, peak_bytes: int | None) -> str:
        """The budget that allows what the checkpoints around every block take."""
        if peak_bytes is None:
            raise RuntimeError("no checkpoints ran before")
        args, kwargs = self.inputs
        with self._autocast():
            plan = self.plan or planner.plan(self.model, args, kwargs, budget="100%", costs="roofline")
        return budget_of_peak(plan, peak_bytes)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.bench.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def _step(self, module: nn.Module, *, dropped: bool = False) -> Callable[[], Any]:
        args, kwargs = self.inputs

        def step() -> Any:
            with self._autocast():
                output = module(*args, **kwargs)
            loss = find_loss(output)
            assert loss is not None
            if dropped:
                del output
                loss.backward()
                return loss
            loss.backward()
            return output  # which users hold while backward runs

        return step

    def _file(self, way: str) -> Path | None:
        plans = self.bench.plans
        return None if plans is None else plan_file(plans, self.name, self.precision, way)

    def _planned(self, way: str, budget: str | None, backend: BackendName, **more: Any) -> Row:
        """A plan's row; without a budget the plan may take what the checkpoints do."""
        args, kwargs = self.inputs
        file = self._file(way)
        if not self.bench.memory and file is not None and not file.exists():
            return Row(self.name, self.precision, way)  # there is none: the row of its memory says why
        if file is not None and file.exists():
            plan = planner.Plan.load(file)
        else:
            budget = budget or self._as_checkpoint(
                self.compiled_bytes if way == AS_COMPILED else self.checkpoint_bytes
            )
            asked: PlanKeywords = {"costs": self.bench.costs, "backend": backend, "unproven": True, **more}
            asked["time_limit"] = 5 if self.bench.small else 20
            with self._autocast():
                plan = planner.plan(self.model, args, kwargs, budget=budget, **asked)
            if file is not None:
                plan.save(file)
        self.plan = plan
        if self.unplanned is not None and self.unplanned.predicted_bytes is None:
            self.unplanned = replace(
                self.unplanned,
                predicted_bytes=plan.baseline.dynamic_peak_bytes,
                predicted_reserved_bytes=_reserved(plan.baseline_whole_step),
            )
            self.bench.add(self.unplanned)
        whole = plan.whole_step
        assert whole is not None
        step = self._step(self.model, dropped=plan.model.outputs == "dropped")
        with stand_in() if _is_recorded(plan) and self._on_cpu else contextlib.nullcontext():
            return self._of_plan(way, plan, whole, step)

    def _of_plan(self, way: str, plan: planner.Plan, whole: WholeStep, step: Callable[[], Any]) -> Row:
        args, kwargs = self.inputs
        predicted = Row(self.name, self.precision, way, predicted_reserved_bytes=_reserved(whole))
        try:
            plan.apply(self.model)
            measured = self._measured(way, step)
            plan.apply(self.model, arena=False)
            measured = self._otherwise(measured)
        except planner.PlannerError as error:  # what is predicted, and not run yet
            return replace(predicted, problem=shortened(error))
        finally:
            planner.remove(self.model)
        recorded_too = _is_recorded(plan)
        row = replace(
            measured,
            # Recorded steps allocate nothing: it is their pool that is reserved.
            predicted_bytes=None if recorded_too else plan.predicted.dynamic_peak_bytes,
            predicted_reserved_bytes=_reserved(whole),
            budget_bytes=plan.target.budget_bytes,
            predicted_overhead=plan.predicted.seconds / plan.baseline.seconds - 1,
        )
        if recorded_too and measured.reserved_bytes is not None:
            row = replace(row, total_bytes=measured.reserved_bytes + whole.context_bytes)
        elif measured.measured_bytes is not None:
            around = whole.total_bytes - whole.forward_backward_bytes
            row = replace(row, total_bytes=plan.resident.total + measured.measured_bytes + around)
        if not self.bench.memory:
            return row
        self.bench.add(row)  # a comparison needs more memory than either step
        self.clear()
        try:
            with self._autocast():
                report = planner.verify(self.model, args, kwargs, plan=plan, repeats=0)
        except Exception as error:
            problems = [row.problem, f"not compared: {shortened(error)}"]
            return replace(row, problem="; ".join(filter(None, problems)))
        right = is_right(report) if plan.is_exact else report.ok
        found = "" if right else "; ".join(report.problems[:3])
        return replace(row, right=right, problem="; ".join(filter(None, [row.problem, found])))

    def _with_an_arena(self, row: Row) -> Row:
        """The unplanned row with what the step reserves where segments are reserved for it beforehand."""
        if row.problem or not self._reserves():
            return row
        args, kwargs = self.inputs
        with self._autocast():
            reserved = planner.reserve(self.model, args, kwargs, costs="roofline")
        try:
            return self._otherwise(row)
        finally:
            reserved.remove()

    def _reserves(self) -> bool:
        return self.bench.memory and self.bench.device.type == "cuda"

    def _otherwise(self, row: Row) -> Row:
        """The row with what two steps of the module as it is now reserve, from an empty cache on."""
        if row.problem or not self._reserves():
            return row
        device, step = self.bench.device, self._step(self.model)
        try:
            step()
            self.clear()
            torch.cuda.reset_peak_memory_stats(device)
            for _ in range(2):
                self.model.zero_grad(set_to_none=True)
                step()
        except Exception as error:
            return replace(row, problem=shortened(error))
        return replace(row, otherwise_reserved_bytes=torch.cuda.max_memory_reserved(device))

    def _measured(self, way: str, step: Callable[[], Any]) -> Row:
        device = self.bench.device

        def cleared() -> Any:
            self.model.zero_grad(set_to_none=True)
            return step()

        def twice() -> None:
            for _ in range(2):
                cleared()  # what it returns is not held through the next step

        row = Row(self.name, self.precision, way)
        try:
            cleared()
            cleared()
            if device.type == "cuda" and self.bench.memory:
                self.clear()
                torch.cuda.reset_peak_memory_stats(device)
                run = recorded(device, twice)
                row = replace(row, reserved_bytes=torch.cuda.max_memory_reserved(device))
                if run is not None:
                    row = replace(row, replayed_bytes=replay(run, AllocatorSettings()).reserved_bytes)
            if self.bench.memory:
                self.model.zero_grad(set_to_none=True)
                peak = measure_peak(step, device)
                row = replace(row, measured_bytes=peak.peak_bytes, unsplit_bytes=peak.unsplit_bytes)
            if self.bench.times:
                in_a_row = IN_A_ROW if device.type == "cuda" else 1

                def several() -> None:
                    for _ in range(in_a_row):
                        cleared()

                (seconds,) = measure_seconds([several], self.bench.repeats, device=device)
                row = replace(row, seconds=seconds / in_a_row)
        except Exception as error:
            return replace(row, problem=shortened(error))
        before = None if self.unplanned is None else self.unplanned.seconds
        if before is None or row.seconds is None:
            return row
        return replace(row, measured_overhead=row.seconds / before - 1)


_PLANNED: dict[str, dict[str, Any]] = {
    "plan": {"backend": "eager"},
    "inductor": {"backend": "inductor"},
    "recorded": {"backend": "cudagraphs"},
    "inductor-recorded": {"backend": "inductor", "backend_options": {CUDA_GRAPHS: True}},
    "split": {"backend": "auto", "split": "loss", "outputs": "dropped"},
}
"""What is asked for, by the first word of a way; its second is the budget."""


def _is_recorded(plan: planner.Plan) -> bool:
    return is_recorded(plan.target.backend, plan.target.backend_options)


def plan_file(plans: Path, name: str, precision: str, way: str) -> Path:
    """Where in a folder the plan of a model is, in a precision, for a way to run it."""
    plain = f"{name}-{precision}-{way}".replace("%", "").replace(" ", "-")
    return plans / f"{plain}.json"


def budget_of_peak(plan: planner.Plan, peak_bytes: int) -> str:
    """The budget that allows a peak of forward and backward, of a plan's model and step."""
    assert plan.baseline_whole_step is not None
    share = (plan.resident.total + peak_bytes) / plan.baseline_whole_step.allocated_bytes
    return f"{100 * share:.3f}%"


def _reserved(whole: WholeStep | None) -> int | None:
    """What the allocator of a GPU is predicted to reserve; None on the CPU, which has none."""
    if whole is None or whole.expandable_fragmentation_bytes is None:
        return None
    return whole.reserved_bytes


def recorded(device: torch.device, steps: Callable[[], object]) -> RecordedRun | None:
    """Run steps, and keep what the caching allocator did; None where that cannot be recorded."""
    memory = torch.cuda.memory
    try:
        memory._record_memory_history(max_entries=1_000_000, context=None)
    except Exception as error:
        print(f"  no history of the allocator: {shortened(error)}", file=sys.stderr)
        steps()
        return None
    try:
        steps()
        torch.cuda.synchronize(device)
        return recorded_run(memory._snapshot(), device.index or 0)
    except SnapshotError as error:
        print(f"  no history of the allocator: {shortened(error)}", file=sys.stderr)
        return None
    finally:
        memory._record_memory_history(enabled=None)


def is_right(report: Report) -> bool:
    """Whether a planned step leaves what the unplanned one leaves, the random states included."""
    return report.loss_equal and report.gradients_equal and report.buffers_equal and report.rng_equal


def shortened(error: Exception) -> str:
    lines = f"{type(error).__name__}: {error}".splitlines()
    return lines[0][:300]


def _empty(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
