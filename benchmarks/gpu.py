"""Predicted against measured, on the device at hand: memory and time of unplanned and planned steps.

    python benchmarks/gpu.py --out docs/results                  # everything, on the CUDA device that is here
    python benchmarks/gpu.py --models gpt2 --precisions bf16 --budgets 60%
    python benchmarks/gpu.py --device cpu --small                # what can be tried without a GPU

First the device is calibrated, in a process of its own; plans use its figures from then on. For every model
and precision: the step as it is, plans for several budgets, and what PyTorch itself has to offer (a
checkpoint around every block, and ``torch.compile`` with ``activation_memory_budget``); when all models are
through, plans that Inductor runs, which take minutes to compile. Plans are made with
measured costs, and each is compared bit for bit with the unplanned step, random states included (within the
spread of unplanned steps, where kernels are not deterministic; a plan that Inductor runs with what Inductor
makes of the step without one). Reserved bytes are predicted and measured for
two steps, whose events are also recorded and run through the simulated allocator.

The results are written after every row, so that a run that is killed leaves what it had. What runs out of
memory, or fails otherwise, is a row that says so. Nothing is started once the time is up; what was not, the
results name. Rows of other models and precisions that an earlier run on the same device left in the folder
stay.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks.frontiers.gpu_models import CASES, Inputs
from benchmarks.frontiers.gpu_results import Row, judged, table
from benchmarks.frontiers.gpu_ways import arithmetic, checkpointed, compiled
from planner.allocator.recorded import RecordedRun, SnapshotError, recorded_run, replay
from planner.allocator.settings import AllocatorSettings
from planner.calibration.calibrate import as_file, calibrate
from planner.calibration.measurements import SMALL
from planner.planfile.atomic_file import write_atomically
from planner.planfile.schema import BackendName, WholeStep
from planner.planning.options import PlanKeywords
from planner.training_step.step import find_loss
from planner.verification.measure import measure_peak, measure_seconds
from planner.verification.verify import Report

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

ROOT = Path(__file__).resolve().parent.parent
PRECISIONS = ("fp32", "tf32", "bf16")
BUDGETS = ("80%", "60%", "40%")
INDUCTOR = ("60%",)
PEERS = ("checkpoint per block", "compile 0.5")
SECONDS = 460.0


@dataclass
class Bench:
    """The benchmark on one device.

    Attributes:
        deadline: When to start nothing more, in seconds of :func:`time.monotonic`.
        changed: Called after every row, with what is running then.
    """

    device: torch.device
    small: bool
    repeats: int
    deadline: float
    changed: Callable[["Bench", str], None] = lambda bench, running: None
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def run(self, name: str, precision: str, ways: Sequence[str]) -> None:
        """Some ways of one model in one precision."""
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
                self.add(Row(name, precision, ways[0], problem=_shortened(error)))
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
                    self.add(Row(name, precision, way, problem=_shortened(error)))
                case.clear()
            del case
        self.changed(self, "")
        _empty(self.device)

    def add(self, row: Row) -> None:
        """Put a row among the results, in the place of one of the same name."""
        names = [(r.model, r.precision, r.way) for r in self.rows]
        name = (row.model, row.precision, row.way)
        if name in names:
            self.rows[names.index(name)] = row
        else:
            self.rows.append(row)
        self.changed(self, "")

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

    def __post_init__(self) -> None:
        for row in self.bench.rows:
            if (row.model, row.precision, row.way) == (self.name, self.precision, "unplanned"):
                self.unplanned = row

    def row(self, way: str) -> Row:
        """Measures one way to run the step; an error that is raised is its problem."""
        if way == "unplanned":
            self.unplanned = self._measured(way, self._step(self.model))
            return self.unplanned
        if way.startswith("plan "):
            return self._planned(way, way.removeprefix("plan "), "eager")
        if way.startswith("inductor "):
            return self._planned(way, way.removeprefix("inductor "), "inductor")
        if way == "checkpoint per block":
            with checkpointed(self.model, CASES[self.name].blocks):
                return self._measured(way, self._step(self.model))
        with compiled(self.model, 0.5) as module:
            return self._measured(way, self._step(module))

    def clear(self) -> None:
        """No gradients, no cached blocks, and no workspaces of cuBLAS, which can lie anywhere among them."""
        self.model.zero_grad(set_to_none=True)
        if self.bench.device.type == "cuda":
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
        _empty(self.bench.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.bench.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def _step(self, module: nn.Module) -> Callable[[], Any]:
        args, kwargs = self.inputs

        def step() -> Any:
            with self._autocast():
                output = module(*args, **kwargs)
            loss = find_loss(output)
            assert loss is not None
            loss.backward()
            return output  # which users hold while backward runs

        return step

    def _planned(self, way: str, budget: str, backend: BackendName) -> Row:
        args, kwargs = self.inputs
        asked: PlanKeywords = {"costs": "measured", "backend": backend}
        asked["time_limit"] = 5 if self.bench.small else 20
        with self._autocast():
            plan = planner.plan(self.model, args, kwargs, budget=budget, **asked)
        if self.unplanned is not None and self.unplanned.predicted_bytes is None:
            self.unplanned = replace(
                self.unplanned,
                predicted_bytes=plan.baseline.dynamic_peak_bytes,
                predicted_reserved_bytes=_reserved(plan.baseline_whole_step),
            )
            self.bench.add(self.unplanned)
        whole = plan.whole_step
        assert whole is not None
        row = Row(
            self.name,
            self.precision,
            way,
            predicted_bytes=plan.predicted.dynamic_peak_bytes,
            predicted_reserved_bytes=_reserved(whole),
            budget_bytes=plan.target.budget_bytes,
            predicted_overhead=plan.predicted.seconds / plan.baseline.seconds - 1,
        )
        plan.apply(self.model)
        try:
            measured = self._measured(way, self._step(self.model))
        finally:
            planner.remove(self.model)
        row = replace(
            row,
            measured_bytes=measured.measured_bytes,
            unsplit_bytes=measured.unsplit_bytes,
            reserved_bytes=measured.reserved_bytes,
            replayed_bytes=measured.replayed_bytes,
            seconds=measured.seconds,
            measured_overhead=measured.measured_overhead,
            problem=measured.problem,
        )
        if measured.measured_bytes is not None:
            around = whole.total_bytes - whole.forward_backward_bytes
            row = replace(row, total_bytes=plan.resident.total + measured.measured_bytes + around)
        self.bench.add(row)  # a comparison needs more memory than either step
        self.clear()
        try:
            with self._autocast():
                report = planner.verify(self.model, args, kwargs, plan=plan, repeats=0)
        except Exception as error:
            problems = [row.problem, f"not compared: {_shortened(error)}"]
            return replace(row, problem="; ".join(filter(None, problems)))
        right = report.ok if backend == "inductor" else is_right(report)
        found = "" if right else "; ".join(report.problems[:3])
        return replace(row, right=right, problem="; ".join(filter(None, [row.problem, found])))

    def _measured(self, way: str, step: Callable[[], Any]) -> Row:
        device = self.bench.device

        def cleared() -> Any:
            self.model.zero_grad(set_to_none=True)
            return step()

        row = Row(self.name, self.precision, way)
        try:
            cleared()
            cleared()
            if device.type == "cuda":
                self.clear()
                torch.cuda.reset_peak_memory_stats(device)
                run = recorded(device, lambda: (cleared(), cleared()))
                row = replace(row, reserved_bytes=torch.cuda.max_memory_reserved(device))
                if run is not None:
                    row = replace(row, replayed_bytes=replay(run, AllocatorSettings()).reserved_bytes)
            self.model.zero_grad(set_to_none=True)
            peak = measure_peak(step, device)
            row = replace(row, measured_bytes=peak.peak_bytes, unsplit_bytes=peak.unsplit_bytes)
            row = replace(row, seconds=measure_seconds([cleared], self.bench.repeats, device=device)[0])
        except Exception as error:
            return replace(row, problem=_shortened(error))
        before = None if self.unplanned is None else self.unplanned.seconds
        if before is None or row.seconds is None:
            return row
        return replace(row, measured_overhead=row.seconds / before - 1)


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
        print(f"  no history of the allocator: {_shortened(error)}", file=sys.stderr)
        steps()
        return None
    try:
        steps()
        torch.cuda.synchronize(device)
        return recorded_run(memory._snapshot(), device.index or 0)
    except SnapshotError as error:
        print(f"  no history of the allocator: {_shortened(error)}", file=sys.stderr)
        return None
    finally:
        memory._record_memory_history(enabled=None)


def calibrated(device: torch.device, folder: Path) -> dict[str, Any]:
    """Calibrate the device in a process of its own, which has not used it; what that said, or its error."""
    if device.type == "cpu":
        found = calibrate("cpu", folder / "device-cpu.json", sizes=SMALL)
        return {**as_file(found.device), "measured": asdict(found.measured)}
    command = [sys.executable, "-m", "planner", "calibrate", "--device", str(device), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=ROOT)
        if done.returncode == 0:
            return dict(json.loads(done.stdout))
        return {"error": (done.stderr.strip().splitlines() or ["it ended without a word"])[-1][:300]}
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return {"error": _shortened(error)}


def is_right(report: Report) -> bool:
    """Whether a planned step leaves what the unplanned one leaves, the random states included."""
    return report.loss_equal and report.gradients_equal and report.buffers_equal and report.rng_equal


def _shortened(error: Exception) -> str:
    lines = f"{type(error).__name__}: {error}".splitlines()
    return lines[0][:300]


def _empty(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the chosen parts, write and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu (cuda)")
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--budgets", nargs="*", default=list(BUDGETS), help="largest first")
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=list(PEERS), help="what of PyTorch's own (both)"
    )
    parser.add_argument(
        "--inductor", nargs="*", default=list(INDUCTOR), help="budgets of plans that Inductor runs"
    )
    parser.add_argument(
        "--calibrate", action=argparse.BooleanOptionalAction, default=True, help="measure the device first"
    )
    parser.add_argument("--small", action="store_true", help="models of a few narrow layers")
    parser.add_argument("--repeats", type=int, default=5, help="how often each step is timed (5)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"start nothing after ({SECONDS:.0f})")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for results (out)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is here; --device cpu tries everything without one")
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    # Before this process uses the device itself.
    calibration = calibrated(device, options.out) if options.calibrate else None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
    plain = "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")
    path = options.out / f"gpu-{plain}.json"
    started = begun
    chosen = {(model, precision) for model in options.models for precision in options.precisions}
    kept = [row for row in earlier_rows(path, name) if (row.model, row.precision) not in chosen]

    def document(bench: Bench, running: str) -> dict[str, Any]:
        rows = [*kept, *bench.rows]
        return {
            "device": name,
            "torch": torch.__version__,
            "seconds": time.monotonic() - started,
            "calibration": calibration,
            "running": running,
            "judged": judged(rows),
            "left_out": bench.left_out,
            "rows": [asdict(row) for row in rows],
        }

    def write(bench: Bench, running: str) -> None:
        found = document(bench, running)
        write_atomically(path, json.dumps(found, indent=1) + "\n")
        write_atomically(path.with_suffix(".md"), table(found))

    deadline = started + options.seconds
    bench = Bench(device, options.small, options.repeats, deadline, write)
    ways = ["unplanned", *(f"plan {budget}" for budget in options.budgets), *options.peers]
    for some in (ways, [f"inductor {budget}" for budget in options.inductor]):
        for precision in options.precisions:
            for model in options.models:
                bench.run(model, precision, some)
    found = document(bench, "")
    write(bench, "")
    print(table(found))
    return found


def earlier_rows(path: Path, device: str) -> list[Row]:
    """The rows that an earlier run on this device, with this version of torch, left in a file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if (found["device"], found["torch"]) != (device, torch.__version__):
            return []
        return [Row(**row) for row in found["rows"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


if __name__ == "__main__":
    main()
