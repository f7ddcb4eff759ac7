"""What is reserved for plans of ResNet-50 on a GPU, with segments reserved beforehand and without.

    python benchmarks/arena.py [--out docs/results/arena.md] [--pictures 512] [--budgets 20GiB 12GiB]

Nothing is run: all of it is predicted for a V100 of 32 GB.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from planner.planfile.atomic_file import write_atomically
from planner.planfile.budget import format_bytes
from planner.planfile.plan import PlanRecord
from planner.planfile.schema import WholeStep
from tests.zoo import WithLoss, torchvision_shim

BUDGETS = ("28GiB", "43%", "20GiB", "26%", "12GiB")
HEAD = """# What is reserved with an arena

Made by `python benchmarks/arena.py --out docs/results/arena.md`: timm's ResNet-50 with its loss, {pictures}
pictures of 224, predicted for V100-32GB; nothing of it was run. Budgets in bytes are for all that the device
must have, the context's 500 MiB among it; percentages are of what the unplanned step allocates. The share is
what is reserved of what is allocated and libraries have. Without: what the same schedule reserves without an
arena.

| budget | allocated | without | expandable | reserved | share | segments | extra time |
|---|---:|---:|---:|---:|---:|---:|---:|
"""


def row(name: str, whole: WholeStep, overhead: float) -> str:
    """A line of the table."""
    without = whole.unarranged_reserved_bytes or whole.reserved_bytes
    cells = (whole.allocated_bytes, without, whole.expandable_reserved_bytes or 0, whole.reserved_bytes)
    share = whole.reserved_bytes / (whole.allocated_bytes + whole.library_bytes)
    sizes = " + ".join(map(format_bytes, whole.arena)) or "none"
    shown = " | ".join(map(format_bytes, cells))
    return f"| {name} | {shown} | {share:.3f} | {sizes} | {overhead:+.1%} |"


def rows(pictures: int, budgets: Sequence[str]) -> list[str]:
    """The unplanned step, and a plan for each budget."""
    torchvision_shim.install()
    import timm

    with torch.device("meta"):
        model = WithLoss(timm.create_model("resnet50")).train()
        args = torch.empty(pictures, 3, 224, 224), torch.zeros(pictures, dtype=torch.long)
    unplanned = planner.estimate(model, args, device="V100-32GB", optimizer="SGD").reserving
    lines = [row("unplanned", unplanned, 0.0)]
    prepared = planner.prepare(model, args, device="V100-32GB", optimizer="SGD")
    for budget in budgets:
        plan: PlanRecord = prepared.plan(budget)
        assert plan.whole_step is not None
        lines.append(row(budget, plan.whole_step, plan.overhead))
        print(lines[-1], file=sys.stderr)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pictures", type=int, default=512)
    parser.add_argument("--budgets", nargs="*", default=BUDGETS)
    wanted = parser.parse_args()
    text = "\n".join(
        [HEAD.format(pictures=wanted.pictures).rstrip(), *rows(wanted.pictures, wanted.budgets), ""]
    )
    if wanted.out is None:
        print(text, end="")
    else:
        write_atomically(wanted.out, text)


if __name__ == "__main__":
    main()
