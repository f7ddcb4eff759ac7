"""Predicted against measured, on the device at hand: memory and time of unplanned and planned steps.

    python benchmarks/gpu.py --out docs/results                  # everything, on the CUDA device that is here
    python benchmarks/gpu.py --models gpt2 --precisions bf16 --budgets 60%
    python benchmarks/gpu.py --jobs 8                            # on a machine of many cores: sooner
    python benchmarks/gpu.py --device cpu --small                # what can be tried without a GPU

First the device is calibrated, in a process of its own; plans use its figures from then on. Then what
nobody has run on a GPU yet, of the two language models in one precision, so that nine minutes show each
once: ``torch.compile`` as it is, with a budget, and with a checkpoint around every block; a plan that
Inductor runs at the peak of the latter; plans, of eager operators and compiled, whose steps are recorded as
CUDA graphs (on the CPU by what stands in); a loss in pieces; and results kept on the host (on the CPU in
files), which a GPU only predicts. For every model and precision: the step as it is, plans for several
budgets, what PyTorch itself has to offer (a checkpoint around every block, and ``torch.compile`` with
``activation_memory_budget``), and a plan for the peak that the checkpoints have; when all models are
through, plans that Inductor runs, which take minutes to compile. Plans are made with measured costs, and
each is compared bit for bit with the unplanned step, random states included (within the spread of unplanned
steps, where kernels are not deterministic; a plan that Inductor runs with what Inductor makes of the step
without one). Reserved bytes are predicted and measured for two steps, whose events are also recorded and
run through the simulated allocator.

With ``--jobs`` models are planned, compared and measured side by side, in processes of their own, with the
costs of the device's figures, as kernels cannot be timed then. Times are measured afterwards, one by one, of
the same plans.

The results are written after every row, so that a run that is killed leaves what it had. What runs out of
memory, or fails otherwise, is a row that says so. Nothing is started once the time is up; what was not, the
results name. Rows of other models and precisions that an earlier run on the same device left in the folder
stay.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.frontiers.gpu_case import AS_CHECKPOINT, AS_COMPILED, COMPILED_CHECKPOINT, Bench, shortened
from benchmarks.frontiers.gpu_models import CASES
from benchmarks.frontiers.gpu_results import Row, judged, table
from planner.calibration.calibrate import as_file, calibrate
from planner.calibration.measurements import SMALL
from planner.planfile.atomic_file import write_atomically

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

ROOT = Path(__file__).resolve().parent.parent
PRECISIONS = ("fp32", "tf32", "bf16")
BUDGETS = ("80%", "60%", "40%")
INDUCTOR = ("60%",)
FIRST = (
    "unplanned",
    "compile",
    COMPILED_CHECKPOINT,
    AS_COMPILED,
    "compile 0.5",
    "recorded 80%",
    "inductor-recorded 80%",
    "plan 60%",
    "split min",
    "offload 60%",
)
FIRST_MODELS = ("gpt2", "bert-large")
PEERS = ("checkpoint per block", "compile 0.5")
SECONDS = 460.0


def calibrated(device: torch.device, folder: Path) -> dict[str, Any]:
    """Calibrate the device in a process of its own, which has not used it; what that said, or its error."""
    if device.type == "cpu":
        found = calibrate("cpu", folder / "device-cpu.json", sizes=SMALL)
        return {**as_file(found.device), "measured": asdict(found.measured)}
    command = [sys.executable, "-m", "planner", "calibrate", "--device", str(device), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=ROOT)
        if done.returncode == 0:
            found = dict(json.loads(done.stdout))
            del found["saved_to"]  # a place on this machine
            return found
        return {"error": (done.stderr.strip().splitlines() or ["it ended without a word"])[-1][:300]}
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return {"error": shortened(error)}


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
        "--first", nargs="*", choices=FIRST, default=list(FIRST), help="what of the new is run first (all)"
    )
    parser.add_argument(
        "--calibrate", action=argparse.BooleanOptionalAction, default=True, help="measure the device first"
    )
    parser.add_argument("--small", action="store_true", help="models of a few narrow layers")
    parser.add_argument("--jobs", type=int, default=1, help="models planned and compared side by side (1)")
    parser.add_argument("--memory-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plans", type=Path, help="folder of plans that are used, and made where missing")
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
    bench = Bench(device, options.small, options.repeats, deadline, changed=write)
    bench.plans, bench.times = options.plans, not options.memory_only
    ways = ["unplanned", *(f"plan {budget}" for budget in options.budgets), *options.peers]
    if options.budgets and "checkpoint per block" in options.peers:
        ways.append(AS_CHECKPOINT)
    if options.jobs > 1 or options.memory_only:
        bench.costs = "roofline"
    if not options.memory_only:
        early = "bf16" if "bf16" in options.precisions else options.precisions[0]
        for model in [name for name in FIRST_MODELS if name in options.models]:
            bench.run(model, early, options.first)
    with tempfile.TemporaryDirectory() as scratch:  # plans of an earlier run are others
        if options.jobs > 1:
            bench.plans = (options.plans or Path(scratch) / "plans").resolve()
            side_by_side(bench, options, Path(scratch))
            bench.memory = False
        for some in (ways, [f"inductor {budget}" for budget in options.inductor]):
            for precision in options.precisions:
                for model in options.models:
                    bench.run(model, precision, some)
    found = document(bench, "")
    write(bench, "")
    print(table(found))
    return found


SHARE = 0.6
"""Of the time, what planning and comparing side by side may take."""


def side_by_side(bench: Bench, options: argparse.Namespace, scratch: Path) -> None:
    """Plan, compare and measure the memory of models in processes of their own, several at a time.

    Args:
        bench: Gets their rows, and what was left out: by a process that ended before it was through, too.
        options: As given on the command line.
        scratch: A folder in which they write.
    """
    assert bench.plans is not None
    bench.plans.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + SHARE * (bench.deadline - time.monotonic())

    def measured(case: tuple[str, str]) -> None:
        folder, left = scratch / "-".join(case), until - time.monotonic()
        command = [sys.executable, __file__, "--memory-only", "--no-calibrate", "--seconds", f"{left:.0f}"]
        command += ["--device", str(bench.device), "--models", case[0], "--precisions", case[1]]
        command += ["--plans", str(bench.plans), "--out", str(folder), *(["--small"] * bench.small)]
        for name in ("budgets", "peers", "inductor"):
            command += [f"--{name}", *getattr(options, name)]
        ended = "its time did not come"
        if left > 0:
            try:
                done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=left + GRACE, cwd=ROOT)
                ended = f"its process ended with {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                ended = "its time was up"
        if ended:
            bench.left_out.append(f"{' '.join(case)}, or what of it has no row ({ended})")
        for file in folder.glob("gpu-*.json"):
            found = json.loads(file.read_text(encoding="utf-8"))
            for row in found["rows"]:
                bench.add(Row(**row))
            bench.left_out += found["left_out"]

    cases = [(model, precision) for precision in options.precisions for model in options.models]
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in [pool.submit(measured, case) for case in cases]:
            done.result()


GRACE = 30.0
"""Seconds that a process may go on with what it has begun."""


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
