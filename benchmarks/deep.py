"""Process seconds of planning models of many layers by regions, and of their first step.

    python benchmarks/deep.py [--layers 8,32,100,200,1000] [--whole 80] [--out docs/results/deep.md]

A Llama's shape, narrow (width 64, 2 x 64 words, no dropout), trained on this machine: each depth in a process
of its own, on one thread. *prepare* captures the step and times its operations, *solve* is a plan for 70 % of
the step's memory, the *first step* compiles. ``--whole`` plans so many layers of Llama-3 70B's shape, on the
meta device, as one graph, for five budgets. Seconds are of processors; other work makes them more.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.one_by_one import ROOT

LAYERS = "8,32,100,200,1000"
SHARES = (0.75, 0.5, 0.25, 0.1)


def by_regions(layers: int) -> dict[str, Any]:
    """One depth, in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import planner

    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=256, use_cache=False,
    )  # fmt: skip
    model, ids = LlamaForCausalLM(config).train(), torch.randint(0, 256, (2, 64))
    step = {"input_ids": ids, "labels": ids}
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


def whole(layers: int) -> dict[str, Any]:
    """Llama-3 70B's shape as one graph, for budgets between the least and what the unplanned step takes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import planner

    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=32000, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
    ids = torch.zeros(4, 4096, dtype=torch.long)
    started = time.process_time()
    prepared = planner.prepare(
        model, kwargs={"input_ids": ids, "labels": ids}, outputs="dropped", costs="roofline"
    )
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


def render(rows: list[dict[str, Any]], one_graph: dict[str, Any] | None) -> str:
    """The page, as Markdown."""
    lines = [
        "| layers | graphs | prepare, s | solve, s | first step, s | second step, s | extra time |",
        "|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {r['layers']:,} | {r['graphs']} | {r['prepare']:.1f} | {r['solve']:.1f} | "
            f"{r['first step']:.1f} | {r['second step']:.2f} | {100 * r['overhead']:+.1f}% |"
            for r in rows
        ),
    ]
    if one_graph is not None:
        lines += [
            "",
            f"{one_graph['layers']} layers of Llama-3 70B's shape as one graph of "
            f"{one_graph['operations']:,} operations: {one_graph['prepare']:.1f} s to prepare, and "
            + ", ".join(f"{one_graph[f'{s:.0%}']:.1f} s for {s:.0%}" for s in SHARES)
            + f" of the way from the least memory to all of it, {one_graph['min']:.1f} s for the least.",
        ]
    return "\n".join(lines)


def _in_a_process(kind: str, layers: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", kind, str(layers)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", default=LAYERS, help="comma-separated")
    parser.add_argument("--whole", type=int, default=80, help="layers planned as one graph; 0 for none")
    parser.add_argument("--out", type=Path, help="also write the tables there")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.one:
        kind, layers = options.one
        print(json.dumps((by_regions if kind == "regions" else whole)(int(layers))))
        return
    rows = []
    for layers in map(int, options.layers.split(",")):
        rows.append(_in_a_process("regions", layers))
        print(rows[-1], file=sys.stderr, flush=True)
    page = render(rows, _in_a_process("whole", options.whole) if options.whole else None)
    print(page)
    if options.out:
        options.out.write_text(page + "\n")


if __name__ == "__main__":
    main()
