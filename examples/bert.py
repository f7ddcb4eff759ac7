"""Train a Hugging Face BERT within a share of the memory that it takes.

Plans the training step of a BERT with random weights, writes the plan, checks the planned step against the
unplanned one, then trains the same steps with and without the plan and compares the weights.

    python examples/bert.py --budget 60% --plan plan.json
"""

import argparse
import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM

import planner
from planner.planfile.budget import format_bytes

LAYERS, WIDTH, HEADS, VOCABULARY = 6, 256, 4, 4096
BATCH, LENGTH = 8, 256
MASK_TOKEN, IGNORED = 4, -100

Batch = dict[str, torch.Tensor]


def make_batch(generator: torch.Generator, batch: int = BATCH) -> Batch:
    """Random tokens of which 15 % are to be guessed."""
    tokens = torch.randint(5, VOCABULARY, (batch, LENGTH), generator=generator)
    hidden = torch.rand((batch, LENGTH), generator=generator) < 0.15
    return {
        "input_ids": tokens.masked_fill(hidden, MASK_TOKEN),
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(~hidden, IGNORED),
    }


def build() -> tuple[torch.nn.Module, tuple[()], Batch]:
    """Build the model and a batch; `python -m planner plan examples/bert.py:build` calls this."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=LENGTH,
    )
    model = BertForMaskedLM(config).train()
    return model, (), make_batch(torch.Generator().manual_seed(1))


def build_batches() -> tuple[torch.nn.Module, Callable[[int], Batch]]:
    """Build the model and what makes a batch of any size, for `python -m planner max-batch`."""
    return build()[0], lambda batch: make_batch(torch.Generator().manual_seed(1), batch)


def train(model: torch.nn.Module, steps: int) -> list[float]:
    """Train on fresh batches, the same in every call; return the losses."""
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(steps):
        batch = make_batch(generator)
        optimizer.zero_grad(set_to_none=True)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def show_verification(report: Any) -> None:
    """Print what was predicted beside what was measured."""
    rows = (
        (
            "unplanned",
            report.baseline_predicted_dynamic_peak_bytes,
            report.baseline_measured_dynamic_peak_bytes,
        ),
        ("planned", report.predicted_dynamic_peak_bytes, report.measured_dynamic_peak_bytes),
    )
    print("peak of the step   predicted    measured")
    for name, predicted, measured in rows:
        print(f"  {name:<13} {format_bytes(predicted):>12} {format_bytes(measured):>11}")
    share = report.measured_dynamic_peak_bytes / report.baseline_measured_dynamic_peak_bytes
    print(f"  measured: {share:.1%} of the unplanned step, {report.overhead:+.1%} time")
    print(
        f"equal to the unplanned step: loss {report.loss_equal}, gradients {report.gradients_equal}, "
        f"buffers {report.buffers_equal}, random state {report.rng_equal}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", default="60%", help="8GiB, bytes, a share of the unplanned peak, or min")
    parser.add_argument("--plan", default="bert-plan.json", metavar="FILE", help="where to write the plan")
    parser.add_argument("--steps", type=int, default=5, help="steps to train with and without the plan")
    options = parser.parse_args()

    model, args, batch = build()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{type(model).__name__}: {LAYERS} layers, width {WIDTH}, {parameters / 1e6:.1f} M parameters, "
        f"dropout on; batch {BATCH} x {LENGTH} tokens, {torch.get_num_threads()} threads"
    )
    try:
        plan = planner.plan(model, args=args, kwargs=batch, budget=options.budget, optimizer="adamw")
        plan.save(options.plan)
    except planner.PlannerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3 if isinstance(error, planner.InfeasibleBudget) else 2
    print(
        f"planned for {options.budget} in {plan.solver.capture_seconds + plan.solver.solve_seconds:.1f} s, "
        f"written to {options.plan}"
    )
    print(
        f"  peak with parameters and optimizer state: {format_bytes(plan.baseline.peak_bytes)} unplanned, "
        f"{format_bytes(plan.predicted.peak_bytes)} planned; predicted time {plan.overhead:+.1%}"
    )

    report = planner.verify(model, args=args, kwargs=batch, plan=plan)
    show_verification(report)
    for problem in report.problems:
        print(f"problem: {problem}", file=sys.stderr)

    same = True
    if options.steps > 0:
        unplanned = copy.deepcopy(model)
        losses = train(unplanned, options.steps)
        planned_losses = train(plan.apply(model), options.steps)
        expected = unplanned.state_dict()
        same = all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        print(f"{options.steps} steps of AdamW with dropout, from the same seed")
        print(f"  losses unplanned {' '.join(f'{loss:.4f}' for loss in losses)}")
        print(f"  losses planned   {' '.join(f'{loss:.4f}' for loss in planned_losses)}")
        print(f"  weights equal, bit for bit: {same}")
    return 0 if report.ok and same else 1


if __name__ == "__main__":
    sys.exit(main())
