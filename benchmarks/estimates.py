"""Every model of the zoo: what ``planner.estimate`` says that its step takes, and what it takes.

    python benchmarks/estimates.py --out docs/results/estimates.md
    python benchmarks/estimates.py --models gpt,hf_bert

Of each model three steps are estimated and measured, where it has them: as it is, with
``torch.utils.checkpoint`` around the modules that ``suggest`` names (up to three), and with what Hugging
Face's ``gradient_checkpointing_enable()`` does. Memory is measured by the allocator's own events, in bytes
over what is there when the step begins. A worker process does the models; every model is a line of JSON in
the results, and is not run again if it is there already.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks.one_by_one import ROOT, load, run_each, work
from planner.estimation.checkpointed import enable, wrap_in_checkpoints
from planner.estimation.suggest import estimate_suggested
from planner.planfile.atomic_file import write_atomically
from planner.training_step.generators import GeneratorStates
from planner.training_step.step import Step
from planner.verification.measure import measure_peak
from tests import zoo

PROMISED = {"as it is": 0.005, "suggested": 0.02, "its own": 0.02}
"""How far from the estimate each may be."""
MODULES = 3


def measure(name: str) -> dict[str, Any]:
    """A model's steps: bytes estimated and measured, each; or why there are none."""
    row: dict[str, Any] = {"model": name, "family": zoo.family_of(name)}
    started = time.process_time()
    try:
        model, args, kwargs = zoo.build(name)
        drawn = GeneratorStates.now()  # random numbers may decide which layers run
        found = estimate_suggested(model, args, kwargs, k=MODULES, loss=zoo.scalar_loss)
        estimated = {"as it is": found.dynamic_peak_bytes}
        changes: dict[str, Callable[[torch.nn.Module], None]] = {"as it is": lambda module: None}
        if found.checkpointed is not None:
            row["modules"] = list(found.checkpointed.modules)
            estimated["suggested"] = found.checkpointed.dynamic_peak_bytes
            changes["suggested"] = wrap_in_checkpoints(found.checkpointed.modules)
        if found.gradient_checkpointing is not None:
            estimated["its own"] = found.gradient_checkpointing.dynamic_peak_bytes
            changes["its own"] = enable
        row["steps"] = {}
        for what, change in changes.items():
            row["steps"][what] = {"estimated": estimated[what], **_measured(name, change, drawn)}
    except planner.PlannerError as error:
        row["refused"] = f"{type(error).__name__}: {error}"
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:1000]
    row["seconds"] = round(time.process_time() - started, 1)
    torch.compiler.reset()
    gc.collect()
    return row


def _measured(name: str, change: Callable[[torch.nn.Module], None], drawn: GeneratorStates) -> dict[str, Any]:
    model, args, kwargs = zoo.build(name)
    change(model)
    step = Step(args, kwargs, zoo.scalar_loss)
    try:
        drawn.restore()
        step.run(model)
        model.zero_grad()
        drawn.restore()
        return {"measured": measure_peak(lambda: step.run(model), "cpu").peak_bytes}
    except Exception as error:  # some models do not run with checkpoints
        return {"unable": f"{type(error).__name__}: {error}"[:300]}


def off(step: dict[str, Any]) -> float:
    """How far what was measured is from the estimate, as a share of the estimate."""
    return float(step["measured"] / max(step["estimated"], 1) - 1)


def verdict(row: dict[str, Any]) -> str:
    """In a word or two."""
    if "steps" not in row:
        return "refused" if "refused" in row else "FAILED"
    measured = {what: step for what, step in row["steps"].items() if "measured" in step}
    bad = [what for what, step in measured.items() if abs(off(step)) > PROMISED[what]]
    return f"OFF: {', '.join(bad)}" if bad else "ok"


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """The results as a page of the documentation."""
    kept = [rows[name] for name in zoo.everything() if name in rows]
    lines = [
        "# Memory estimated and measured",
        "",
        "Made by `python benchmarks/estimates.py --out docs/results/estimates.md`: each model of the zoo as",
        f"it is, with `torch.utils.checkpoint` around up to {MODULES} modules `planner.suggest` names, and",
        "with its own `gradient_checkpointing_enable()` where it has one. Bytes over what is there when the",
        "step begins; the figures measured are the allocator's own events. The table has what is not exact.",
        "",
    ]
    for what, promised in PROMISED.items():
        steps = [row["steps"][what] for row in kept if what in row.get("steps", {})]
        measured = [abs(off(step)) for step in steps if "measured" in step]
        lines.append(
            f"- {what}: {len(measured)} steps; {sum(o == 0 for o in measured)} exact to the byte, "
            f"{sum(o <= promised for o in measured)} within {promised:.1%}; median "
            f"{statistics.median(measured or [0]):.2%} off, most {max(measured, default=0):.2%}"
            + (f"; {len(steps) - len(measured)} cannot run so" if len(steps) > len(measured) else "")
        )
    refused = [row for row in kept if "steps" not in row]
    every = len(zoo.everything())
    lines += [f"- {len(kept)} models of {every}; {len(refused)} without an estimate", ""]
    lines += ["| model | step | estimated | measured | off |", "|---|---|---|---|---|"]
    for row in kept:
        for what, step in row.get("steps", {}).items():
            cells = [row["model"], what, f"{step['estimated']:,}"]
            if "measured" in step and off(step):
                cells += [f"{step['measured']:,}", f"{off(step):+.2%}"]
            elif "unable" in step:
                cells += ["cannot run so", ""]
            else:
                continue
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- `{row['model']}`: {_reason(row)}" for row in refused), ""]
    return "\n".join(lines)


def _reason(row: dict[str, Any]) -> str:
    return " ".join(str(row.get("refused") or row.get("failed")).split())[:300]


def _failed(name: str, why: str) -> dict[str, Any]:
    return {"model": name, "family": zoo.family_of(name), "failed": why}


def _said(row: dict[str, Any]) -> str:
    return f"{row['model']:34} {verdict(row):24} {row.get('seconds', '-')} s"


def main() -> None:
    """Estimate and measure the chosen models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", help="names; all if not given")
    parser.add_argument("--families", help=f"of {', '.join(('reference', *zoo.FAMILIES))}")
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "estimates.jsonl")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a model")
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    every = zoo.everything()
    if options.worker:
        work(options.worker, measure)
        return
    names = options.models.split(",") if options.models else list(every)
    if unknown := set(names) - every.keys():
        parser.error(f"the zoo has no {', '.join(sorted(unknown))}")
    families = options.families.split(",") if options.families else (*zoo.FAMILIES, "reference")
    known = load(options.results)
    names = [n for n in names if zoo.family_of(n) in families and (options.models or n not in known)]
    run_each(__file__, [], names, options.results, options.timeout, _failed, _said)
    if options.out is not None:
        write_atomically(options.out, markdown(load(options.results)))


if __name__ == "__main__":
    main()
