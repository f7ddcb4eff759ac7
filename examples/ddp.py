"""DistributedDataParallel within a memory budget: gradients leave block by block, while backward runs.

torchrun --nproc-per-node 2 examples/ddp.py --budget 60%
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import planner

sys.path.insert(0, str(Path(__file__).parent))
from blocks import apply_one_plan, batch, build_model


def train(budget: str | None, steps: int = 3) -> dict[str, torch.Tensor]:
    """The weights after some steps; without a plan where the budget is None."""
    model = build_model()
    if budget is not None:
        apply_one_plan(model, budget, planner.DDP(dist.get_world_size(), bucket_cap_mb=1))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for step in range(steps):
        optimizer.zero_grad()
        wrapped(batch(step, dist.get_rank())).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def main() -> None:
    """Train with and without a plan, and compare the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="60%")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    ours, theirs = train(given.budget), train(None)
    equal = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    print(f"rank {dist.get_rank()}: weights equal, bit for bit: {equal}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
