"""Every model of the zoo: planned, applied, compared with the unplanned step, and measured.

    python benchmarks/zoo.py [--models gpt,hf_bert] [--families text,layers] [--variant one-sample]
                             [--budgets 70%,min] [--results out/zoo.jsonl] [--again failed|all]
                             [--device cuda] [--backend replay] [--jobs 8] [--out docs/zoo.md]

Each model is captured once and planned for each budget. The plan is applied, a step is run, and loss,
gradients, buffers and random generators are compared bit for bit with the unplanned step's; the peak is
measured by the allocator's own events. A worker process does the models one after the other; one that
crashes or takes too long costs its model only. Every model is a line of JSON in the results, and is not
run again if it is there already, unless asked for. ``--variant`` changes models or
inputs (`benchmarks/zoo_variants.py`); a model that cannot run so without a plan is "unable". With
``--device`` models and inputs are made on the CPU and moved: what makes tensors on the CPU in its forward is
"unable" then.
"""

import argparse
import contextlib
import gc
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any, get_args

import torch
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks.at_peak import at_peak
from benchmarks.one_by_one import ROOT, load, run_each, work
from benchmarks.zoo_variants import VARIANTS, Variant
from planner.choices import BackendChoice
from planner.errors import PlanWarning
from planner.planning.make_plan import make_plan
from planner.planning.options import PlanOptions
from planner.planning.prepare import prepare
from planner.planning.solve import room_bytes
from planner.replay.problem import ReplayProblem
from planner.training_step.step import Step
from planner.user_plan import Plan
from planner.verification.verify import NOT_TWICE
from solvers.registry import SOLVERS
from tests import zoo


def measure(
    name: str,
    budgets: list[str],
    solver: str,
    seconds: float,
    variant: str | None,
    device: str = "cpu",
    backend: BackendChoice = PlanOptions.backend,
) -> dict[str, Any]:
    """One model: what came of capturing it, and of its plan for each budget."""
    row: dict[str, Any] = {"model": name, "family": zoo.family_of(name)}
    started = time.process_time()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PlanWarning)
            change = VARIANTS[variant] if variant else None
            with change.around() if change else contextlib.nullcontext():
                _measure(name, budgets, solver, seconds, change, device, backend, row)
        row["warnings"] = sorted({str(w.message) for w in caught if issubclass(w.category, PlanWarning)})
    except planner.PlannerError as error:
        row["refused"] = f"{type(error).__name__}: {error}"
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:1000]
    row["seconds"] = round(time.process_time() - started, 1)
    torch.compiler.reset()  # what is remembered of this model; or each collection of garbage goes through it
    gc.collect()
    return row


def _measure(
    name: str,
    budgets: list[str],
    solver: str,
    seconds: float,
    change: Variant | None,
    device: str,
    backend: BackendChoice,
    row: dict[str, Any],
) -> None:
    model, args, kwargs = _built(name, device)
    if change is not None or device != "cpu":
        try:
            if change is not None:
                args, kwargs = change.inputs((args, kwargs))
                model = change.module(model)
            zoo.scalar_loss(model(*args, **kwargs)).backward()
        except Exception as error:
            row["unable"] = f"{type(error).__name__}: {error}"[:300]
            return
        model = _built(name, device)[0]
        if change is not None:
            model = change.module(model)
    started = time.process_time()
    step = Step(args, kwargs, zoo.scalar_loss)
    prepared = prepare(model, step, PlanOptions(backend=backend))
    row["capture_seconds"] = round(time.process_time() - started, 2)
    row["budgets"] = {}
    for text in budgets:
        budget = prepared.budget(text)
        room = room_bytes(budget, prepared)
        solution = SOLVERS[solver](prepared.problem.graph, room, time_limit=seconds)
        if not solution.feasible:
            # Below what any plan reaches: the least that can be reached stands for it.
            row["budgets"][text] = {"infeasible_bytes": prepared.resident.total + solution.peak_bytes}
            continue
        plan = Plan.of(make_plan(prepared, solution, budget))
        row["coverage"], row["graphs"] = plan.coverage, len(plan.graphs)
        row["operations"] = sum(len(g.ops) for g in plan.graphs)
        row["notes"] = list(plan.notes)
        report = planner.verify(model, args, kwargs, plan=plan, loss=zoo.scalar_loss, repeats=0)
        row["unplanned"] = {
            "predicted_bytes": report.baseline_predicted_dynamic_peak_bytes,
            "measured_bytes": report.baseline_measured_dynamic_peak_bytes,
        }
        row["budgets"][text] = {
            "predicted_bytes": report.predicted_dynamic_peak_bytes,
            "measured_bytes": report.measured_dynamic_peak_bytes,
            "budget_bytes": plan.target.budget_bytes,
            "resident_bytes": plan.resident.total,
            "overhead": round(plan.overhead, 4),
            "equal": {
                "loss": report.loss_equal,
                "gradients": report.gradients_equal,
                "buffers": report.buffers_equal,
                "generators": report.rng_equal,
            },
            "ok": report.ok,
            "not_twice": never_the_same(report.problems),
            "problems": report.problems[:3],
        }
        if isinstance(prepared.problem, ReplayProblem):
            row["budgets"][text]["at_peak"] = at_peak(prepared, solution.schedule)


