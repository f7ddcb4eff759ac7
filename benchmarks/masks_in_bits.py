"""What masks as bits bring: the extra time at some budgets, and the least peak, with them and without.

    python benchmarks/masks_in_bits.py [--models gpt,bert] [--shares 0.8,0.6] [--costs roofline]
        [--out FILE.md]

Each model is planned with ``encodings="none"`` and ``"auto"`` for a half and 30 % of what its unplanned step
allocates over entry, and for the least peak; and once more with dropout as the one operation that PyTorch
traces, whose product is not made again without drawing its mask again. Seconds are measured for each distinct
operation, on one thread. The plan with masks as bits is applied, and a step of it compared with the unplanned
one, bit for bit.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks.headlines import VGG, VGG_16
from planner.capture.graphs import graph_runner
from planner.graph.passes import JOINT_PASSES
from planner.graph.passes.cpu_dropout import divide_masks
from planner.planfile.budget import format_bytes
from planner.planfile.plan import PlanRecord
from planner.planning.encodings import offered
from planner.planning.options import PlanOptions
from planner.planning.prepare import prepare
from planner.planning.prepared import Prepared
from planner.planning.solve import plan_prepared, room_bytes
from planner.training_step.step import Step
from planner.user_plan import Plan
from solvers.model.constraints import NO_CONSTRAINTS
from solvers.one_budget import first_bound
from solvers.programs.lower_bound import at_more_moments, tightened
from tests.zoo import Built, WithLoss, build

SHARES = (0.5, 0.3)


def _gpt2() -> Built:
    import transformers

    config = transformers.GPT2Config(n_layer=8, n_embd=256, n_head=8, vocab_size=2000)
    words = torch.randint(3, 2000, (2, 512))
    return transformers.GPT2LMHeadModel(config), (), {"input_ids": words, "labels": words}


def _bert() -> Built:
    model, args, _ = build("bert")
    words = torch.randint(3, 2000, (8, 256))
    return model, args, {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}


def _vgg16() -> Built:
    inputs = (torch.randn(8, 3, 64, 64), torch.randint(0, 1000, (8,)))
    return WithLoss(VGG(VGG_16)), inputs, {}


MODELS: dict[str, Callable[[], Built]] = {
    "bert, 6 layers, 8 x 256": _bert,
    "gpt2, 8 layers, 2 x 512": _gpt2,
    "gpt, 6 layers, 8 x 128": lambda: build("gpt"),
    "transformer encoder, 4 layers": lambda: build("transformer_encoder"),
    "unet": lambda: build("unet"),
    "resnet50, 16 x 128 x 128": lambda: build("resnet50"),
    "vgg16, 8 x 64 x 64": _vgg16,
}


def rows(name: str, costs: Any, shares: Sequence[float] = SHARES) -> list[str]:
    """The table's rows of one model."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    step = Step(args, kwargs, None, "dropped")
    options = PlanOptions(costs=costs, outputs="dropped")
    prepared = prepare(model.train(), step, options)
    whole = _with_dropout_whole(lambda: prepare(model, step, options))
    dynamic = prepared.problem.eager.peak_bytes
    found = []
    for share in (*shares, None):
        budget: int | str = "min" if share is None else prepared.resident.total + int(share * dynamic)
        before = _planned(whole, budget, "none")
        without, packing = (_planned(prepared, budget, encodings) for encodings in ("none", "auto"))
        cells = [
            name,
            "least" if share is None else f"{share:.0%}",
            *map(_figures, (before, without, packing)),
        ]
        cells.append("" if share is None else _bound(prepared, budget))
        if packing is None:
            found.append(f"| {' | '.join(cells)} | | | |")
            continue
        bits = _bits(prepared)
        packed = [bits[graph, i] for graph, record in enumerate(packing.graphs) for i in record.packed]
        report = planner.verify(model, args, kwargs, plan=Plan.of(packing), repeats=0)
        exact = report.measured_dynamic_peak_bytes == packing.predicted.dynamic_peak_bytes
        cells += [
            f"{len(packed)} of {len(prepared.packings)}",
            format_bytes(sum(packed)) if packed else "",
            f"{'equal' if report.ok else report.problems[0]}, {'exact' if exact else 'not exact'}",
        ]
        found.append(f"| {' | '.join(cells)} |")
        print(found[-1], file=sys.stderr, flush=True)
    return found


