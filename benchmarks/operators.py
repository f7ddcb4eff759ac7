"""Every operator and module of PyTorch: planned for its least peak, run, compared with the unplanned step.

    python benchmarks/operators.py [--forms float32,bfloat16] [--kinds train,eval] [--samples 2]
                                   [--cases float32/operator/addmm] [--together 12] [--again failed]
                                   [--device cuda] [--backend replay] [--jobs 8]
                                   [--results out/operators.jsonl] [--out docs/results/operators.md]

Samples are PyTorch's own, from the database of its tests: of operators out of place and in place, of
modules in train mode and, where that differs, in evaluation mode. Some cases together are one step; where
anything is wrong with that, each case is, and then each of its samples. Loss, gradients, buffers and random
generators are compared bit for bit, and the measured peak with the predicted one. A worker process does the
cases one after the other; one that crashes or takes too long costs its case only. Every case is a line of
JSON in the results, and is not run again if it is there already, unless asked for. Forms are the precisions,
and `autocast`: single precision inside `torch.autocast("cpu", torch.bfloat16)`.
"""

import argparse
import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks.one_by_one import ROOT, load, run_each, work
from benchmarks.operator_cases import FORMS, KINDS, Sample, names, runs, samples, step_of
from planner.choices import BackendChoice
from planner.errors import PlanWarning
from planner.planning.options import PlanOptions

VERDICTS = ("ok", "measured less", "OVER", "DIFFERENT", "told", "refused", "FAILED", "unable")


def measure(
    cases: Sequence[str], most: int, device: str, backend: BackendChoice = PlanOptions.backend
) -> list[dict[str, Any]]:
    """Some cases of a form in one step; where that is not well, each by itself, and each of its samples."""
    started = time.process_time()
    rows: list[dict[str, Any]] = [{"model": case} for case in cases]
    form = cases[0].split("/")[0]
    chosen: list[list[Sample]] = []
    for row in rows:
        try:
            found = samples(row["model"], most, device)
            reasons = [runs(sample, form) for sample in found]
        except Exception as error:  # of PyTorch's own tests
            row["samples"], row["without"] = 0, [f"{type(error).__name__}: {error}"[:300]]
            chosen.append([])
            continue
        chosen.append([sample for sample, reason in zip(found, reasons, strict=True) if reason is None])
        row["samples"], row["without"] = len(chosen[-1]), sorted({r[:300] for r in reasons if r is not None})
    every = [sample for some in chosen for sample in some]
    result = attempt(every, form, backend) if every else {}
    for row, some in zip(rows, chosen, strict=True):
        if not some:
            row["results"] = []
        elif verdict_of(result) == "ok" or len(every) == 1:
            row["results"], row["with"] = [result], list(cases)
        elif len(cases) > 1:
            row.update(measure([row["model"]], most, device, backend)[0])
        else:
            row["together"], row["results"] = result, [attempt([one], form, backend) for one in some]
    for row in rows:
        row["seconds"] = round((time.process_time() - started) / len(rows), 1)
    return rows


def attempt(
    chosen: Sequence[Sample], form: str, backend: BackendChoice = PlanOptions.backend
) -> dict[str, Any]:
    """Plans the step of some samples, runs it and compares."""
    row: dict[str, Any] = {}
    model, args = step_of(chosen, form)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        try:
            plan = planner.plan(
                model,
                args=args,
                budget="min",
                costs="roofline",
                time_limit=1.0,
                training=model.training,
                backend=backend,
            )
            report = planner.verify(model, args=args, plan=plan, repeats=0)
            row["coverage"], row["problems"] = plan.coverage, report.problems[:4]
            equal = (report.loss_equal, report.gradients_equal, report.buffers_equal, report.rng_equal)
            row["equal"] = all(equal)
            row["predicted_bytes"] = report.predicted_dynamic_peak_bytes
            row["measured_bytes"] = report.measured_dynamic_peak_bytes
            row["unplanned_predicted_bytes"] = report.baseline_predicted_dynamic_peak_bytes
            row["unplanned_measured_bytes"] = report.baseline_measured_dynamic_peak_bytes
        except planner.PlannerError as error:
            row["refused"] = f"{type(error).__name__}: {error}"[:1000]
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:1000]
    row["warnings"] = sorted({str(w.message)[:500] for w in caught if issubclass(w.category, PlanWarning)})
    torch.compiler.reset()
    gc.collect()
    return row


