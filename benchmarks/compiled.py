"""Ways to train under a memory budget, compiled and not: small models, measured peaks, gradients and times.

    OMP_NUM_THREADS=1 python benchmarks/compiled.py [--models gpt bert ...] [--budgets 60 80 40 min]
        [--ratios 0.5 0] [--eager] [--fresh] [--checkpoints] [--layouts] [--plans-only] [--repeats 5]
        [--rows out/compiled.jsonl] [-o out/compiled.md]

Each model of `benchmarks/compiled_models.py` has a process of its own, with an empty cache of Inductor, which
adds its rows to the file ``--rows``; the table is written from that file, so that models can be measured one
by one, and a model that is measured again replaces its rows. ``--models`` without names writes the table
only. ``--fresh`` times compilations from empty caches, ``--checkpoints`` puts a checkpoint around every
block, ``--eager`` plans for eager, too, ``--layouts`` plans again, laid out as Inductor does without a plan,
and ``--plans-only`` takes Inductor's peak from the file.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.compiled_models import MODELS

Row = dict[str, Any]
WRONG = 1e-2
"""An error from which on gradients are wrong, unless that of Inductor without a plan is half as large."""
NO_MMAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
"""Settings of glibc by which memory that was freed is kept: page faults would be timed as well."""
_MIB = 2**20
_SWITCHES = ("eager", "fresh", "checkpoints", "layouts", "plans-only")


def wrong(row: Row, inductor: Row | None) -> bool:
    """Whether the gradients of a way are, beside those of Inductor without a plan."""
    return bool(row["error"] > WRONG and (inductor is None or row["error"] > 2 * inductor["error"]))


def rows_of(path: Path) -> list[Row]:
    """What was measured last of each way of each model."""
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    last = {(row["model"], row["way"]): row for row in found}
    return sorted(last.values(), key=lambda row: list(MODELS).index(row["model"]))


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [
        "| model | way | budget, MiB | peak, MiB | predicted | measured / predicted | re-run | planning, s | "
        "compiling, s | step, ms | error of gradients | of Inductor's | buffers |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        inductor = next((r for r in rows if r["model"] == row["model"] and r["way"] == "Inductor"), None)
        lines.append("| " + " | ".join(_cells(row, inductor)) + " |")
    return lines


def _cells(row: Row, inductor: Row | None) -> list[str]:
    if "failed" in row:
        return [row["model"], row["way"], _mib(row.get("budget")), row["failed"], *[""] * 9]
    predicted, peak = row.get("predicted"), row["peak"]
    budget = row.get("budget")
    over = " (over)" if budget is not None and peak > budget else ""
    of_inductor = row["error"] / inductor["error"] if inductor and inductor["error"] else None
    return [
        row["model"], row["way"], _mib(budget), _mib(peak) + over, _mib(predicted),
        f"{peak / predicted:.4f}" if predicted else "", str(row.get("recomputed", "")),
        _number(row.get("plan_seconds")), _number(row.get("compile_seconds")),
        _number(1e3 * row["step_seconds"] if "step_seconds" in row else None),
        f"{row['error']:.1e}" + " (wrong)" * wrong(row, inductor),
        "" if of_inductor is None else f"{of_inductor:.2f}",
        _buffers(row, inductor),
    ]  # fmt: skip


def _buffers(row: Row, inductor: Row | None) -> str:
    """Whether they are those that Inductor leaves without a plan; else how much further from exact ones."""
    if "buffers_equal" not in row:
        return ""
    if row["buffers_equal"]:
        return "equal"
    theirs = (inductor or {}).get("buffers_error")
    return f"{row['buffers_error'] / theirs:.2f}" if theirs else "differ"


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / _MIB:.2f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--budgets", nargs="*", default=["60", "80", "40", "min"])
    parser.add_argument("--ratios", nargs="*", type=float, default=[])
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=Path, default=Path("out/compiled.jsonl"))
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).resolve().with_name("compiled_ways.py")
    for model in options.models:
        command = [sys.executable, script, model, "--rows", options.rows, "--repeats", options.repeats]
        command += ["--budgets", *options.budgets, "--ratios", *options.ratios]
        command += [f"--{name}" for name in _SWITCHES if getattr(options, name.replace("-", "_"))]
        # One at a time, so that processor time can be told apart from that of other compilers.
        with tempfile.TemporaryDirectory() as cache:
            own = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache, **NO_MMAP}
            subprocess.run([str(part) for part in command], check=True, env={**os.environ, **own})
    lines = table(rows_of(options.rows))
    print("\n".join(lines))
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
