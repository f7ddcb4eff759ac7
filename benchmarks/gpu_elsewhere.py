"""What is predicted for a GPU on a machine without one, against what `benchmarks/gpu.py` measured there.

    python benchmarks/gpu_elsewhere.py docs/results/gpu-nvidia-h200.json --device H200

Each model and precision whose step without a plan was measured is captured here, on the meta device. A table
is printed: bytes that forward and backward hold at their peak, as predicted here and as measured there.
With ``--plans`` plans are made as well, for 60 % and for the peak of a checkpoint around every block that was
measured there, which ``benchmarks/gpu.py --plans`` runs there.
With ``--times`` the table is of time: what each plan that was timed there takes beyond the step without a
plan, as predicted then, as predicted now, and as measured. Launches are operations that take time, and how
many of these run again. The last column is by two clocks: how long the GPU would wait for launches, each of
the seconds that were calibrated there, besides what it waits for graphs to be entered.
"""

import argparse
import contextlib
import functools
import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks.frontiers.gpu_case import AS_CHECKPOINT, budget_of_peak, plan_file
from benchmarks.frontiers.gpu_models import CASES
from benchmarks.frontiers.gpu_results import Row
from benchmarks.frontiers.gpu_ways import arithmetic
from planner.costs.devices import find_device
from planner.errors import PlanWarning
from planner.planfile.simulated import SimulatedPlan, simulated

WAIT = "_local_scalar_dense"
"""The operation by which a branch asks for data."""


@functools.cache
def planned(name: str, precision: str, budget: str, device: str, small: bool = False) -> planner.Plan:
    """A plan of a model's step on a device that need not be here."""
    with torch.device("meta"):
        model, (args, kwargs) = CASES[name].build(small)
    cast = torch.autocast("cuda", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    with arithmetic(precision), cast, warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        warnings.filterwarnings("ignore", "User provided device_type of 'cuda'")
        return planner.plan(model.train(), args, kwargs, budget=budget, device=device, costs="roofline")


def save_plans(
    rows: list[Row], row: Row, device: str, small: bool, folder: Path, unplanned: planner.Plan
) -> None:
    """The plans of a model in a precision, as files of the names that ``benchmarks/gpu.py`` looks for."""
    folder.mkdir(parents=True, exist_ok=True)
    for way, budget in budgets_of(rows, row, unplanned).items():
        try:
            plan = planned(row.model, row.precision, budget, device, small)
        except planner.InfeasibleBudget as error:
            print(f"no {way} of {row.model} in {row.precision}: {error}", file=sys.stderr)
        else:
            plan.save(plan_file(folder, row.model, row.precision, way))


def budgets_of(rows: list[Row], row: Row, unplanned: planner.Plan) -> dict[str, str]:
    """The budgets of a model's plans in a precision, by the way of their rows."""
    budgets = {"plan 60%": "60%"}
    for other in rows:
        same = (other.model, other.precision) == (row.model, row.precision)
        if same and other.way == "checkpoint per block" and other.measured_bytes is not None:
            budgets[AS_CHECKPOINT] = budget_of_peak(unplanned, other.measured_bytes)
    return budgets


def waiting_seconds(seen: SimulatedPlan, device: str, launch: float) -> float:
    """How long a GPU waits for the host, which takes so many seconds a launch and works ahead of it."""
    host = done = waited = 0.0
    kernel_less = find_device(device).launch_seconds
    for step in seen.schedule.tolist():
        op = seen.graph.ops[step]
        if WAIT in op.name:
            host = max(host, done)
        elif op.seconds > 0:
            host += launch
            waited += max(host - done, 0.0)
            done = max(host, done) + op.seconds - kernel_less
    return waited


def print_times(rows: list[Row], device: str, launch: float, models: list[str], small: bool) -> None:
    """The table of extra time; `launch` is what a launch was calibrated to take."""
    print("| model | precision | plan | launches, again | then | now | measured | points off | waits |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    unplanned = {(row.model, row.precision): row for row in rows if row.way == "unplanned"}
    for row in rows:
        if row.measured_overhead is None or row.predicted_overhead is None or row.model not in models:
            continue
        whole = planned(row.model, row.precision, "100%", device, small)
        budget = budgets_of(rows, unplanned[row.model, row.precision], whole)[row.way]
        plan = planned(row.model, row.precision, budget, device, small)
        seen = simulated(plan)
        launches = [seen.graph.ops[step].seconds > 0 for step in seen.schedule.tolist()]
        again = sum(launch and rerun for launch, rerun in zip(launches, seen.reruns.tolist(), strict=True))
        now = plan.predicted.seconds / plan.baseline.seconds - 1
        print(
            f"| {row.model} | {row.precision} | {row.way} | {sum(launches):,}, {again} "
            f"| {row.predicted_overhead:+.1%} | {now:+.1%} | {row.measured_overhead:+.1%} "
            f"| {100 * (now - row.measured_overhead):+.1f} "
            f"| {1e3 * waiting_seconds(seen, device, launch):.2f} ms |",
            flush=True,
        )


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("results", type=Path, help="what benchmarks/gpu.py wrote")
    parser.add_argument("--device", required=True, help="name of the device that it ran on, as in H200")
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--plans", type=Path, help="folder for plans, which are made as well")
    parser.add_argument("--small", action="store_true", help="of models of a few narrow layers")
    parser.add_argument(
        "--times", action="store_true", help="of plans, instead of bytes of steps without one"
    )
    options = parser.parse_args(arguments)
    found = json.loads(options.results.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in found["rows"]]
    if options.times:
        launch = found["calibration"]["launch_seconds"]
        print_times(rows, options.device, launch, options.models, options.small)
        return
    print("| model | precision | predicted here | measured | error |\n|---|---|---:|---:|---:|")
    for row in rows:
        if row.way == "unplanned" and row.model in options.models and row.measured_bytes is not None:
            plan = planned(row.model, row.precision, "100%", options.device, options.small)
            found = plan.baseline.dynamic_peak_bytes
            error = f"{found / row.measured_bytes - 1:+.3%}" if found != row.measured_bytes else "0"
            print(
                f"| {row.model} | {row.precision} | {found:,} | {row.measured_bytes:,} | {error} |",
                flush=True,
            )
            if options.plans is not None:
                save_plans(rows, row, options.device, options.small, options.plans, plan)


if __name__ == "__main__":
    main()