def _with_dropout_whole(capture: Callable[[], Prepared]) -> Prepared:
    """Capture a step whose dropout stays one operation. It is not run: its rounding is not eager's."""
    kept = tuple(step for step in JOINT_PASSES if step is not divide_masks)
    with mock.patch.object(graph_runner, "JOINT_PASSES", kept):
        return capture()


def _bound(prepared: Prepared, budget: int | str) -> str:
    """The least extra time that is possible with every mask kept as bits, or made anew from them."""
    offer = offered(prepared, NO_CONSTRAINTS)
    if offer is None:
        return ""
    graph, room = offer.problem.graph, room_bytes(prepared.budget(budget), prepared)
    if room is None:
        return ""
    bound = tightened(graph, room, first_bound(graph, room, 60), 30)
    bound = at_more_moments(graph, room, bound, 30)
    return f"+{bound.seconds / graph.base_seconds - 1:.1%}"


def _bits(prepared: Prepared) -> dict[tuple[int, int], int]:
    """The bytes of what can be packed, by graph, as plans count them, and operation."""
    planned = [i for i, graph in enumerate(prepared.captured.graphs) if graph.joint is not None]
    found = {}
    for packing in prepared.packings:
        source = prepared.problem.sources[packing.row if packing.reader is None else packing.reader]
        found[planned.index(source.graph), source.op] = packing.bytes
    return found


def _planned(prepared: Prepared, budget: int | str, encodings: Any) -> PlanRecord | None:
    options = replace(prepared.options, encodings=encodings)
    try:
        return plan_prepared(replace(prepared, options=options), budget)
    except planner.InfeasibleBudget:
        return None


def _figures(plan: PlanRecord | None) -> str:
    if plan is None:
        return "does not fit"
    return f"+{plan.overhead:.1%}, {format_bytes(plan.predicted.dynamic_peak_bytes)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", help="parts of their names, separated by commas; all if not given")
    parser.add_argument("--shares", default="0.5,0.3", help="of the unplanned step's peak")
    parser.add_argument("--costs", default="measured", choices=("measured", "roofline"))
    parser.add_argument("--out", type=Path, help="write the table to this file, not to stdout")
    given = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [n for n in MODELS if not given.models or any(n.startswith(m) for m in given.models.split(","))]
    lines: list[str] = []
    for name in wanted:
        lines += rows(name, given.costs, [float(share) for share in given.shares.split(",")])
        torch._dynamo.reset()
        gc.collect()
    head = [
        "| model | memory | whole | without | with | no less than | masks as bits | bits | step, peak |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    text = "\n".join([*head, *lines]) + "\n"
    if given.out is None:
        print(text, end="")
    else:
        given.out.write_text(f"{_INTRODUCTION}\n{text}")
    return 0


_INTRODUCTION = """\
# Masks as bits

Made by `python benchmarks/masks_in_bits.py --out docs/results/masks-in-bits.md`: extra time over the step
that recomputes nothing, and dynamic peak, at a share of what the unplanned step allocates over entry: with
dropout as one operation, as PyTorch traces it; with drawing a mask apart from its product, so that a kept
mask spares drawing it again; and with masks as bits as well. *No less than* is the extra time that is
proven to be needed if any mask may be had from bits. Operations are timed on one core. *step* says whether
gradients, buffers and random state are the unplanned step's, bit for bit; *peak* whether the measured peak
is the predicted one to the byte.

The idea of lossless encodings is Gist's (Jain et al., ISCA 2018); there nothing is recomputed, here a mask is
kept, kept as bits or made again, whatever is best.
"""

if __name__ == "__main__":
    sys.exit(main())
