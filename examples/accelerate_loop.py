"""A training loop with Accelerate within a memory budget: one line before ``prepare``.

python examples/accelerate_loop.py --budget 60%
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from words import build_model, options, padded, sentences

import planner


def train(budget: str | None, steps: int = 6, mixed_precision: str = "bf16") -> torch.nn.Module:
    """Train for some steps of two batches each; without a plan where the budget is None."""
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=2)
    model = build_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is not None:
        planner.auto_checkpoint(model, budget=budget, optimizer=optimizer, accumulate=True)
    model, optimizer, batches = accelerator.prepare(
        model, optimizer, DataLoader(sentences(8 * steps), batch_size=4, collate_fn=padded)
    )
    torch.manual_seed(0)
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    given = options(__doc__).parse_args()
    train(given.budget, given.steps)
