"""Models whose blocks break inside, planned beside the same models in one graph.

    python benchmarks/breaks.py --out docs/results/breaks.md
    python benchmarks/breaks.py --models gpt --shares 60%     # a try

Every block of the model is called between two graph breaks, so that each is a graph, and what is between
them others. Both forms are planned, by the roofline, for the same shares of what the unplanned step allocates
over entry, and for the least peak; the plan of the broken form is verified: gradients, buffers and random
state bit for bit, and the measured peak.
"""

import argparse
import copy
import gc
import os
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import planner
from benchmarks import time_truth
from planner.planfile.atomic_file import write_atomically
from tests import zoo

SHARES = ("60%", "40%", "30%")
BLOCKS = {"gpt": "blocks", "bert": "bert.encoder.layer", "gpt2": "transformer.h"}

Built = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]


def build(name: str) -> Built:
    """A model in training mode, with its arguments."""
    if name == "gpt":
        model, args, kwargs = zoo.build("gpt")
        return model.train(), args, kwargs
    model, inputs, _ = time_truth.build(name)
    return model.train(), (), inputs


def break_blocks(model: torch.nn.Module, blocks: str) -> torch.nn.Module:
    """A copy of a model whose blocks are called between two graph breaks."""
    broken = copy.deepcopy(model)
    for block in broken.get_submodule(blocks).children():
        block.forward = between_breaks(block.forward)
    return broken


def between_breaks(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward with a graph break before and one behind it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        result = forward(*args, **kwargs)
        torch._dynamo.graph_break()
        return result

    return run


def compare(name: str, shares: list[str]) -> list[str]:
    """A model's rows of the table."""
    model, args, kwargs = build(name)
    broken = break_blocks(model, BLOCKS[name])
    steps = [
        planner.prepare(each, args, kwargs, outputs="dropped", costs="roofline", encodings="none")
        for each in (model, broken)
    ]
    nothing = [step.plan("100%", solver="none") for step in steps]
    graphs = len(nothing[1].graphs)
    rows = []
    for share in [*shares, "min"]:
        budget: int | str = share
        if share != "min":
            part = float(share.removesuffix("%")) / 100
            budget = nothing[0].resident.total + int(part * nothing[0].baseline.dynamic_peak_bytes)
        plans = []
        for step in steps:
            try:
                plans.append(step.plan(budget))
            except planner.InfeasibleBudget as error:
                print(f"{name}, {share}: {error}", file=sys.stderr)
                break
        if len(plans) < len(steps):
            rows.append(f"| {name} | {graphs} | {share} | does not fit | | | | | |")
            continue
        one, several = plans
        report = planner.verify(broken, args, kwargs, plan=several, repeats=0)
        whole, parts = (plan.predicted.dynamic_peak_bytes for plan in plans)
        off = report.measured_dynamic_peak_bytes / parts - 1
        rows.append(
            f"| {name} | {graphs} | {share} | {whole / 2**20:.1f} MiB, {one.overhead:+.1%} "
            f"| {parts / 2**20:.1f} MiB, {several.overhead:+.1%} | {parts / whole - 1:+.1%} "
            f"| {100 * (several.overhead - one.overhead):+.1f} | {possible(several)} "
            f"| {'equal' if report.ok else report.problems[0]}, {off:+.2%} |"
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def possible(plan: planner.Plan) -> str:
    """The extra time that every schedule within the plan's budget takes, as far as it is known."""
    gap = plan.solver.gap
    return "" if gap is None else f"{(1 + plan.overhead) / (1 + gap) - 1:+.1%}"


def main() -> None:
    """Compare the chosen models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", choices=list(BLOCKS), default=list(BLOCKS))
    parser.add_argument("--shares", nargs="+", default=list(SHARES), help="of the unplanned step's peak")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    lines = [
        "# Models whose blocks break inside",
        "",
        "Made by `python benchmarks/breaks.py --out docs/results/breaks.md`: six layers, a graph break at",
        "both ends of every block, beside the same model in one graph; costs by the roofline, no masks as",
        "bits. Dynamic peak and extra time of the plans for the same budget, a share of what the unplanned",
        "step allocates over entry. *verified*: gradients, buffers, random state against the unplanned step,",
        "and how far the measured peak is from the predicted. *No less than*: the extra time that is proven",
        "to be needed with these breaks; the solver looked for none for the least peak.",
        "",
        "What passes between two graphs is handed on by Python: no graph can make the results of another",
        "again, so what a block is given is held until its own backward. Of BERT's six layers that is 7",
        "tensors of 1 MiB, of GPT-2's 8, and by exactly these the least peak with breaks is higher. In one",
        "graph they are made again, all of the layers before with them, which takes the time that the least",
        "peak of one graph costs.",
        "",
        f"torch {torch.__version__}, {platform.machine()}.",
        "",
        "| model | graphs | budget | one graph | with breaks | peak | points of time | no less than "
        "| verified |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in options.models:
        lines += compare(name, options.shares)
        torch._dynamo.reset()
        gc.collect()
    text = "\n".join([*lines, ""])
    if options.out is not None:
        write_atomically(options.out, text)
    print(text)


if __name__ == "__main__":
    main()