def groups(cases: Sequence[str], most: int) -> list[list[str]]:
    """Cases that can be one step: neighbours of one form, and of one mode."""
    found: list[list[str]] = []
    for case in sorted(cases, key=_mode):
        if not found or len(found[-1]) == most or _mode(found[-1][0]) != _mode(case):
            found.append([])
        found[-1].append(case)
    return found


def _mode(case: str) -> tuple[str, bool]:
    form, kind, _ = case.split("/")
    return form, kind == "eval"


def verdict_of(result: dict[str, Any]) -> str:
    """In a word or two, of one step."""
    if "refused" in result:
        return "refused"
    if "failed" in result:
        return "FAILED"
    if not result["equal"]:
        return "told" if result["warnings"] else "DIFFERENT"
    if result["measured_bytes"] > result["predicted_bytes"]:
        return "told" if result["warnings"] else "OVER"
    return "ok" if result["measured_bytes"] == result["predicted_bytes"] else "measured less"


def verdict(row: dict[str, Any]) -> str:
    """The worst of a case's steps."""
    if "unable" in row or not row.get("results"):
        return "FAILED" if "failed" in row else "unable"
    worst = ("ok", "measured less", "told", "refused", "FAILED", "OVER", "DIFFERENT")
    return max((verdict_of(result) for result in row["results"]), key=worst.index)


def _failed(case: str, why: str) -> dict[str, Any]:
    return {"model": case, "failed": why}


def _said(row: dict[str, Any]) -> str:
    return f"{row['model']:60} {verdict(row):14} {row.get('seconds', '-')} s"


_INTRODUCTION = """\
PyTorch's own samples of every operator that has a gradient, and of its modules: planned for the least peak,
run, and compared bit for bit with the unplanned step (loss, gradients, buffers, random generators); the peak
is measured by the allocator's own events. *autocast* is single precision inside
`torch.autocast("cpu", torch.bfloat16)`. A dozen cases are one step where that is well, else each sample is.

- *ok*: equal, and the measured peak is the predicted one to the byte; *measured less*: equal, in less memory.
- *OVER*: equal, and more was measured than predicted; *DIFFERENT*: something is not equal.
- *told*: over or different, and a `PlanWarning` said so.
- *refused*: a clear error instead of a plan. *FAILED*: any other error.
- *unable*: cannot be trained so without a plan either.\
""".splitlines()


def markdown(rows: dict[str, dict[str, Any]], made: int, backend: BackendChoice) -> str:
    """The results as a page of the documentation."""
    command = "make operators" if backend == "auto" else f"python benchmarks/operators.py --backend {backend}"
    lines = ["# Operators and modules of PyTorch", "", f"Made by `{command}`.", *_INTRODUCTION, ""]
    single = [row for name, row in rows.items() if row.get("with", [name])[0] == name]
    every = [result for row in single for result in row.get("results", ()) if "equal" in result]
    lines += [
        f"{len(rows):,} cases of {made:,}, {sum(row.get('samples', 0) for row in rows.values()):,} samples, "
        f"PyTorch {torch.__version__}.",
        "",
        "| form | kind | cases | samples | " + " | ".join(VERDICTS) + " |",
        "|---|---|" + "---:|" * (2 + len(VERDICTS)),
    ]
    for form in FORMS:
        for kind in KINDS:
            some = [row for name, row in rows.items() if name.startswith(f"{form}/{kind}/")]
            if some:
                counts = Counter(map(verdict, some))
                cells = [form, kind, len(some), sum(row.get("samples", 0) for row in some)]
                cells += [counts[v] or "" for v in VERDICTS]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    exact = sum(r["unplanned_measured_bytes"] == r["unplanned_predicted_bytes"] for r in every)
    over = sum(r["unplanned_measured_bytes"] > r["unplanned_predicted_bytes"] for r in every)
    lines += [
        "",
        f"{len(every):,} steps were run. The unplanned peak was predicted to the byte for {exact:,}, and too "
        f"low for {over:,}.",
        "",
    ]
    for word in VERDICTS[1:]:
        such = [name for name in sorted(rows) if verdict(rows[name]) == word]
        if such:
            lines += [f"## {word}", "", *(f"- `{name}`: {_why(rows[name], word)}" for name in such), ""]
    return "\n".join(lines)


