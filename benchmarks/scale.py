"""What one rank of a cluster takes to train Llama-3, without the cluster: FSDP2 on 8 and 64 H100.

    python benchmarks/scale.py [--cases 8B-8 70B-64] [--parts plans offload longest]
                               [--rows docs/results/scale] [--out docs/results/scale.md]
    python benchmarks/scale.py --split loss auto [--cases 8B-8] [--lengths 110592 131072]

Models are on the meta device, so that no weight is in memory; everything is predicted. The rows of a case are
kept as JSON, part by part, and the tables of the page have all that are there. With --split sequences of such
lengths are planned, with losses (and MLPs) in pieces. With ``--cases`` and no name only the page is made.
"""

import argparse
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from planner.batch.interpolate import SizedSteps
from planner.choices import SplitWhat
from planner.estimation.checkpointed import with_checkpoints
from planner.estimation.estimate import prepared_step
from planner.planning.options import StepKeywords
from planner.planning.prepared import Prepared
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


Figures = dict[str, Any]
Note = Callable[..., None]
"""What is called with figures as they are found."""


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


def options_of(case: str, model: LlamaForCausalLM) -> StepKeywords:
    """How a case is planned."""
    _, parallel, dtype = CASES[case]
    # The default's temporaries are as large as the shards and a moment: in 70B on 8 ranks, 35 GB.
    adamw = torch.optim.AdamW(model.parameters(), foreach=False) if dtype == torch.bfloat16 else "adamw"
    return {"device": "H100", "optimizer": adamw, "outputs": "dropped", "parallel": parallel}


def plans(case: str, _: Figures, note: Note) -> None:
    """Checkpoints by hand, and plans that send nothing."""
    model = build(CASES[case][0], CASES[case][2])
    options = options_of(case, model)
    steps = SizedSteps(
        lambda units, like: prepared_step("estimate", model, words(UNIT * units), None, None, options)
    )
    whole, half = SEQUENCE // UNIT, SEQUENCE // UNIT // 2
    unplanned = steps.capture(whole).unplanned_bytes
    prepared = steps.prepared[whole]
    note(resident=prepared.resident.total, unplanned=unplanned)
    checkpointed = with_checkpoints(prepared, [BLOCKS])[1]
    note(checkpointed=checkpointed.total_bytes, checkpointed_overhead=checkpointed.overhead)
    budgets(prepared, "", checkpointed.total_bytes, note)
    shorter = steps.capture(half).unplanned_bytes
    small = with_checkpoints(steps.prepared[half], [BLOCKS])[1]
    note(
        longest_unplanned=_longest(unplanned, shorter),
        longest_checkpointed=_longest(checkpointed.total_bytes, small.total_bytes),
    )


def offload(case: str, found: Figures, note: Note) -> None:
    """Plans that send results to the host, and where nothing fits the states that are never sent."""
    model = build(CASES[case][0], CASES[case][2])
    options = options_of(case, model)
    sending = planner.prepare(model, kwargs=words(SEQUENCE), **options | {"offload": "host"})._prepared
    there, least = sending.resident, plan_prepared(sending, "min")
    assert least.whole_step is not None
    note(
        sending_min=least.whole_step.total_bytes,
        sending_min_overhead=least.overhead,
        sending_min_host=least.whole_step.host_bytes,
        sending_min_allocated=least.whole_step.allocated_bytes,
        shards=there.parameter_bytes + there.buffer_bytes,
        moments=there.optimizer_bytes,
        gradients=sending.problem.final_bytes,
    )
    budgets(sending, "sending_", found["checkpointed"], note)


def budgets(step: Prepared, way: str, checkpointed: int, note: Note) -> None:
    """Plans for the device, and for what checkpoints take."""
    for name, budget in (("planned", BUDGET), ("alike", checkpointed)):
        try:
            plan = plan_prepared(step, budget)
            assert plan.whole_step is not None
            figures = {"": plan.whole_step.total_bytes, "_overhead": plan.overhead}
            note(**{way + name + end: figure for end, figure in figures.items()})
            note(**{f"{way}{name}_host": plan.whole_step.host_bytes})
        except planner.InfeasibleBudget as error:
            note(**{f"{way}{name}_least": error.minimum_bytes})


def longest(case: str, _: Figures, note: Note) -> None:
    """The longest sequence that is planned."""
    model = build(CASES[case][0], CASES[case][2])
    try:
        batch = planner.max_batch(
            model,
            lambda units: words(UNIT * units),
            BUDGET,
            max_overhead=None,
            start=SEQUENCE // UNIT,
            **options_of(case, model),
        )
        note(longest_planned=UNIT * batch.batch, longest_planned_overhead=batch.plan.overhead)
    except planner.InfeasibleBudget:
        note(longest_planned=0)


