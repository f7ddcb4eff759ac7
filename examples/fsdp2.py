"""``fully_shard`` within a memory budget: plan, apply, then shard block by block, then the whole.

torchrun --nproc-per-node 2 examples/fsdp2.py --budget 60%
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import planner

sys.path.insert(0, str(Path(__file__).parent))
from blocks import apply_one_plan, batch, build_model


def train(budget: str | None, steps: int = 3, *, reshard: bool = True, half: bool = False) -> dict[str, Any]:
    """The weights after some steps; without a plan where the budget is None.

    Args:
        budget: As for :func:`planner.plan`.
        steps: How many.
        reshard: Whether a block's parameters are freed between its forward and its backward.
        half: Compute in bfloat16, and reduce gradients in single precision.
    """
    model = build_model()
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if half else {}
    if budget is not None:
        apply_one_plan(model, budget, planner.FSDP2(dist.get_world_size(), reshard, **dtypes))
    options: dict[str, Any] = {"reshard_after_forward": reshard}
    if half:
        options["mp_policy"] = MixedPrecisionPolicy(**dtypes)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, dist.get_rank())).backward()
        optimizer.step()
    state = model.state_dict()
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}


def main() -> None:
    """Train with and without a plan, and compare the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--reshard", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--half", action="store_true", help="compute in bfloat16")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    options = {"reshard": given.reshard, "half": given.half}
    ours, theirs = train(given.budget, **options), train(None, **options)
    equal = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    print(f"rank {dist.get_rank()}: weights equal, bit for bit: {equal}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