def _built(name: str, device: str) -> zoo.Built:
    """A model and its inputs on a device."""
    model, args, kwargs = zoo.build(name)
    if device == "cpu":
        return model, args, kwargs

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    args, kwargs = pytree.tree_map(moved, (args, kwargs))
    return model.to(device), args, kwargs


def verdict(row: dict[str, Any]) -> str:
    """In a word or two: ok, different, over budget, under-predicted, refused, unable, or failed; or "not
    comparable" where steps without a plan differ from each other."""
    for reason, word in (("refused", "refused"), ("unable", "unable"), ("failed", "FAILED")):
        if reason in row:
            return word
    done = [b for b in row["budgets"].values() if "ok" in b]
    if any(_differs(b) for b in done):
        return "DIFFERENT"
    if any(not all(b["equal"].values()) for b in done):
        return "not comparable"
    if any(not b["ok"] for b in done):
        return "OVER BUDGET"
    if any(b["measured_bytes"] > 1.005 * b["predicted_bytes"] for b in done):
        return "under-predicted"
    return "ok"


def never_the_same(problems: list[str]) -> bool:
    """Whether all tensors that differ do so between two steps without a plan, too, and there are some."""
    tensors = [problem for problem in problems if " differs: " in problem]
    return bool(tensors) and all(NOT_TWICE in problem for problem in tensors)


def _differs(budget: dict[str, Any]) -> bool:
    return not all(budget["equal"].values()) and not budget.get("not_twice", False)


def _failed(name: str, why: str) -> dict[str, Any]:
    return {"model": name, "family": zoo.family_of(name), "failed": why}


def _said(row: dict[str, Any]) -> str:
    return f"{row['model']:34} {verdict(row):16} {row.get('seconds', '-')} s"


_COLUMNS = ["model", "captured", "graphs", "operations", "capture s", "unplanned", "eager", "budget"]
_COLUMNS += ["planned", "measured", "extra time", "verdict"]


_INTRODUCTION = """\
Real architectures at toy width with random weights, each planned for its budgets, run, and compared bit for
bit with the unplanned step (loss, gradients, buffers, random generators); the peak is measured by the
allocator's own events. KiB over what is there when the step begins; *unplanned* and *planned* are
predictions, *eager* and *measured* what was measured. *captured* is the coverage: one graph, several graphs
that are planned as one step, or graphs with operations between them that run as written (`partly-
captured`). *capture s* are process seconds; other work on the machine makes them more.\
""".splitlines()


def markdown(rows: dict[str, dict[str, Any]], made: int, given: list[str]) -> str:
    """The results as a page of the documentation, made with options other than the usual ones."""
    kept = [rows[name] for name in zoo.everything() if name in rows]
    verdicts = [verdict(row) for row in kept]
    cells = [b for row in kept for b in row.get("budgets", {}).values() if "ok" in b]
    exact = sum(abs(b["measured_bytes"] - b["predicted_bytes"]) <= 0.01 * b["predicted_bytes"] for b in cells)
    under = max((b["measured_bytes"] / b["predicted_bytes"] - 1 for b in cells), default=0.0)
    coverages = [row.get("coverage", "none") for row in kept]
    planned = sum(coverage != "none" for coverage in coverages)
    by_coverage = ", ".join(
        f"{coverages.count(r)} {r}" for r in ("one-graph", "several-graphs", "partly-captured")
    )
    different = sum(map(_differs, cells))
    alone = sum(not all(b["equal"].values()) for b in cells) - different
    lines = [
        f"# The zoo{': ' if given else ''}{', '.join(option.removeprefix('--') for option in given)}",
        "",
        f"Made by `{' '.join(['python benchmarks/zoo.py', *given]) if given else 'make zoo'}`.",
        *_INTRODUCTION,
        "",
        f"- {len(kept)} models of {made}; {planned} planned operation by operation "
        f"({planned / max(len(kept), 1):.1%}): {by_coverage}",
        "- " + ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts)),
        f"- {len(cells)} plans run: {different} differ from the unplanned step, "
        f"{f'{alone} cannot be compared, as unplanned steps differ from each other, ' if alone else ''}"
        f"{sum(over_budget(b) for b in cells)} over budget, {exact} within 1 % of the prediction "
        f"({exact / max(len(cells), 1):.1%}), none more than {under:.2%} above it",
        "",
    ]
    for family in ("reference", *zoo.FAMILIES):
        members = [row for row in kept if row["family"] == family]
        if not members:
            continue
        lines += [f"## {family.replace('_', ' ')}", "", "| " + " | ".join(_COLUMNS) + " |"]
        lines += ["|" + "---|" * len(_COLUMNS)]
        for row in members:
            lines += _table_rows(row)
        lines.append("")
    notes = [f"- `{row['model']}`: {one_line(note)}" for row in kept for note in _remarks(row)]
    if notes:
        lines += ["## What is said of those that are not one graph", "", *notes, ""]
    return "\n".join(lines)


