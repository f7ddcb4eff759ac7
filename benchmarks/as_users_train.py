"""Models trained as their users train them, with plans and without: is everything the same at the end?

    python benchmarks/as_users_train.py [--only maml,sac] [--budget 70%] [--backend replay] [--solver auto]
                                        [--how module] [--timeout 300] [--again] [--json]
                                        [--out docs/results/as-users-train.md]

Each program (`benchmarks/users/`) trains a model for some steps from one seed, with the loss outside of the
module, the optimizers, autocast, clipping, averages and schedules of its domain: once as it is, once by
``planner.step`` (or, with ``--how module``, by ``planner.auto_checkpoint`` around its modules). What both
leave is compared bit for bit: losses, weights, gradients, buffers, the optimizers' states, averages, random
generators. The last forward and backward of each part is measured, and compared with what its plan predicts.
Each program runs in a process of its own, and is a line of JSON in the results; it is not run again where it
is there already, unless asked for.

Exits with 1 where a program is not what it is without a plan, or over a prediction without a word.
"""

import argparse
import importlib.metadata
import json
import random
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks import users
from benchmarks.one_by_one import ROOT, load, run_each, work
from benchmarks.users.training import How, Training
from benchmarks.zoo import one_line

FAULTS = ("wrong", "silent", "failed")
"""Verdicts that should never be."""
WORDS = {
    "equal": "all is as without a plan, and no peak is over its prediction",
    "warned": "all is as without a plan; a peak was over its prediction, and a warning had been given",
    "told": "something differs in its last bits, as a warning had said",
    "unplanned": "some or all of it ran as it is, and a warning said so; all is as without a plan",
    "refused": "an error of planner's said what cannot be planned",
    "wrong": "something differs, and no warning had said that it may",
    "silent": "something differs, a peak is over its prediction, or nothing was planned, without a word",
    "failed": "an error that is not planner's, or no end in time",
    "unable": "it does not run without a plan, or not twice alike",
}
_UNPLANNED = ("runs as it is", "ran without", "without the plan", "without its plan", "runs without")


def measure(name: str, options: dict[str, Any], how: How = "step") -> dict[str, Any]:
    """Train once without and once with plans, and tell what came of it."""
    row: dict[str, Any] = {"model": name, "family": users.family_of(name), "budget": options["budget"]}
    started = time.process_time()
    first = Training(False, options)
    try:
        without = left_by(name, first)
    except Exception as error:
        return row | {"unable": f"{type(error).__name__}: {error}"}
    row["unplanned_seconds"] = round(time.process_time() - started, 1)
    eager = Training(False, options, how, dict(first.calls))
    if alone := differences(without, left_by(name, eager)):
        return row | {"unable": f"two runs without a plan differ: {alone[:3]}"}
    started = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", planner.PlanWarning)
        try:
            planned = Training(True, options, how, dict(first.calls))
            try:
                by_plan = left_by(name, planned)
            except planner.InfeasibleBudget:
                row["budget"] = "min"
                planned = Training(True, options | {"budget": "min"}, how, dict(first.calls))
                by_plan = left_by(name, planned)
        except planner.PlannerError as error:
            row["refused"] = f"{type(error).__name__}: {error}"
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:1000]
            row["traceback"] = traceback.format_exc()[-3000:]
    row["planned_seconds"] = round(time.process_time() - started, 1)
    said = (str(w.message) for w in caught if issubclass(w.category, planner.PlanWarning))
    row["warnings"] = list(dict.fromkeys(said))
    if "refused" in row or "failed" in row:
        return row
    row["differs"] = differences(without, by_plan)
    row["parts"] = {}
    for part in first.calls:
        predicted, before = planned.predictions.get(part) or (None, None)
        row["parts"][part] = {
            "plan": part in planned.parts_with_plan,
            "before": before,
            "unplanned": eager.peaks[part],
            "predicted": predicted,
            "limit": planned.limits.get(part),
            "measured": planned.peaks.get(part),
        }
    return row


