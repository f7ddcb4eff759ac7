"""Process seconds of a plan: the first of a process, and another budget's of the same model.

    python benchmarks/planning_time.py --out docs/results/planning-time.md
    python benchmarks/planning_time.py --models bert --shares 60%
    python benchmarks/planning_time.py --replays

The models are those of ``benchmarks/time_truth.py``: six layers, outputs dropped. For each budget a process
of its own imports what it needs, and then plans (capture and solving), plans for another budget, and solves
the first once more with ``effort="best"``, which tells how far the plan's extra time is from the best known.
"their peak" is that of Hugging Face's own checkpointing. Seconds of operations are remembered from an
earlier process, but for the last budget, where nothing is. ``--replays`` is another table: the first plan of
a process for 60%, by graphs and by replays in turn, and by replays of a Llama of 200 layers for 70%.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.one_by_one import ROOT
from benchmarks.time_truth import SETTINGS, build, enable_checkpointing, peak_of, step_of

MODELS = ("bert", "gpt2", "llama", "vit")
SHARES = ("80%", "60%", "50%", "40%", "their peak", "min", "60%, first in all")
FIRST = ", first in all"
"""Behind a budget: nothing is remembered of earlier processes."""
OTHER = "70%"
"""The budget of the second plan."""
BEST_SECONDS = 60.0
TIMES = 3
"""Processes for each row beside replays; the figure is their median."""
DEEP = "200 layers"


def measure(name: str, share: str) -> dict[str, Any]:
    """One model and budget, in this process."""
    import planner

    model, kwargs, loss = build(name)
    model.train()
    budget: str | int = share.removesuffix(FIRST)
    if share == "their peak":
        budget = int(os.environ["THEIR_PEAK"])

    def plan(wanted: str | int, **options: Any) -> tuple[float, Any]:
        started = time.process_time()
        made = planner.plan(model, kwargs=kwargs, loss=loss, outputs="dropped", budget=wanted, **options)
        return time.process_time() - started, made

    try:
        first, made = plan(budget)
    except planner.InfeasibleBudget as error:
        return {"infeasible": str(error)}
    second, _ = plan(OTHER)
    _, best = plan(budget, effort="best", time_limit=BEST_SECONDS)
    return {
        "first": first,
        "second": second,
        "overhead": made.overhead,
        "best": min(best.overhead, made.overhead),
    }


def first_plan(name: str, backend: Any) -> float:
    """Process seconds of the first plan of this process."""
    import planner
    from benchmarks.deep import narrow_step

    budget = "60%"
    if name == DEEP:
        (model, kwargs), loss, budget = narrow_step(200), None, "70%"
    else:
        model, kwargs, loss = build(name)
    model.train()
    started = time.process_time()
    planner.plan(model, kwargs=kwargs, loss=loss, outputs="dropped", budget=budget, backend=backend)
    return time.process_time() - started


def beside_replays(names: Sequence[str]) -> Iterator[str]:
    """The rows of the table of plans by graphs and by replays."""
    yield "| model | graphs, s | replays, s | share |"
    yield "|---|---|---|---|"
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)}
    for name in (*names, DEEP):
        seconds: dict[str, list[float]] = {"graph": [], "replay": []}
        for _ in range(TIMES):
            for backend in ("replay",) if name == DEEP else seconds:
                asked = [sys.executable, "-W", "ignore", __file__, "--worker", f"{backend} {name}"]
                ran = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True)
                seconds[backend].append(float(ran.stdout.splitlines()[-1]))
        replay = statistics.median(seconds["replay"])
        if name == DEEP:
            yield f"| {name} | | {replay:.1f} | |"
        else:
            graph = statistics.median(seconds["graph"])
            yield f"| {name} | {graph:.1f} | {replay:.1f} | {replay / graph:.2f} |"


def their_peak(name: str) -> int:
    """What the model's own checkpointing takes, with what is resident."""
    import planner

    model, kwargs, loss = build(name)
    model.train()
    prepared = planner.prepare(model, kwargs=kwargs, loss=loss, outputs="dropped")
    resident = prepared.plan("100%", solver="none").predicted.resident_bytes
    assert enable_checkpointing(model)
    built = (model, kwargs, loss)
    return resident + peak_of(built, step_of(built))


def main() -> None:
    """Measure the chosen models and budgets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--shares", nargs="+", default=list(SHARES), help="budgets, of the unplanned step")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    parser.add_argument("--replays", action="store_true", help="the table of graphs and replays alone")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.worker:
        backend, _, name = options.worker.partition(" ")
        if backend in ("graph", "replay"):
            print(first_plan(name, backend))
        else:
            print(json.dumps(measure(options.models[0], options.worker)))
        return
    if options.replays:
        for line in beside_replays(options.models):
            print(line, flush=True)
        return
    import torch

    from planner.planfile.atomic_file import write_atomically

    lines = [
        "# Process seconds of a plan",
        "",
        "Made by `python benchmarks/planning_time.py --out docs/results/planning-time.md`: six",
        "layers, each budget in a process of its own, one thread. *first* is capture and solving of the",
        f"first plan of a process, *another* a plan of the same model for {OTHER} after it; *best known* is",
        f'what `effort="best"` finds in {BEST_SECONDS:.0f} s. "their peak" is what the model\'s',
        "own checkpointing takes. Seconds of operations are remembered from an earlier process, but for",
        '"first in all".',
        f"torch {torch.__version__}, {platform.machine()} with {torch.backends.cpu.get_cpu_capability()}.",
        "",
        "| model | budget | first, s | another, s | extra time | best known |",
        "|---|---|---|---|---|---|",
    ]
    for name in options.models:
        environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)}
        if "their peak" in options.shares:
            environment["THEIR_PEAK"] = str(their_peak(name))
        for share in options.shares:
            command = [sys.executable, "-W", "ignore", __file__, "--models", name, "--worker", share]
            with tempfile.TemporaryDirectory() as nothing:
                remembering = {"XDG_CACHE_HOME": nothing} if share.endswith(FIRST) else {}
                ran = subprocess.run(
                    command, env=environment | remembering, capture_output=True, text=True, check=False
                )
            if ran.returncode:
                raise RuntimeError(f"{name}, {share}: {ran.stderr[-2000:]}")
            row = json.loads(ran.stdout.splitlines()[-1])
            print(name, share, row, file=sys.stderr, flush=True)
            if "infeasible" in row:
                lines.append(f"| {name} | {share} | infeasible | | | |")
                continue
            lines.append(
                f"| {name} | {share} | {row['first']:.1f} | {row['second']:.1f} "
                f"| {row['overhead']:+.1%} | {row['best']:+.1%} |"
            )
    text = "\n".join([*lines, ""])
    if options.out is not None:
        write_atomically(options.out, text)
    print(text)


if __name__ == "__main__":
    main()
