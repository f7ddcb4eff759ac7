"""What is reserved for plans of ResNet-50 and a U-Net on a GPU, with segments reserved beforehand or not.

    python benchmarks/arena.py [--out docs/results/arena.md] [--pictures 512] [--budgets 20GiB 12GiB]
                               [--tries 3000]

Nothing is run: all of it is predicted. With tries, frees are delayed for an experiment.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks.frontiers.gpu_models import CASES
from planner.allocator.arena import Event, LargePool, Recorder, find_arena, most_in_use
from planner.allocator.settings import SMALL_SIZE
from planner.allocator.training_loop import TrainingLoop, run
from planner.estimation.checkpointed import wrap_in_checkpoints
from planner.planfile.atomic_file import write_atomically
from planner.planfile.budget import format_bytes
from planner.planfile.schema import WholeStep
from planner.problem.allocations import planned_allocations
from planner.runtime.shapes.schedule_at import schedule_at
from tests.zoo import WithLoss, torchvision_shim

BUDGETS = ("28GiB", "43%", "20GiB", "26%", "12GiB")
HEAD = """# What is reserved with an arena

Made by `python benchmarks/arena.py --tries 3000 --out docs/results/arena.md`: timm's ResNet-50 with its loss,
{pictures} pictures of 224, predicted for V100-32GB, and the U-Net of [the GPU benchmark](gpu.md) in bf16,
predicted for H100; nothing of it was run. Budgets in bytes are for all that the device must have, the context
among it; percentages are of what the unplanned step allocates. The share is what is reserved of what is
allocated and libraries have. Without: what the same schedule reserves without an arena. The U-Net's plan is
that for what a checkpoint around every block allocates.

| budget | allocated | without | expandable | reserved | share | segments | extra time |
|---|---:|---:|---:|---:|---:|---:|---:|
"""
DELAYS = """
## Frees at other times

The emitted program frees a value behind its last use. It could free it later, as long as no more is in use
at once. For the table's plans such delays were searched for by simulation: some frees at a time move by a
few operations, every 25 tries segments are searched for anew, and what reserves no more is kept. The most
that is in use is the bound below which no order of allocations reserves. What delays gain is the difference
of the two shares, for as long as thousands of simulations take. So the program frees as soon as it can.