def left_by(name: str, training: Training) -> dict[str, Any]:
    """All that a program leaves, by name."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    left = dict(_leaves("", users.PROGRAMS[name](training)))
    left["torch's generator"] = torch.get_rng_state()
    left["Python's generator"] = random.getstate()
    left["numpy's generator"] = [str(part) for part in np.random.get_state()]
    return left


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        for name, parameter in value.named_parameters(remove_duplicate=False):
            yield f"{place}.{name}", parameter.detach().clone()
            yield f"{place}.{name}.grad", None if parameter.grad is None else parameter.grad.clone()
        for name, buffer in value.named_buffers(remove_duplicate=False):
            yield f"{place}.{name}", buffer.clone()
    elif isinstance(value, torch.optim.Optimizer):
        yield from _leaves(place, value.state_dict())
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(f"{place}.{key}" if place else str(key), part)
    elif isinstance(value, list | tuple):
        for key, part in enumerate(value):
            yield from _leaves(f"{place}[{key}]", part)
    else:
        yield place, value.detach().clone() if isinstance(value, torch.Tensor) else value


def differences(without: dict[str, Any], by_plan: dict[str, Any]) -> list[str]:
    """What is not the same, in words."""
    found = [f"{name} is there on one side only" for name in without.keys() ^ by_plan.keys()]
    for name in without.keys() & by_plan.keys():
        ours, theirs = by_plan[name], without[name]
        if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            same = type(ours) is type(theirs) and ours == theirs
            much = ""
        else:
            same = (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            much = f": {tuple(ours.shape)}, not {tuple(theirs.shape)}" if not same else ""
            if same and not (same := bool(torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True))):
                much = f" by {(ours - theirs).abs().max().item():.3g} of {theirs.abs().max().item():.3g}"
        if not same:
            found.append(f"{name} differs{much}")
    return sorted(found)


def verdict(row: dict[str, Any]) -> str:
    """In a word, one of ``WORDS``."""
    for word in ("unable", "failed", "refused"):
        if word in row:
            return word
    said = bool(row["warnings"])
    if row["differs"]:
        told = any("last bits" in warning for warning in row["warnings"])
        return "told" if told else "wrong" if said else "silent"
    if any(
        part["predicted"] is not None and part["measured"] > part["limit"] for part in row["parts"].values()
    ):
        return "warned" if said else "silent"
    if any(text in warning for warning in row["warnings"] for text in _UNPLANNED):
        return "unplanned"
    return "equal" if all(part["plan"] for part in row["parts"].values()) else "silent"


def _said(row: dict[str, Any]) -> str:
    seconds = f"{row.get('unplanned_seconds', '-')} s, planned {row.get('planned_seconds', '-')} s"
    lines = [f"{row['model']:24} {verdict(row):10} {seconds}"]
    lines += [f"    {line}" for line in row.get("differs", [])[:3]]
    lines += [f"    {part}: {_bytes(found)}" for part, found in row.get("parts", {}).items()]
    lines += [f"    {row[key][:600]}" for key in ("unable", "failed", "refused") if key in row]
    return "\n".join(lines + [f"    warning: {text[:600]}" for text in row.get("warnings", [])])


def _bytes(part: dict[str, Any]) -> str:
    count = {
        name: "-" if value is None else f"{value:,}"
        for name, value in part.items()
        if name not in ("plan", "limit")
    }
    return (
        f"unplanned {count['before']} predicted, {count['unplanned']} measured; "
        f"planned {count['predicted']} predicted, {count['measured']} measured"
    )


_INTRODUCTION = """\
Own small implementations of what many domains train, each for a few steps from one seed, without a plan and
by `planner.step` or `planner.auto_checkpoint`: with the loss outside of the module, and the optimizers,
autocast, clipping, averages and schedules of its domain. What both leave is compared bit for bit: losses,
weights, gradients, buffers, optimizers' states, random generators. Peaks are of the last forward and
backward of a part, in KiB over what is there before; where none is predicted, the part has several planned
calls, or a loss that the plan does not know. A plan runs other inputs too where they fit its budget: there
the budget is the limit, and predictions are of the inputs that were planned.\
""".splitlines()


def markdown(rows: list[dict[str, Any]], command: str) -> str:
    """The results as a page of the documentation."""
    verdicts = [verdict(row) for row in rows]
    parts = [part for row in rows for part in row.get("parts", {}).values() if part["predicted"] is not None]
    exact = sum(part["measured"] == part["predicted"] for part in parts)
    lines = [
        "# Trained as users train",
        "",
        f"Made by `{command}`, with PyTorch {importlib.metadata.version('torch').partition('+')[0]}.",
        *_INTRODUCTION,
        "",
        *(f"- {verdicts.count(word)} {word}: {WORDS[word]}" for word in WORDS if word in verdicts),
        f"- {exact} of {len(parts)} peaks are the predicted ones to the byte",
        "",
        "| program | of | budget | part | unplanned | measured | planned | measured | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        first = [row["model"], row["family"].replace("_", " "), row.get("budget", "")]
        for name, part in row.get("parts", {}).items() or [("", {})]:
            cells = [_kib(part.get(key)) for key in ("before", "unplanned", "predicted", "measured")]
            lines.append("| " + " | ".join([*first, name, *cells, verdict(row) if first[0] else ""]) + " |")
            first = ["", "", ""]
    notes = [f"- `{row['model']}`: {note}" for row in rows for note in _notes(row)]
    return "\n".join([*lines, "", *(["## What was said", "", *notes, ""] if notes else [])])


def _kib(count: int | None) -> str:
    return "" if count is None else f"{count / 1024:,.1f}"


def _notes(row: dict[str, Any]) -> list[str]:
    reasons = [row[key] for key in ("unable", "failed", "refused") if key in row]
    return [one_line(text) for text in (*reasons, *row.get("differs", [])[:3], *row.get("warnings", []))]


def _failed(name: str, why: str) -> dict[str, Any]:
    return {"model": name, "family": users.family_of(name), "failed": why}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = users.everything()
    parser.add_argument("--only", help="names of programs; all if not given")
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--backend", default="auto", help="what follows plans")
    parser.add_argument("--how", choices=get_args(How), default="step", help="what is planned")
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a program")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "as-users-train.jsonl")
    parser.add_argument("--again", action="store_true", help="run again what is in the results already")
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = list(every) if options.only is None else options.only.split(",")
    if unknown := set(names) - set(every):
        parser.error(f"no program {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    given = [
        "--budget",
        options.budget,
        "--backend",
        options.backend,
        "--solver",
        options.solver,
        "--how",
        options.how,
    ]
    wanted = {"budget": options.budget, "backend": options.backend, "solver": options.solver}
    wanted["costs"] = "roofline"  # the same plans everywhere
    if options.worker:
        work(options.worker, lambda name: measure(name, wanted, options.how))
        return
    there = {} if options.again else load(options.results)
    for name in names:
        if name not in there:
            run_each(__file__, given, [name], options.results, options.timeout, _failed, _said)
    found = load(options.results)
    rows = [found[name] for name in names]
    if options.json:
        json.dump([row | {"verdict": verdict(row)} for row in rows], sys.stdout, indent=1)
    if options.out is not None:
        command = "python benchmarks/as_users_train.py"
        changed = {
            "budget": options.budget,
            "backend": options.backend,
            "how": options.how,
            "solver": options.solver,
            "only": options.only,
        }
        command += "".join(f" --{k} {v}" for k, v in changed.items() if v != parser.get_default(k))
        options.out.write_text(markdown(rows, command))
    sys.exit(any(verdict(row) in FAULTS for row in rows))


if __name__ == "__main__":
    main()
