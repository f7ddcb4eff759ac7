"""What one rank of a cluster takes to train Llama-3, without the cluster: FSDP2 on 8 and 64 H100.

    python benchmarks/scale.py [--cases 8B-8,70B-64] [--out FOLDER] [--render]
    python benchmarks/scale.py --cases 8B-8 --split loss auto --lengths 110592 131072

Models are on the meta device, so that no weight is in memory; everything is predicted. Rows are written as
JSON, one file each. With --split a table is printed of sequences of such lengths, with losses (and MLPs) in
pieces.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from planner.batch.interpolate import SizedSteps
from planner.estimation.checkpointed import with_checkpoints
from planner.estimation.estimate import prepared_step
from planner.planning.options import SplitWhat, StepKeywords
from planner.planning.solve import plan_prepared

BUDGET, SEQUENCE, UNIT = "80GB", 8192, 256
BLOCKS = "model.layers.*"
SHAPES: dict[str, dict[str, int]] = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8},
}
"""As in the models' own configurations; "tiny" is for trying this file."""
MIXED = "param_dtype=bfloat16,reduce_dtype=float32"
CASES = {
    "8B-8": ("8B", f"fsdp2:8,{MIXED}", torch.float32),
    "8B-64": ("8B", f"fsdp2:64,{MIXED}", torch.float32),
    "70B-8-bf16": ("70B", "fsdp2:8,reduce_dtype=float32", torch.bfloat16),
    "70B-64": ("70B", f"fsdp2:64,{MIXED}", torch.float32),
    "tiny": ("tiny", f"fsdp2:8,{MIXED}", torch.float32),
    "tiny-bf16": ("tiny", "fsdp2:8,reduce_dtype=float32", torch.bfloat16),
}
"""Shape, ranks, and the dtype of the shards, which is that of Adam's moments."""


