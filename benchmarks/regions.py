"""Plans by regions beside plans of the whole model, and beside a checkpoint around each region.

    python benchmarks/regions.py --out docs/results/regions.md
    python benchmarks/regions.py --models gpt2 --shares 60%      # a try

Each model is captured whole and with ``regions="auto"``, and both are planned by the roofline for the same
shares of what the unplanned step allocates over entry, for the peak of the step with
``torch.utils.checkpoint`` around every region, and for 1.25 of that. A plan by regions is run and compared
with the unplanned step: gradients, buffers and random state bit for bit, and the measured peak.
"""

import argparse
import gc
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import planner
from benchmarks import time_truth
from benchmarks.breaks import possible
from planner.planfile.atomic_file import write_atomically

MODELS = ("bert", "gpt2", "llama", "t5", "vit", "resnet152", "sd_unet")
SHARES = ("60%", "40%", "25%")


def build(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model in training mode, with its arguments, that returns its loss."""
    torch.manual_seed(0)
    if name == "t5":
        import transformers as hf

        config = hf.T5Config(
            vocab_size=8192, d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4,
            decoder_start_token_id=0, use_cache=False,
        )  # fmt: skip
        words = torch.randint(0, 8192, (4, 256))
        return hf.T5ForConditionalGeneration(config).train(), (), {"input_ids": words, "labels": words}
    if name == "resnet152":
        import transformers as hf

        net = hf.ResNetConfig(depths=[3, 8, 36, 3], num_labels=10)
        images, classes = torch.randn(48, 3, 96, 96), torch.randint(0, 10, (48,))
        inputs = {"pixel_values": images, "labels": classes}
        return hf.ResNetForImageClassification(net).train(), (), inputs
    if name == "sd_unet":
        import diffusers

        model = diffusers.UNet2DConditionModel(
            sample_size=32, layers_per_block=2, block_out_channels=(32, 64, 128), norm_num_groups=8,
            cross_attention_dim=64, attention_head_dim=8,
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        )  # fmt: skip
        return model.train(), (torch.randn(4, 4, 32, 32), torch.arange(4), torch.randn(4, 16, 64)), {}
    model, inputs, _ = time_truth.build(name)
    if name == "llama":
        model.config.use_cache = False
    return model.train(), (), inputs


def compare(name: str, shares: list[str]) -> tuple[list[str], list[str]]:
    """A model's rows of both tables."""
    model, args, kwargs = build(name)
    options: dict[str, Any] = {"costs": "roofline", "encodings": "none"}
    if "labels" in kwargs:  # the loss is all that a trainer keeps
        options["outputs"] = "dropped"
    whole = planner.prepare(model, args, kwargs, **options)
    parts = planner.prepare(model, args, kwargs, regions="auto", **options)
    nothing = whole.plan("1TiB", solver="none")
    resident, unplanned = nothing.resident.total, nothing.baseline.dynamic_peak_bytes
    regions = parts.plan("1TiB", solver="none").model.regions
    rows = []
    for share in [*shares, "min"]:
        budget = share if share == "min" else resident + int(float(share[:-1]) / 100 * unplanned)
        one, several = (_plan(step, budget) for step in (whole, parts))
        more = "" if one is None or several is None else f"{100 * (several.overhead - one.overhead):+.1f}"
        rows.append(
            f"| {name} | {len(regions)} | {share} | {_figures(one)} | {_figures(several)} | {more} "
            f"| {'' if several is None else possible(several)} | {_verified(model, args, kwargs, several)} |"
        )
        print(rows[-1], file=sys.stderr, flush=True)
    theirs = planner.estimate(model, args, kwargs, checkpoints=regions, **options).checkpointed
    assert theirs is not None
    return rows, [_beside_checkpoints(name, theirs, (whole, parts), resident)]


def _beside_checkpoints(name: str, theirs: Any, steps: Any, resident: int) -> str:
    cells = [name, f"{theirs.dynamic_peak_bytes / 2**20:.1f} MiB, {theirs.overhead:+.1%}"]
    for more in (1.0, 1.25):
        for step in steps:
            plan = _plan(step, resident + int(more * theirs.dynamic_peak_bytes))
            ratio = "" if plan is None else f", {plan.overhead / theirs.overhead:.2f}"
            cells.append(f"{_figures(plan)}{ratio}")
    row = f"| {' | '.join(cells)} |"
    print(row, file=sys.stderr, flush=True)
    return row


def _plan(step: Any, budget: int | str) -> planner.Plan | None:
    try:
        plan: planner.Plan = step.plan(budget)
    except planner.InfeasibleBudget as error:
        print(error, file=sys.stderr)
        return None
    return plan


def _figures(plan: planner.Plan | None) -> str:
    if plan is None:
        return "does not fit"
    return f"{plan.predicted.dynamic_peak_bytes / 2**20:.1f} MiB, {plan.overhead:+.1%}"


def _verified(model: torch.nn.Module, args: Any, kwargs: Any, plan: planner.Plan | None) -> str:
    if plan is None:
        return ""
    report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
    off = report.measured_dynamic_peak_bytes / plan.predicted.dynamic_peak_bytes - 1
    return f"{'equal' if report.ok else report.problems[0]}, {off:+.2%}"


def main() -> None:
    """Compare the chosen models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--shares", nargs="+", default=list(SHARES), help="of the unplanned step's peak")
    parser.add_argument("--out", type=Path, help="write the tables to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    first, second = list[str](), list[str]()
    for name in options.models:
        rows, row = compare(name, options.shares)
        first += rows
        second += row
        torch._dynamo.reset()
        gc.collect()
    text = "\n".join([_HEAD.format(torch.__version__, platform.machine()), *first, _BETWEEN, *second, ""])
    if options.out is not None:
        write_atomically(options.out, text)
    print(text)


_HEAD = """\
# Plans by regions

Made by `python benchmarks/regions.py --out docs/results/regions.md`: `regions="auto"` beside a plan of the
whole model, for the same budget, a share of what the unplanned step allocates over entry. Costs by the
roofline, no masks as bits. *No less than*: the extra time that is proven to be needed by these regions.
*Verified*: gradients, buffers and random state of the plan by regions against the unplanned step, and how far
its measured peak is from the predicted. torch {}, {}.

What a region is given is held until its own backward, since no other graph can compute it again: so the least
peak is higher than with a plan of the whole model, by what passes between the regions.

| model | regions | budget | whole | by regions | points of time | no less than | verified |
|---|---|---|---|---|---|---|---|"""

_BETWEEN = """
## At the peak of a checkpoint around each region

The step with `torch.utils.checkpoint` around every region, and plans for its peak and for 1.25 of it: dynamic
peak, extra time, and that time as a share of the checkpoints'.

| model | checkpoints | whole | by regions | whole, 1.25 | by regions, 1.25 |
|---|---|---|---|---|---|"""


if __name__ == "__main__":
    main()
