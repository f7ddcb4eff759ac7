"""What ``effort="best"`` brings over "fast": extra time of the plans, and process seconds to find them.

    python benchmarks/effort.py [--models gpt bert ...] [--json FILE]

Captures each model of ``benchmarks/models.py`` in small and solves it for several budgets. Process seconds
are this machine's.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks import models
from planner.planning.options import PlanOptions
from planner.planning.prepare import prepare
from planner.training_step.inputs import read_step
from solvers import portfolio
from solvers.effort import EFFORTS
from solvers.model.graph import Graph
from solvers.model.schedule import simulate

BUDGETS = (0.8, 0.6, 0.4, 0.3, 0.2)
"""Shares of the activations' peak; what is below the least peak is answered by that."""


def captured(name: str) -> Graph:
    """The problem of a model in small."""
    model, args, kwargs = models.build(name, small=True)
    step = read_step(model, args, kwargs, None, "held", of="plan")
    return prepare(model, step, PlanOptions()).problem.graph


def row(graph: Graph, share: float) -> dict[str, float]:
    """Overheads and process seconds of both, for one budget."""
    found: dict[str, float] = {"budget": share}
    budget = int(share * simulate(graph, graph.base_schedule).peak_bytes)
    for effort in EFFORTS:
        begin = time.process_time()
        solution = portfolio.solve(graph, budget, effort=effort)
        found[f"{effort} process seconds"] = time.process_time() - begin
        found[f"{effort} overhead"] = solution.seconds / graph.base_seconds - 1
        found[f"{effort} peak bytes"] = solution.peak_bytes
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=["gpt", "resnet", "unet", "bert-large", "gpt2-xl"])
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    arguments = parser.parse_args()
    table = Table("model", "budget", "fast", "best", "fast, process s", "best, process s")
    rows = []
    for name in arguments.models:
        graph = captured(name)
        for share in BUDGETS:
            found = row(graph, share)
            rows.append({"model": name, **found})
            table.add_row(
                name,
                f"{share:.0%}",
                *(f"{found[f'{effort} overhead']:+.2%}" for effort in ("fast", "best")),
                *(f"{found[f'{effort} process seconds']:.1f}" for effort in ("fast", "best")),
            )
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