def build(shape: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """A model without weights."""
    config = LlamaConfig(
        **SHAPES[shape], vocab_size=128256, num_key_value_heads=8, rope_theta=500000.0, use_cache=False
    )  # type: ignore[arg-type]
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(dtype).train()


def words(length: int) -> dict[str, torch.Tensor]:
    """One sequence."""
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def rows(case: str, path: Path) -> None:
    """Write the figures of a case, in bytes, shares and tokens, as they are found."""
    shape, parallel, dtype = CASES[case]
    model, started = build(shape, dtype), time.process_time()
    # The default's temporaries are as large as the shards and a moment: in 70B on 8 ranks, 35 GB.
    adamw = torch.optim.AdamW(model.parameters(), foreach=False) if dtype == torch.bfloat16 else "adamw"
    options: StepKeywords = {
        "device": "H100", "optimizer": adamw, "outputs": "dropped", "parallel": parallel,
    }  # fmt: skip
    found: dict[str, Any] = {"case": case, "parallel": parallel, "shards": str(dtype)}

    def note(**figures: Any) -> None:
        found.update(figures, process_seconds=round(time.process_time() - started))
        path.write_text(json.dumps(found, indent=1) + "\n")

    steps = SizedSteps(
        lambda units, _: prepared_step("estimate", model, words(UNIT * units), None, None, options)
    )
    whole, half = SEQUENCE // UNIT, SEQUENCE // UNIT // 2
    unplanned = steps.capture(whole).unplanned_bytes
    prepared = steps.prepared[whole]
    note(resident=prepared.resident.total, unplanned=unplanned)
    _, checkpointed = with_checkpoints(prepared, [BLOCKS])
    note(checkpointed=checkpointed.total_bytes, checkpointed_overhead=checkpointed.overhead)
    sending = planner.prepare(model, kwargs=words(SEQUENCE), offload="host", **options)._prepared
    for way, step in (("", prepared), ("sending_", sending)):
        for name, budget in (("planned", BUDGET), ("alike", checkpointed.total_bytes)):
            try:
                plan = plan_prepared(step, budget)
                assert plan.whole_step is not None
                note(**{way + name: plan.whole_step.total_bytes, f"{way}{name}_overhead": plan.overhead})
                note(**{f"{way}{name}_host": plan.whole_step.host_bytes})
            except planner.InfeasibleBudget as error:
                note(**{f"{way}{name}_least": error.minimum_bytes})
    shorter = steps.capture(half).unplanned_bytes
    _, small = with_checkpoints(steps.prepared[half], [BLOCKS])
    note(
        longest_unplanned=_longest(unplanned, shorter),
        longest_checkpointed=_longest(checkpointed.total_bytes, small.total_bytes),
    )
    try:
        longest = planner.max_batch(
            model, lambda units: words(UNIT * units), BUDGET, max_overhead=None, start=whole, **options
        )
        note(longest_planned=UNIT * longest.batch, longest_planned_overhead=longest.plan.overhead)
    except planner.InfeasibleBudget:
        note(longest_planned=0)


def in_pieces(case: str, split: SplitWhat, length: int) -> str:
    """A line of the table of plans with pieces."""
    shape, parallel, dtype = CASES[case]
    started = time.process_time()
    model, given = build(shape, dtype), words(length)
    options: StepKeywords = {
        "device": "H100", "optimizer": "adamw", "outputs": "dropped", "parallel": parallel,
    }  # fmt: skip
    try:
        plan = planner.plan(model, kwargs=given, budget=BUDGET, split=split, **options)
        assert plan.whole_step is not None
        takes, extra = f"{plan.whole_step.total_bytes / 1e9:.2f}", f"{plan.overhead:+.1%}"
    except planner.InfeasibleBudget as error:
        takes, extra = f"does not fit: the least is {error.minimum_bytes / 1e9:.1f}", ""
    return f"| {case} | {length:,} | {split} | {takes} | {extra} | {time.process_time() - started:.0f} s |"


def _longest(whole: int, half: int) -> int:
    """The longest sequence within the budget, on the line through two: with flash attention nothing grows
    faster than the sequence."""
    a_token = (whole - half) / (SEQUENCE // 2)
    if a_token <= 0:  # what is reserved, and not the sequence, decides
        return 0
    left = 80 * 10**9 - whole
    return max(0, int((SEQUENCE + left / a_token) // UNIT * UNIT))


def render(figures: list[dict[str, Any]]) -> str:
    """The table, as Markdown."""

    def gb(value: int | None) -> str:
        return "" if value is None else f"{value / 1e9:.1f}"

    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * value:+.1f}%"

    lines = [
        "| case | resident | unplanned | checkpoint per block | planned for 80 GB | at the checkpoints' "
        "bytes | the same, with offload | longest unplanned | longest with checkpoints | longest planned |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for found in figures:

        def plan(name: str, found: dict[str, Any] = found) -> str:
            if f"{name}_least" in found:
                return f"does not fit: the least is {gb(found[f'{name}_least'])}"
            host = gb(found.get(f"{name}_host") or None)
            there = f", {host} on the host" if host else ""
            return f"{gb(found.get(name))} {share(found.get(f'{name}_overhead'))}{there}"

        lengths = (found.get(f"longest_{way}") for way in ("unplanned", "checkpointed", "planned"))
        tokens = " | ".join("" if length is None else f"{length:,}" for length in lengths)
        if found.get("longest_planned"):
            tokens += f" {share(found['longest_planned_overhead'])}"
        lines.append(
            f"| {found['case']} | {gb(found['resident'])} | {gb(found['unplanned'])} | "
            f"{gb(found.get('checkpointed'))} {share(found.get('checkpointed_overhead'))} | "
            f"{plan('planned')} | {plan('alike')} | "
            f"{plan('sending_planned')}; {plan('sending_alike')} | {tokens} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Make rows, or the table of the rows that there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", default=",".join(c for c in CASES if "tiny" not in c))
    parser.add_argument("--out", type=Path, default=Path("out/scale"))
    parser.add_argument("--render", action="store_true", help="only print the table of the rows in --out")
    parser.add_argument("--split", nargs="+", choices=["loss", "auto"], help="plan the --lengths in pieces")
    parser.add_argument("--lengths", nargs="+", type=int, default=[110_592], help="tokens")
    given = parser.parse_args()
    if given.split:
        print("| case | tokens | split | GB | extra time | planned in |\n|---|---|---|---|---|---|")
        for case, length, split in itertools.product(given.cases.split(","), given.lengths, given.split):
            print(in_pieces(case, split, length), flush=True)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.render:
        for case in given.cases.split(","):
            rows(case, given.out / f"{case}.json")
    there = [given.out / f"{case}.json" for case in CASES]
    print(render([json.loads(path.read_text()) for path in there if path.exists()]))


if __name__ == "__main__":
    main()
