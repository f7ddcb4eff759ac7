"""Process seconds of planning models of many layers by regions, and of their first step.

    python benchmarks/deep.py [--layers 8,32,100,200,1000] [--repeats 5] [--large 80]
                              [--out docs/results/deep.md]

A Llama's shape, narrow (width 64, 2 x 64 words, no dropout), trained on this machine: each depth in a process
of its own, on one thread, all depths in turn. *prepare* captures the step and times its operations, *solve*
is a plan for 70 % of the memory, the *first step* compiles. ``--large`` plans so many layers of Llama-3
70B's shape, on the meta device, as one graph and by regions, for five budgets. Seconds are of processors, and
medians of the repeats.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.one_by_one import ROOT

LAYERS = "8,32,100,200,1000"
SHARES = (0.75, 0.5, 0.25, 0.1)
INTRODUCTION = """# Models of many layers

Made by `python benchmarks/deep.py`: a Llama of width 64, planned by regions (`regions="auto"`) for 70 % of
its step's memory, and trained, on one thread. Seconds are of processors, medians of {repeats} processes each;
other work on the machine makes them more, by a third and over. Seconds of operations that were measured
before are remembered: without them the first plan of 8 layers takes half a second more, that of 200 one and
a half, since as much memory is read before each run as the step holds, as far as it fits into the cache.

Layers that are alike are traced once. What grows with their number is that the step is recorded, the model
copied and looked through, that Dynamo's guards look at each module, and the problem, which has a row for each
operation. Once in a while Python goes through all objects of the process. That takes a third of a second with
200 layers, of whose 700,000 objects 560,000 are libraries', and falls into one column or another.
"""
LARGE = """
On the meta device, with times by the roofline: seconds to prepare, and to solve for shares of the way from
the least memory to what the unplanned step takes, and for the least.
"""


def llama(layers: int, **shape: int) -> Any:
    """A Llama with random weights, trained on one thread."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    config = LlamaConfig(num_hidden_layers=layers, use_cache=False, **shape)  # type: ignore[arg-type]
    return LlamaForCausalLM(config).train()


def narrow_step(layers: int) -> tuple[Any, dict[str, Any]]:
    """A Llama of the narrow shape, and the arguments of its step."""
    import torch

    model = llama(
        layers,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
    )
    ids = torch.randint(0, 256, (2, 64))
    return model, {"input_ids": ids, "labels": ids}


def narrow(layers: int) -> dict[str, Any]:
    """One depth of the narrow shape, by regions, in this process."""
    import planner

    model, step = narrow_step(layers)
    started = time.process_time()
    prepared = planner.prepare(model, kwargs=step, outputs="dropped", regions="auto")
    captured = time.process_time()
    plan = prepared.plan("70%")
    solved = time.process_time()
    plan.apply(model)
    model(**step).loss.backward()
    compiled = time.process_time()
    model.zero_grad(set_to_none=True)
    model(**step).loss.backward()
    return {
        "layers": layers,
        "prepare": captured - started,
        "solve": solved - captured,
        "first step": compiled - solved,
        "second step": time.process_time() - compiled,
        "graphs": len(plan.graphs),
        "overhead": plan.overhead,
    }


def large(layers: int, regions: str | None) -> dict[str, Any]:
    """Llama-3 70B's shape, for budgets between the least and what the unplanned step takes."""
    import torch

    import planner

    with torch.device("meta"):
        model = llama(
            layers,
            hidden_size=8192,
            intermediate_size=28672,
            num_attention_heads=64,
            num_key_value_heads=8,
            vocab_size=32000,
        )
    ids = torch.zeros(4, 4096, dtype=torch.long)
    step = {"input_ids": ids, "labels": ids}
    started = time.process_time()
    prepared = planner.prepare(model, kwargs=step, outputs="dropped", costs="roofline", regions=regions)
    seconds = {"prepare": time.process_time() - started}
    everything = prepared.plan("100%", solver="none")
    started = time.process_time()
    least = prepared.plan("min").predicted.peak_bytes
    seconds["min"] = time.process_time() - started
    for share in SHARES:
        started = time.process_time()
        prepared.plan(int(least + share * (everything.predicted.peak_bytes - least)))
        seconds[f"{share:.0%}"] = time.process_time() - started
    return {"layers": layers, "operations": sum(len(g.ops) for g in everything.graphs), **seconds}


def render(rows: list[dict[str, Any]], shapes: dict[str, dict[str, Any]], repeats: int) -> str:
    """The page, as Markdown."""
    lines = [
        INTRODUCTION.format(repeats=repeats),
        "| layers | graphs | prepare, s | solve, s | first step, s | second step, s | extra time |",
        "|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {r['layers']:,} | {r['graphs']} | {r['prepare']:.2f} | {r['solve']:.2f} | "
            f"{r['first step']:.2f} | {r['second step']:.2f} | {100 * r['overhead']:+.1f}% |"
            for r in rows
        ),
    ]
    least, *more = rows
    for most in more:
        planned, first = (_ratio(most, least, kind) for kind in (("prepare", "solve"), ("first step",)))
        lines += [
            "",
            f"{most['layers']:,} layers take {planned:.2f} times as long to plan as {least['layers']}, and "
            f"{first:.2f} times in what the first step takes more than the second.",
        ]
    if shapes:
        columns = [*(f"{share:.0%}" for share in SHARES), "min"]
        lines += [
            LARGE,
            f"| layers of Llama-3 70B's shape | operations | prepare, s | {', s | '.join(columns)}, s |",
            f"|---|---:|---:|{'---:|' * len(columns)}",
            *(
                f"| {found['layers']}, {how} | {found['operations']:,} | {found['prepare']:.1f} | "
                + " | ".join(f"{found[c]:.1f}" for c in columns)
                + " |"
                for how, found in shapes.items()
            ),
        ]
    return "\n".join(lines) + "\n"


def _ratio(row: dict[str, Any], to: dict[str, Any], kinds: Sequence[str]) -> float:
    """How much longer it takes with the layers of one row than with those of another."""
    each = [sum(r[k] - (r["second step"] if k == "first step" else 0) for k in kinds) for r in (row, to)]
    return float(each[0] / each[1])


def _in_a_process(kind: str, layers: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", kind, str(layers)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found, file=sys.stderr, flush=True)
    return found


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "narrow": narrow,
    "as one graph": partial(large, regions=None),
    "by regions": partial(large, regions="auto"),
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", default=LAYERS, help="comma-separated")
    parser.add_argument("--repeats", type=int, default=5, help="processes for each depth")
    parser.add_argument("--large", type=int, default=80, help="layers of Llama-3 70B's shape; 0 for none")
    parser.add_argument("--out", type=Path, help="also write the page there")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.one:
        kind, layers = options.one
        print(json.dumps(KINDS[kind](int(layers))))
        return
    depths = [int(layers) for layers in options.layers.split(",")]
    turns = [[_in_a_process("narrow", depth) for depth in depths] for _ in range(options.repeats)]
    rows = [
        {what: statistics.median(row[what] for row in same) for what in same[0]}
        for same in zip(*turns, strict=True)
    ]
    ways = [kind for kind in KINDS if kind != "narrow"] if options.large else []
    page = render(rows, {kind: _in_a_process(kind, options.large) for kind in ways}, options.repeats)
    print(page, end="")
    if options.out:
        options.out.write_text(page)


if __name__ == "__main__":
    main()
