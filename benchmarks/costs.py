"""Seconds by the roofline against seconds measured on this machine, by operator and for whole steps.

    python benchmarks/costs.py --models gpt resnet --out docs/results/costs.md

Measured costs time each distinct operation alone, with its data in the cache as often as they fit; a step
runs them one after the other, with Python between them. Both sums are set beside the step as it really runs.
"""

import argparse
import platform
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.models import REFERENCE, build
from planner.choices import CostSource
from planner.planfile.atomic_file import write_atomically
from planner.planning.options import PlanOptions
from planner.planning.prepare import prepare
from planner.planning.prepared import Prepared
from planner.training_step.step import Step
from planner.verification.measure import measure_seconds
from solvers import portfolio

MOST_OPERATORS = 8


def prepared(name: str, costs: CostSource, small: bool) -> Prepared:
    """A reference model's step, with costs from one source."""
    model, args, kwargs = build(name, small=small)
    step = Step(tuple(args), kwargs)
    return prepare(model, step, PlanOptions(costs=costs))


def by_operator(step: Prepared) -> dict[str, float]:
    """Seconds of the captured step by operator."""
    seconds: dict[str, float] = defaultdict(float)
    graph = step.problem.graph
    for op in graph.ops[: graph.base_length]:
        seconds[op.name.split(" ")[0]] += op.seconds
    return seconds


def real_step(name: str, small: bool) -> Callable[[], Any]:
    """The unplanned step, with data."""
    model, args, kwargs = build(name, small=small)
    step = Step(tuple(args), kwargs)

    def run() -> Any:
        model.zero_grad(set_to_none=True)
        return step.run(model)

    return run


def compare(name: str, small: bool) -> list[str]:
    """A model's results as lines of Markdown."""
    roofline, measured = prepared(name, "roofline", small), prepared(name, "measured", small)
    (real,) = measure_seconds([real_step(name, small)], 5)
    lines = [
        f"## {name}",
        "",
        "| operator | roofline ms | measured ms | measured / roofline |",
        "|---|---|---|---|",
    ]
    predicted, timed = by_operator(roofline), by_operator(measured)
    lines += [
        _row(operator.removeprefix("aten."), predicted[operator], timed[operator])
        for operator in sorted(timed, key=lambda o: -timed[o])[:MOST_OPERATORS]
    ]
    lines.append(_row("all operations, captured", sum(predicted.values()), sum(timed.values())))
    eager = roofline.problem.eager.seconds, measured.problem.eager.seconds
    lines.append(_row("all operations, eager", *eager))
    lines += [
        "",
        f"The eager step really takes {1e3 * real:.1f} ms of process time: {real / eager[0]:.2f} of the "
        f"roofline's, {real / eager[1]:.2f} of the measured sum.",
        "",
    ]
    overheads = []
    for step in (roofline, measured):
        graph = step.problem.graph
        room = step.footprint.room_bytes(step.budget("60%").bytes or 0)
        solution = portfolio.solve(graph, room, time_limit=20)
        predicted = solution.seconds / graph.base_seconds - 1 if solution.feasible else float("nan")
        overheads.append(f"{predicted:+.1%} by the {'roofline' if step is roofline else 'measured costs'}")
    return [*lines, f"Extra time of a plan for 60 % of the memory: {', '.join(overheads)}.", ""]


def _row(name: str, predicted: float, timed: float) -> str:
    ratio = f"{timed / predicted:.2f}" if predicted else ""
    return f"| {name} | {1e3 * predicted:.2f} | {1e3 * timed:.2f} | {ratio} |"


def main() -> None:
    """Compare the chosen models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", choices=REFERENCE, default=list(REFERENCE))
    parser.add_argument("--small", action="store_true", help="a few narrow layers of each")
    parser.add_argument("--out", type=Path, help="write the tables to this file")
    options = parser.parse_args()
    lines = [
        "# Costs by the roofline and measured",
        "",
        "Made by `python benchmarks/costs.py`. The roofline is that of the reference processor, one for all",
        "machines; measured is process time of each distinct operation on this one.",
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()} with "
        f"{torch.backends.cpu.get_cpu_capability()}; other processes ran beside it.",
        "",
    ]
    for name in options.models:
        print(name, file=sys.stderr)
        lines += compare(name, options.small)
    text = "\n".join(lines)
    if options.out is not None:
        write_atomically(options.out, text)
    print(text)


if __name__ == "__main__":
    main()