def over_budget(result: dict[str, Any]) -> bool:
    """Whether a plan's measured peak, with what is resident, is over its budget."""
    budget = result["budget_bytes"]
    return budget is not None and result["resident_bytes"] + result["measured_bytes"] > budget


def _table_rows(row: dict[str, Any]) -> list[str]:
    if not row.get("budgets"):
        return [f"| {row['model']} |" + " |" * (len(_COLUMNS) - 2) + f" {verdict(row)} |"]

    def kib(count: int) -> str:
        return f"{count / 1024:,.1f}"

    before = row.get("unplanned")
    first = [row["model"], row.get("coverage", ""), row.get("graphs", ""), row.get("operations", "")]
    first += [row["capture_seconds"], *([kib(before[k]) for k in before] if before else ["", ""])]
    rows = []
    for text, result in row["budgets"].items():
        if "ok" in result:
            last = [
                kib(result["predicted_bytes"]),
                kib(result["measured_bytes"]),
                f"{result['overhead']:+.1%}",
            ]
        else:
            last = [f"least: {kib(result['infeasible_bytes'])} with what is resident", "", ""]
        cells = [*(first if not rows else [""] * len(first)), text, *last, verdict(row) if not rows else ""]
        rows.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return rows


def _remarks(row: dict[str, Any]) -> list[str]:
    reasons = [row[key] for key in ("refused", "unable", "failed") if key in row]
    return [*reasons, *row.get("notes", ())]


def one_line(text: str) -> str:
    # Where a library lies on this machine is nobody's business.
    shortened = re.sub(r"(?:/[^\s/:]+)*/(?:site-packages|packages|tests)/", "", text)
    shortened = re.sub(r"(?:/[^\s/:]+)+/(?=planner/)", "", shortened)
    return " ".join(shortened.split())[:400]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help="names; all if not given")
    parser.add_argument("--families", help=f"of {', '.join(('reference', *zoo.FAMILIES))}")
    parser.add_argument("--budgets", default="70%,min")
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--solver-seconds", type=float, default=10.0, help="for a model and a budget")
    parser.add_argument("--variant", choices=VARIANTS, help="models or inputs changed so")
    parser.add_argument("--device", default="cpu", help="where models run: cpu, cuda")
    parser.add_argument(
        "--backend", choices=get_args(BackendChoice), default=PlanOptions.backend, help="what follows plans"
    )
    parser.add_argument("--jobs", type=int, default=1, help="models planned side by side")
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "zoo.jsonl")
    parser.add_argument(
        "--again", choices=("none", "failed", "all"), default="none", help="run again what is there"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a model")
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    every = zoo.everything()
    budgets = options.budgets.split(",")
    if options.worker:
        solver, seconds, variant = options.solver, options.solver_seconds, options.variant
        device, backend = options.device, options.backend
        work(options.worker, lambda name: measure(name, budgets, solver, seconds, variant, device, backend))
        return
    names = options.models.split(",") if options.models else list(every)
    if unknown := set(names) - every.keys():
        parser.error(f"the zoo has no {', '.join(sorted(unknown))}")
    families = options.families.split(",") if options.families else None
    known = load(options.results)
    names = [n for n in names if families is None or zoo.family_of(n) in families]
    if options.again != "all":
        fine = {n for n, row in known.items() if options.again == "none" or verdict(row) == "ok"}
        names = [n for n in names if n not in fine]
    given = ["--budgets", options.budgets, "--solver", options.solver]
    given += ["--solver-seconds", str(options.solver_seconds)]
    given += [] if options.variant is None else ["--variant", options.variant]
    given += [] if options.device == "cpu" else ["--device", options.device]
    given += [] if options.backend == PlanOptions.backend else ["--backend", options.backend]
    run_each(__file__, given, names, options.results, options.timeout, _failed, _said, options.jobs)
    if options.out is not None:
        asked = {"budgets": options.budgets, "solver": options.solver, "variant": options.variant}
        asked |= {"device": options.device, "backend": options.backend, "families": options.families}
        given = [f"--{name} {value}" for name, value in asked.items() if value != parser.get_default(name)]
        options.out.write_text(markdown(load(options.results), len(every), given))


if __name__ == "__main__":
    main()
