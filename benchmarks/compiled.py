"""Ways to train under a memory budget, compiled and not: measured peaks and step times of one small model.

    OMP_NUM_THREADS=1 python benchmarks/compiled.py [--dropout 0.1] [--layers 4] [--width 128]
        [--words 64] [--batch 8] [--budgets 80 60 40 min] [--ratios 0.5 0.2 0.0] [--repeats 7]
        [-o docs/results/compiled.md]

Peaks are over entry, from the allocator's own events; times are medians of interleaved steps, in process
time, one thread. Gradients are compared with those of the step in double precision from the same seed: the
error of a way is the most that an element is off, relative to the largest gradient of its parameter. Where
dropout is on, only ways that draw eager's numbers can be compared: Inductor runs with ``fallback_random``.
Percentages of the plans are of eager's peak, parameters included.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from planner.verification.measure import measure_peak, time_steps
from tests.zoo import GPT

SEED = 11
Run = Callable[[], Any]


def gpt(options: argparse.Namespace) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model and its inputs."""
    torch.manual_seed(0)
    model = GPT(
        words=options.vocabulary, width=options.width, heads=4, layers=options.layers, context=options.words,
        dropout=options.dropout,
    )  # fmt: skip
    words = torch.randint(0, options.vocabulary, (2, options.batch, options.words))
    return model.train(), (words[0], words[1])


class Checkpointed(nn.Module):
    """A block whose forward runs again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def stepped(model: Any, args: tuple[Any, ...]) -> Run:
    """A training step from the same seed each time."""

    def run() -> Any:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        loss = model(*args)
        loss.backward()
        return loss

    return run


def ways(options: argparse.Namespace) -> Iterator[tuple[str, Run, nn.Module, int | None]]:
    """Each way by name: its step, run once already, the module that has the gradients, and its prediction."""
    model, args = gpt(options)
    inductor = {"fallback_random": True}

    def ready(name: str, call: Any, module: nn.Module, predicted: int | None = None) -> Any:
        run = stepped(call, args)
        run()
        return name, run, module, predicted

    yield ready("eager", model, model)
    compiled = copy.deepcopy(model)
    yield ready("Inductor", torch.compile(compiled, options=inductor), compiled)
    for ratio in options.ratios:
        module = copy.deepcopy(model)
        with functorch_config.patch(activation_memory_budget=ratio):
            torch.compiler.reset()
            row = ready(f"Inductor, activation_memory_budget {ratio:g}",
                        torch.compile(module, options=inductor), module)  # fmt: skip
        yield row
    module = copy.deepcopy(model)
    module.blocks = nn.ModuleList(Checkpointed(block) for block in module.blocks)  # type: ignore[union-attr]
    torch.compiler.reset()
    yield ready("Inductor, checkpoint per block", torch.compile(module, options=inductor), module)
    for budget in options.budgets:
        text = budget if budget == "min" else f"{budget}%"
        for backend, name in (("eager", "eager"), ("inductor", "Inductor")):
            module = copy.deepcopy(model)
            try:
                plan = planner.plan(module, args, budget=text, backend=backend)  # type: ignore[arg-type]
            except planner.InfeasibleBudget as error:
                print(f"{name} + plan {text}: {error}", file=sys.stderr)
                continue
            plan.apply(module)
            yield ready(f"{name} + plan {text}", module, module, plan.predicted.dynamic_peak_bytes)


def exact(options: argparse.Namespace) -> list[torch.Tensor]:
    """Gradients in double precision."""
    model, args = gpt(options)
    stepped(model.double(), args)()
    return gradients(model)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Copies of them, in the order of the parameters."""
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def error_of(found: list[torch.Tensor], true: list[torch.Tensor]) -> float:
    """The most that an element is off, relative to the largest of its parameter's gradient."""
    return max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in zip(found, true, strict=True)
    )


def measured(options: argparse.Namespace) -> list[str]:
    """Lines of a Markdown table."""
    true, names, runs, rows = exact(options), [], [], []
    for name, run, module, predicted in ways(options):
        run()
        error = error_of(gradients(module), true)

        def fresh(run: Run = run, module: nn.Module = module) -> Any:
            module.zero_grad(set_to_none=True)
            return run()

        module.zero_grad(set_to_none=True)
        peak = measure_peak(fresh, "cpu").peak_bytes
        module.zero_grad(set_to_none=True)
        names.append(name)
        runs.append(fresh)
        rows.append((peak, predicted, error))
        print(
            f"{name}: {peak:,} bytes, predicted {predicted}, error {error:.1e}", file=sys.stderr, flush=True
        )
    seconds = [sorted(taken)[len(taken) // 2] for taken in time_steps(runs, options.repeats)]
    lines = [
        "| way | peak, MiB | predicted, MiB | step, ms | of eager's | error of gradients |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, (peak, predicted, error), taken in zip(names, rows, seconds, strict=True):
        promised = "" if predicted is None else f"{predicted / 2**20:.2f}"
        wrong = " (wrong)" if error > 1e-2 else ""
        lines.append(
            f"| {name} | {peak / 2**20:.2f} | {promised} | {1e3 * taken:.1f} | {taken / seconds[0]:.2f} | "
            f"{error:.1e}{wrong} |"
        )
    return lines


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dropout", type=float, default=0.1)
    for name, default in (("layers", 4), ("width", 128), ("words", 64), ("batch", 8), ("vocabulary", 200),
                          ("repeats", 7)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budgets", nargs="*", default=["80", "60", "40", "min"])
    parser.add_argument("--ratios", nargs="*", type=float, default=[0.5, 0.2, 0.0])
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    lines = measured(options)
    print("\n".join(lines))
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