| budget | in use, at most | reserved | share | with frees delayed | share | tries |
|---|---:|---:|---:|---:|---:|---:|
"""
LONGEST = 15
"""Operations by which a free moves at once, at most."""


def row(name: str, whole: WholeStep, overhead: float) -> str:
    """A line of the table."""
    without = whole.unarranged_reserved_bytes or whole.reserved_bytes
    cells = (whole.allocated_bytes, without, whole.expandable_reserved_bytes or 0, whole.reserved_bytes)
    share = whole.reserved_bytes / (whole.allocated_bytes + whole.library_bytes)
    sizes = " + ".join(map(format_bytes, whole.arena)) or "none"
    shown = " | ".join(map(format_bytes, cells))
    return f"| {name} | {shown} | {share:.3f} | {sizes} | {overhead:+.1%} |"


def rows(pictures: int, budgets: Sequence[str], tries: int) -> tuple[list[str], list[str]]:
    """The unplanned step, and a plan for each budget; and what delays of frees bring."""
    torchvision_shim.install()
    import timm

    with torch.device("meta"):
        model = WithLoss(timm.create_model("resnet50")).train()
        args = torch.empty(pictures, 3, 224, 224), torch.zeros(pictures, dtype=torch.long)
    unplanned = planner.estimate(model, args, device="V100-32GB", optimizer="SGD").reserving
    lines, experiments = [row("unplanned", unplanned, 0.0)], list[str]()
    step = planner.prepare(model, args, device="V100-32GB", optimizer="SGD")
    for budget in budgets:
        plan = step.plan(budget)
        assert plan.whole_step is not None
        lines.append(row(budget, plan.whole_step, plan.overhead))
        print(lines[-1], file=sys.stderr)
        if tries:
            made, schedule = schedule_at(plan, step._prepared)
            loop = step._prepared.footprint.loop(planned_allocations(made.problem.graph, schedule))
            experiments.append(delayed(budget, loop, tries))
            print(experiments[-1], file=sys.stderr)
    return lines, experiments


def unet_rows() -> list[str]:
    """The U-Net with a checkpoint around every block, and the plan for what that allocates."""
    with torch.device("meta"):
        model, (args, kwargs) = CASES["sd-unet"].build(False)
    model = model.to(torch.bfloat16).train()
    args = tuple(each.to(torch.bfloat16) for each in args)
    step = planner.prepare(model, args, kwargs, device="H100", optimizer="AdamW")
    blocks = [n for n, part in model.named_modules() if type(part).__name__ in CASES["sd-unet"].blocks]
    line, by_hand = step._prepared.changed(wrap_in_checkpoints(blocks))
    unplanned = step._prepared.baseline_whole_step.allocated_bytes
    plan = step.plan(f"{100 * by_hand.allocated_bytes / unplanned:.6f}%")
    assert plan.whole_step is not None
    extra = line.seconds / step._prepared.problem.eager.seconds - 1
    return [row("U-Net, checkpoints", by_hand, extra), row("U-Net, plan", plan.whole_step, plan.overhead)]


def delayed(name: str, loop: TrainingLoop, tries: int) -> str:
    """A line about what a loop reserves when its step frees some blocks later."""
    step, draw = loop.step, random.Random(0)
    before, after = events(loop)
    segments, most = find_arena(before, after).segments, most_in_use([*before, *after])
    first = least = reserved(before, after, segments)
    ends, length = step.end.copy(), len(step.workspace)
    movable = [n for n, end in enumerate(ends) if end < length and step.bytes[n] > SMALL_SIZE]
    for number in range(1, tries + 1):
        other = ends.copy()
        for n in draw.choices(movable, k=draw.choice((1, 1, 2, 4))):
            moved = other[n] + draw.randint(-LONGEST, LONGEST)
            other[n] = min(max(moved, step.end[n]), length - 1)
        before, after = events(replace(loop, step=replace(step, end=other)))
        if most_in_use([*before, *after]) > most:
            continue
        tried = find_arena(before, after).segments if number % 25 == 0 else segments
        found = reserved(before, after, tried)
        if found <= least:
            least, ends, segments = found, other, tried
    cells = format_bytes(most), format_bytes(first), f"{first / most:.4f}", format_bytes(least)
    return f"| {name} | {' | '.join(cells)} | {least / most:.4f} | {tries:,} |"


def events(loop: TrainingLoop) -> tuple[list[Event], list[Event]]:
    """What a loop asks the large pool for, before its first step and from then on."""
    before, after = Recorder(), Recorder()
    for size in loop.resident:
        before.malloc(size)
    for _ in run(replace(loop, resident=(), arena=()), after):
        pass
    return before.events, after.events


def reserved(before: Sequence[Event], after: Sequence[Event], segments: Sequence[int]) -> int:
    """Bytes that the large pool reserves with these segments."""
    pool = LargePool()
    pool.run(before)
    pool.reserve(segments)
    pool.run(after)
    return pool.reserved_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pictures", type=int, default=512)
    parser.add_argument("--budgets", nargs="*", default=BUDGETS)
    parser.add_argument("--tries", type=int, default=0, help="to delay frees; 0 leaves the experiment out")
    wanted = parser.parse_args()
    plans, experiments = rows(wanted.pictures, wanted.budgets, wanted.tries)
    lines = [HEAD.format(pictures=wanted.pictures).rstrip(), *plans, *unet_rows()]
    text = "\n".join([*lines, *([DELAYS.rstrip(), *experiments] if experiments else []), ""])
    if wanted.out is None:
        print(text, end="")
    else:
        write_atomically(wanted.out, text)


if __name__ == "__main__":
    main()
