"""Do plans do what they promise? Every solver's plans, executed and compared with the unplanned step.

    python benchmarks/verified.py [--models gpt,resnet] [--solvers auto] [--budgets 90%,min] [--json]

For each model, budget and solver: the plan is applied, one step is run, and loss, gradients, buffers
and random generators are compared bit for bit with the unplanned step's; the peak is measured by the
allocator's own events. Solvers that do not look at the budget are marked where they miss it.
"""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from planner.planfile.budget import Budget
from planner.planning.make_plan import make_plan
from planner.planning.options import PlanOptions
from planner.planning.prepare import prepare
from planner.planning.solve import room_bytes
from planner.training_step.step import Step
from planner.user_plan import Plan
from solvers.registry import SOLVERS
from tests.zoo import build


def rows(models: list[str], solvers: list[str], budgets: list[str]) -> list[dict[str, object]]:
    """One row for each model, budget and solver."""
    found: list[dict[str, object]] = []
    for name in models:
        model, args, kwargs = build(name)
        step = Step(args, kwargs)
        prepared = prepare(model, step, PlanOptions())
        for text in budgets:
            budget = prepared.budget(text)
            for solver in solvers:
                room = room_bytes(budget, prepared)
                solution = SOLVERS[solver](prepared.problem.graph, room, time_limit=30)
                row: dict[str, object] = {"model": name, "budget": text, "solver": solver}
                # What cannot meet the budget is executed all the same, as a plan without one.
                promised = budget if solution.feasible else Budget(None, text)
                plan = Plan.of(make_plan(prepared, solution, promised))
                report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
                found.append(
                    row
                    | {
                        "fits": solution.feasible,
                        "ok": report.ok,
                        "predicted_dynamic_peak_bytes": report.predicted_dynamic_peak_bytes,
                        "measured_dynamic_peak_bytes": report.measured_dynamic_peak_bytes,
                        "overhead": plan.overhead,
                        "problems": report.problems[:3],
                    }
                )
                Console(stderr=True).print(f"{name} {text} {solver}: ok={report.ok}")
    return found


def markdown(found: list[dict[str, object]]) -> str:
    """The rows as a page of the documentation."""
    lines = [
        "# Plans, executed",
        "",
        "Made by `python benchmarks/verified.py --out docs/results/verified.md`. Every solver's plan is",
        "run for a step and compared, bit for bit, with the unplanned step (loss, gradients, buffers,",
        "generators); its dynamic peak is measured by the allocator's events. Solvers that ignore the",
        "budget, or cannot meet it, are run all the same and say no under *fits*.",
        "",
        "| model | budget | solver | fits | right | predicted bytes | measured bytes | overhead |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        fits, right = ("yes" if row[key] else "no" for key in ("fits", "ok"))
        lines.append(
            f"| {row['model']} | {row['budget']} | {row['solver']} | {fits} | {right} "
            f"| {row['predicted_dynamic_peak_bytes']:,} | {row['measured_dynamic_peak_bytes']:,} "
            f"| {row['overhead']:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gpt,resnet,unet")
    parser.add_argument("--solvers", default="all")
    parser.add_argument("--budgets", default="90%,75%,60%,min")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file as well")
    options = parser.parse_args()
    solvers = list(SOLVERS) if options.solvers == "all" else options.solvers.split(",")
    found = rows(options.models.split(","), solvers, options.budgets.split(","))
    if options.out is not None:
        options.out.write_text(markdown(found))
    if options.json:
        json.dump(found, sys.stdout, indent=1)
    else:
        titles = ("model", "budget", "solver", "fits", "right", "predicted MiB", "measured MiB", "overhead")
        table = Table(*titles)
        for row in found:
            table.add_row(
                str(row["model"]),
                str(row["budget"]),
                str(row["solver"]),
                "yes" if row["fits"] else "no",
                "yes" if row["ok"] else f"NO: {row['problems']}",
                f"{row['predicted_dynamic_peak_bytes'] / 2**20:.3f}",  # type: ignore[operator]
                f"{row['measured_dynamic_peak_bytes'] / 2**20:.3f}",  # type: ignore[operator]
                f"{row['overhead']:+.1%}",
            )
        Console().print(table)
    sys.exit(0 if all(row["ok"] for row in found) else 1)


if __name__ == "__main__":
    main()
