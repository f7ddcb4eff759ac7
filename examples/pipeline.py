"""A pipeline within memory budgets: each stage is planned for the micro-batches that it has in flight.

torchrun --nproc-per-node 2 examples/pipeline.py --schedule 1f1b --budget 70%
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import planner

sys.path.insert(0, str(Path(__file__).parent))
from blocks import CONTEXT, WIDTH, WORDS, Block

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MICRO_BATCHES, SEQUENCES = 4, 8


class Stage(nn.Module):
    """Some of the blocks; the first stage has the words before them, the last one their prediction behind."""

    def __init__(self, *, first: bool, last: bool, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH) if first else None
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.words is not None:
            x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def loss_of(output: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """The loss of predicting the next word."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def build_stage() -> Stage:
    """The stage of this rank."""
    torch.manual_seed(dist.get_rank())
    return Stage(first=dist.get_rank() == 0, last=dist.get_rank() == dist.get_world_size() - 1).train()


def batch(step: int) -> torch.Tensor:
    """The words of all micro-batches of a step."""
    drawn = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (MICRO_BATCHES * SEQUENCES, CONTEXT), generator=drawn)


def plan_stage(stage: Stage, schedule: str, budget: str) -> planner.Plan:
    """The plan of this rank's stage: other ranks have others."""
    words = batch(0)[:SEQUENCES]
    x = words if stage.words is not None else torch.randn(SEQUENCES, CONTEXT, WIDTH, requires_grad=True)
    to_the_last = dist.get_world_size() - dist.get_rank()
    in_flight = MICRO_BATCHES if schedule == "gpipe" else min(to_the_last, MICRO_BATCHES)
    return planner.plan(
        stage,
        (x,),
        loss=None if stage.head is None else lambda output: loss_of(output, words),
        budget=budget,
        outputs="dropped",  # as with return_outputs=False below
        in_flight=in_flight,
        accumulate=in_flight < MICRO_BATCHES,
    )


def pipeline_of(stage: nn.Module, schedule: str) -> Any:
    """A function that runs forward and backward of a batch."""
    rank, count = dist.get_rank(), dist.get_world_size()
    part = PipelineStage(stage, rank, count, torch.device("cpu"))
    pipeline = SCHEDULES[schedule](part, MICRO_BATCHES, loss_fn=loss_of)

    def run(words: torch.Tensor) -> None:
        given = (words,) if rank == 0 else ()
        target = {"target": words} if rank == count - 1 else {}
        pipeline.step(*given, **target, return_outputs=False)

    return run


def train(schedule: str, budget: str | None, steps: int = 3) -> dict[str, torch.Tensor]:
    """The weights of this rank's stage after some steps; without a plan where the budget is None."""
    stage = build_stage()
    if budget is not None:
        plan_stage(stage, schedule, budget).apply(stage)
    run = pipeline_of(stage, schedule)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)  # of dropout
        run(batch(step))
        optimizer.step()
    return {name: value.clone() for name, value in stage.state_dict().items()}


def main() -> None:
    """Train with and without plans, and compare the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="gpipe")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    ours, theirs = train(given.schedule, given.budget), train(given.schedule, None)
    equal = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    print(f"rank {dist.get_rank()}: weights equal, bit for bit: {equal}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