PARTS: dict[str, Callable[[str, Figures, Note], None]] = {
    "plans": plans,
    "offload": offload,
    "longest": longest,
}


def rows(case: str, parts: Iterable[str], path: Path) -> None:
    """Write parts of a case, in bytes, shares and tokens, as their figures are found."""
    found: Figures = json.loads(path.read_text()) if path.exists() else {"case": case}
    for part in parts:
        if part == "plans":
            found.pop("made", None)
        started = time.process_time()

        def note(part: str = part, started: float = started, **figures: Any) -> None:
            found.update(figures)
            found[f"{part}_process_seconds"] = round(time.process_time() - started)
            path.write_text(json.dumps(found, indent=1) + "\n")

        PARTS[part](case, found, note)


def in_pieces(case: str, split: SplitWhat, length: int) -> str:
    """A line of the table of plans with pieces."""
    started = time.process_time()
    model, given = build(CASES[case][0], CASES[case][2]), words(length)
    try:
        plan = planner.plan(model, kwargs=given, budget=BUDGET, split=split, **options_of(case, model))
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


def gb(value: int | None) -> str:
    """Bytes in GB."""
    return "" if value is None else f"{value / 1e9:.1f}"


def share(value: float | None) -> str:
    """Extra time."""
    return "" if value is None else f"{100 * value:+.1f}%"


def planned(found: Figures, name: str) -> str:
    """A cell about a plan."""
    if f"{name}_least" in found:
        return f"does not fit: the least is {gb(found[f'{name}_least'])}"
    host = gb(found.get(f"{name}_host") or None)
    return f"{gb(found.get(name))} {share(found.get(f'{name}_overhead'))}" + (
        f", {host} on the host" if host else ""
    )


def line(found: Figures) -> str:
    """The row of a case without offload."""
    lengths = (found.get(f"longest_{way}") for way in ("unplanned", "checkpointed", "planned"))
    tokens = " | ".join("" if length is None else f"{length:,}" for length in lengths)
    name = f"{found['case']}, older" if "made" in found else found["case"]
    by_hand = f"{gb(found.get('checkpointed'))} {share(found.get('checkpointed_overhead'))}"
    return (
        f"| {name} | {gb(found.get('resident'))} | {gb(found.get('unplanned'))} | {by_hand} "
        f"| {planned(found, 'planned')} | {planned(found, 'alike')} "
        f"| {tokens} {share(found.get('longest_planned_overhead'))} |"
    )


def sent_line(found: Figures) -> str:
    """The row of a case with offload; what its states leave of the device, beside all but activations."""
    names = "shards", "moments", "gradients"
    beside = found["sending_min"] - found["sending_min_allocated"]
    left = 80 * 10**9 - sum(found[name] for name in names) - beside
    cells = *(gb(found[name]) for name in names), gb(beside), gb(left)
    return (
        f"| {found['case']} | {planned(found, 'sending_planned')} | {planned(found, 'sending_alike')} "
        f"| {planned(found, 'sending_min')} | {' | '.join(cells)} |"
    )


def page(text: str, folder: Path) -> str:
    """The page, its tables made of all rows that are there."""
    paths = [folder / f"{case}.json" for case in CASES]
    found = [json.loads(path.read_text()) for path in paths if path.exists()]
    pieces = folder / "pieces.json"
    tables = (
        [line(each) for each in found if "planned_least" in each or "planned" in each],
        [sent_line(each) for each in found if "sending_min" in each],
        json.loads(pieces.read_text()) if pieces.exists() else [],
    )
    heads = list(re.finditer(r"(?m)^[|]-.*\n((?:[|].*\n)*)", text))
    for head, lines in reversed(list(zip(heads, tables, strict=True))):
        text = text[: head.start(1)] + "".join(f"{each}\n" for each in lines) + text[head.end(1) :]
    return text


def main() -> None:
    """Make rows, and the page of the rows that there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[c for c in CASES if "tiny" not in c], choices=[*CASES])
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=[*PARTS])
    parser.add_argument("--rows", type=Path, default=Path("docs/results/scale"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/scale.md"))
    parser.add_argument("--split", nargs="+", choices=["loss", "auto"], help="plan the --lengths in pieces")
    parser.add_argument("--lengths", nargs="+", type=int, default=[110_592], help="tokens")
    given = parser.parse_args()
    given.rows.mkdir(parents=True, exist_ok=True)
    if given.split:
        made = itertools.product(given.cases, given.lengths, given.split)
        lines = [in_pieces(case, split, length) for case, length, split in made]
        (given.rows / "pieces.json").write_text(json.dumps(lines, indent=1) + "\n")
    else:
        for case in given.cases:
            rows(case, given.parts, given.rows / f"{case}.json")
    given.out.write_text(page(given.out.read_text(), given.rows))


if __name__ == "__main__":
    main()
