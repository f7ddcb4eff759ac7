"""Predicted extra time against measured, and Hugging Face's own checkpointing at its own peak.

    python benchmarks/time_truth.py --out docs/results/time-truth.md
    python benchmarks/time_truth.py --costs measured --backends graph replay        # replays beside graphs
    python benchmarks/time_truth.py --tiny --models gpt2 --shares 60% --repeats 1   # a try

For each model plans are made by the roofline and by measured costs, and run. Each planned, or checkpointed,
step is timed right after an unplanned one, and the median of the ratios of their process times is what is
compared: the machine's speed changes, but little from one step to the next. All runs on one thread, with
glibc told to keep what it has (MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_=17179869184): it otherwise maps and
unmaps large blocks, so that a step with less memory gets faster and no sum over operations can be right.
That is not enough where glibc is older than 2.38: what is left of a block when it is aligned goes into the
thread's cache, so that the block, once freed, is too small for the next of its size, and the heap grows with
each. Without that cache (glibc.malloc.tcache_count=0) blocks are used again.
The program starts itself again with these settings.
"""

import argparse
import gc
import itertools
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SETTINGS = {
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
SHARES = ("80%", "60%", "40%")
COSTS = ("roofline", "measured")
BACKENDS = ("auto", "graph", "replay")
MODELS = ("bert", "gpt2", "llama", "vit", "resnet50", "unet")

NEAR = 4
"""Points of extra time that a prediction may be off without a reason."""

Built = tuple[Any, dict[str, Any], Callable[[Any], Any] | None]


def build(name: str, *, tiny: bool = False) -> Built:
    """A model, its keyword arguments, and the loss of its output where it has none of its own."""
    import torch
    import torch.nn.functional as F
    import transformers as hf

    torch.manual_seed(0)
    layers, width, batch, length = (2, 32, 2, 16) if tiny else (6, 256, 4, 256)
    size = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
    words = torch.randint(0, 512 if tiny else 8192, (batch, length))
    text = {"input_ids": words, "labels": words}
    images = torch.randn(2 * batch, 3, 32 if tiny else 128, 32 if tiny else 128)
    classes = torch.randint(0, 10, (len(images),))
    if name == "bert":
        config = hf.BertConfig(vocab_size=8192, num_attention_heads=4, max_position_embeddings=512, **size)
        return hf.BertForMaskedLM(config), text, None
    if name == "gpt2":
        config = hf.GPT2Config(
            vocab_size=8192, n_embd=width, n_layer=layers, n_head=4, n_positions=512, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        return hf.GPT2LMHeadModel(config), text, None
    if name == "llama":
        config = hf.LlamaConfig(vocab_size=8192, num_attention_heads=4, num_key_value_heads=4, **size)
        return hf.LlamaForCausalLM(config), text, None
    if name == "vit":
        config = hf.ViTConfig(
            num_attention_heads=4, image_size=images.shape[-1], patch_size=8, num_labels=10, **size
        )
        return hf.ViTForImageClassification(config), {"pixel_values": images, "labels": classes}, None
    if name == "resnet50":
        config = hf.ResNetConfig(
            num_labels=10, **({"depths": [1, 1], "hidden_sizes": [32, 64]} if tiny else {})
        )
        return hf.ResNetForImageClassification(config), {"pixel_values": images, "labels": classes}, None
    import diffusers

    blocks = (32, 64) if tiny else (64, 128, 128)
    down = ["DownBlock2D"] * (len(blocks) - 1) + ["AttnDownBlock2D"]
    up = ["AttnUpBlock2D"] + ["UpBlock2D"] * (len(blocks) - 1)
    unet = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=blocks,
        down_block_types=down,
        up_block_types=up,
        layers_per_block=1,
    )
    noisy = torch.randn(2 if tiny else 4, 3, 32, 32)
    times = torch.arange(len(noisy))
    wanted = torch.randn(len(noisy), 3, 32, 32)
    return unet, {"sample": noisy, "timestep": times}, lambda out: F.mse_loss(out.sample, wanted)


def enable_checkpointing(model: Any) -> bool:
    """Switch on the checkpointing that a model brings; whether it has any."""
    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif getattr(model, "_supports_gradient_checkpointing", False):  # of diffusers
        model.enable_gradient_checkpointing()
    else:
        return False
    return True


def step_of(built: Built) -> Callable[[], object]:
    """A step of a model, which leaves its gradients and nothing else."""
    model, inputs, loss = built

    def step() -> object:
        model.zero_grad(set_to_none=True)
        found = model(**inputs)
        found = found.loss if loss is None else loss(found)
        found.backward()
        return None

    return step


def peak_of(built: Built, step: Callable[[], object]) -> int:
    """The measured peak of a model's step over what is resident."""
    from planner.verification.measure import measure_peak

    step()
    built[0].zero_grad(set_to_none=True)
    return measure_peak(step, "cpu").peak_bytes


def process_seconds(step: Callable[[], object]) -> float:
    """Process time of a step."""
    gc.collect()
    started = time.process_time()
    step()
    return time.process_time() - started


def ratios(
    unplanned: Callable[[], object], steps: Mapping[str, Callable[[], object]], repeats: int
) -> tuple[float, dict[str, float]]:
    """Median process seconds of the unplanned step, and what the median of each other takes of it.

    Each is timed beside an unplanned step, before it and after it by turns; all take turns, after a round
    that does not count.
    """
    alone: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(repeats + 1):
        for name, step in steps.items():
            pair = (unplanned, step) if round_ % 2 else (step, unplanned)
            first, second = map(process_seconds, pair)
            before, after = (first, second) if round_ % 2 else (second, first)
            if round_:
                alone.append(before)
                found[name].append(after / before)
    return statistics.median(alone), {name: statistics.median(values) for name, values in found.items()}


def compare(name: str, options: argparse.Namespace) -> list[str]:
    """A model's rows of the table."""
    import planner
    from benchmarks.explained_times import explained

    def fresh() -> Built:
        model, inputs, loss = build(name, tiny=options.tiny)
        return model.train(), inputs, loss

    plain, theirs = fresh(), fresh()
    unplanned = step_of(plain)
    steps: dict[str, Callable[[], object]] = {}
    budgets: list[tuple[str, str | int]] = [(share, share) for share in options.shares]
    if enable_checkpointing(theirs[0]):
        steps["theirs"] = step_of(theirs)
    plans: dict[str, planner.Plan] = {}
    infeasible: list[str] = []
    for costs, backend in itertools.product(options.costs, options.backends):
        way = f"{costs}, {backend}" if len(options.backends) > 1 else costs
        prepared = planner.prepare(
            plain[0], kwargs=plain[1], loss=plain[2], outputs="dropped", costs=costs, backend=backend
        )
        resident = prepared.plan("100%", solver="none").predicted.resident_bytes
        if "theirs" in steps and len(budgets) == len(options.shares):
            budgets.append(("their peak", resident + peak_of(theirs, steps["theirs"])))
        for label, budget in budgets:
            key = f"{label}, {way}"
            try:
                plan = prepared.plan(budget, time_limit=options.time_limit)
            except planner.InfeasibleBudget as error:
                print(f"{name}, {key}: {error}", file=sys.stderr)
                share = error.minimum_bytes / error.budget_bytes
                infeasible.append(f"| {name} | {key}: the least is {share:.2f} times that | | | | |")
                continue
            ours = fresh()
            plan.apply(ours[0])
            steps[key], plans[key] = step_of(ours), plan
            measured = peak_of(ours, steps[key])
            if measured > 1.005 * plan.predicted.dynamic_peak_bytes:
                warnings.warn(f"{name}, {key}: {measured:,} bytes, more than predicted", stacklevel=1)
    if not steps:
        return infeasible
    seconds, taken = ratios(unplanned, steps, options.repeats)
    rows = [f"| {name} | unplanned ({1e3 * seconds:.0f} ms) | | | | |"]
    for key, ratio in taken.items():
        really = ratio - 1
        if key == "theirs":
            rows.append(f"| {name} | its own checkpointing | | {really:+.1%} | | |")
        else:
            expected = plans[key].overhead
            off = 100 * (really - expected)
            why = explained(plans[key], unplanned, steps[key]) if abs(off) > NEAR else ""
            rows.append(f"| {name} | {key} | {expected:+.1%} | {really:+.1%} | {off:+.1f} | {why} |")
    return rows + infeasible


def main() -> None:
    """Compare the chosen models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--shares", nargs="+", default=list(SHARES), help="budgets, of the unplanned step")
    parser.add_argument("--costs", nargs="+", choices=COSTS, default=list(COSTS))
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["auto"])
    parser.add_argument("--repeats", type=int, default=9, help="timed pairs of steps of each kind")
    parser.add_argument("--time-limit", type=float, default=60, help="seconds that each search may take")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers of each")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SETTINGS})

    import torch

    from planner.planfile.atomic_file import write_atomically

    torch.set_num_threads(1)
    lines = [
        "# Predicted and measured extra time",
        "",
        "Made by `python benchmarks/time_truth.py`: medians of the ratio of process times of a step and of",
        "an unplanned one beside it, on one thread, with MALLOC_MMAP_MAX_=0,",
        "MALLOC_TRIM_THRESHOLD_=17179869184 and GLIBC_TUNABLES=glibc.malloc.tcache_count=0. Outputs are",
        "dropped, as in trainers;",
        '"their peak" is a plan for what the model\'s own checkpointing takes.',
        f"torch {torch.__version__}, {platform.machine()} with {torch.backends.cpu.get_cpu_capability()}.",
        f"Where a prediction is over {NEAR} points off, the operators that take most more, or less, than",
        "their re-runs are predicted to, in points (from one profiled step of each).",
        "",
        "| model | step | predicted | measured | points off | by operator |",
        "|---|---|---|---|---|---|",
    ]
    for name in options.models:
        print(name, file=sys.stderr)
        rows = compare(name, options)
        print("\n".join(rows), file=sys.stderr, flush=True)
        lines += rows
    text = "\n".join([*lines, ""])
    if options.out is not None:
        write_atomically(options.out, text)
    print(text)


if __name__ == "__main__":
    main()