def _why(row: dict[str, Any], word: str) -> str:
    if word == "unable" or "failed" in row:
        reasons = row.get("without") or ["there are no samples"]
        return _one_line(row.get("failed") or row.get("unable") or "; ".join(reasons))
    found = [result for result in row["results"] if verdict_of(result) == word]
    share = f"{len(found)} of {len(row['results'])}: " if len(row["results"]) > 1 else ""
    first = found[0]
    if "refused" in first or "failed" in first:
        return share + _one_line(first.get("refused") or first["failed"])
    said = list(first["problems"])
    if first["measured_bytes"] != first["predicted_bytes"]:
        said.append(f"measured {first['measured_bytes']:,} bytes of {first['predicted_bytes']:,} predicted")
    said += [f"warned: {text}" for text in first["warnings"]]
    return share + _one_line("; ".join(said))


def _one_line(text: str) -> str:
    # Brackets and bars of an error's text would be links and columns.
    shortened = text.translate(str.maketrans("|[]<>", "/()()"))
    return " ".join(shortened.split())[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", default=",".join(FORMS), help=f"of {', '.join(FORMS)}")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--cases", help="names, as float32/operator/addmm; all if not given")
    parser.add_argument("--samples", type=int, default=2, help="of a case, at most")
    parser.add_argument("--together", type=int, default=12, help="cases in one step, where that is well")
    parser.add_argument("--device", default="cpu", help="where they run: cpu, cuda")
    parser.add_argument(
        "--backend", choices=get_args(BackendChoice), default=PlanOptions.backend, help="what follows plans"
    )
    parser.add_argument("--jobs", type=int, default=1, help="worker processes side by side")
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "operators.jsonl")
    parser.add_argument(
        "--again", choices=("none", "failed", "all"), default="none", help="run again what is there"
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for what is one step")
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        asked = options.worker.split(",")
        made = (
            row
            for some in groups(asked, options.together)
            for row in measure(some, options.samples, options.device, options.backend)
        )
        work(options.worker, lambda _: next(made))
        return
    every = {form: names(form, options.device) for form in FORMS}
    known = load(options.results)
    asked = set(options.cases.split(",")) if options.cases else None
    if asked is not None and (unknown := asked - {name for some in every.values() for name in some}):
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    for form in options.forms.split(","):  # a worker for each: the names of all are too long for a command
        chosen = [n for n in every[form] if n.split("/")[1] in options.kinds.split(",")]
        chosen = [n for n in chosen if asked is None or n in asked]
        if options.again != "all":
            fine = {
                n for n, row in known.items() if options.again == "none" or verdict(row) in ("ok", "unable")
            }
            chosen = [n for n in chosen if n not in fine]
        chosen = [n for some in groups(chosen, 1) for n in some]
        given = ["--samples", str(options.samples), "--together", str(options.together)]
        given += ["--device", options.device, "--backend", options.backend]
        run_each(__file__, given, chosen, options.results, options.timeout, _failed, _said, options.jobs)
    if options.out is not None:
        rows = load(options.results)
        kept = {name: rows[name] for some in every.values() for name in some if name in rows}
        options.out.write_text(markdown(kept, sum(map(len, every.values())), options.backend))


if __name__ == "__main__":
    main()
