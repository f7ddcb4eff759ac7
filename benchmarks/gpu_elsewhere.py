"""What is predicted for a GPU on a machine without one, against what `benchmarks/gpu.py` measured there.

    python benchmarks/gpu_elsewhere.py docs/results/gpu-nvidia-h200.json --device H200

Each model and precision whose step without a plan was measured is captured here, on the meta device. A table
is printed: bytes that forward and backward hold at their peak, as predicted here and as measured there.
"""

import argparse
import contextlib
import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks.frontiers.gpu_models import CASES
from benchmarks.frontiers.gpu_results import Row
from benchmarks.frontiers.gpu_ways import arithmetic
from planner.errors import PlanWarning


def predicted(name: str, precision: str, device: str, small: bool = False) -> int:
    """The peak of a model's forward and backward over entry, on a device that need not be here."""
    with torch.device("meta"):
        model, (args, kwargs) = CASES[name].build(small)
    cast = torch.autocast("cuda", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    with arithmetic(precision), cast, warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        warnings.filterwarnings("ignore", "User provided device_type of 'cuda'")
        plan = planner.plan(model.train(), args, kwargs, budget="100%", device=device)
    return plan.baseline.dynamic_peak_bytes


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("results", type=Path, help="what benchmarks/gpu.py wrote")
    parser.add_argument("--device", required=True, help="name of the device that it ran on, as in H200")
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--small", action="store_true", help="of models of a few narrow layers")
    options = parser.parse_args(arguments)
    rows = [Row(**row) for row in json.loads(options.results.read_text(encoding="utf-8"))["rows"]]
    print("| model | precision | predicted here | measured | error |\n|---|---|---:|---:|---:|")
    for row in rows:
        if row.way == "unplanned" and row.model in options.models and row.measured_bytes is not None:
            found = predicted(row.model, row.precision, options.device, options.small)
            error = f"{found / row.measured_bytes - 1:+.3%}" if found != row.measured_bytes else "0"
            print(
                f"| {row.model} | {row.precision} | {found:,} | {row.measured_bytes:,} | {error} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
