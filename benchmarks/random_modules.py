"""Plans modules of random operations, and compares what they leave and take with the unplanned step.

    python benchmarks/random_modules.py [--kind sequences] [--first 0] [--count 100] [--device cuda]
                                        [--backend replay] [--json]

Each module follows from its seed (see ``tests/random_modules.py``). It is planned for a budget that is random
as well. Its step is verified bit for bit, two more are compared, and the peaks of the planned and of the
unplanned step with what was predicted, to the byte. Where the plan itself says that gradients may differ in
the last bits, they may. What is found is shown, with the module's code, and the exit code is 1.
"""

import argparse
import copy
import json
import random
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from planner.choices import BackendChoice
from planner.planning.options import PlanOptions
from tests.random_modules import random_module
from tests.random_operations import SHAPES, Kind

_ORDER = "added up in another order"
"""What plans say of gradients that may differ in the last bits."""


def loss_of(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A loss of all that a random module returns."""
    return torch.stack([output.square().mean() for output in outputs]).sum()


def found_in(seed: int, kind: Kind, backend: BackendChoice = PlanOptions.backend) -> list[str] | None:
    """What is wrong with the plan of a random module, a line each; None where it has no gradients."""
    model, _ = random_module(seed, kind)
    x = torch.randn(SHAPES[kind])
    before = copy.deepcopy(model)
    if not (loss := loss_of(before(x))).requires_grad or not loss.isfinite():
        return None
    try:
        loss.backward()
    except RuntimeError:  # it writes over what its backward reads
        return None
    del before, loss
    draws = random.Random(seed)
    budget, outputs = draws.choice(["min", "60%", "100%"]), draws.choice(["held", "dropped"])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", planner.PlanWarning)
        try:
            plan = planner.plan(model, (x,), loss=loss_of, budget=budget, outputs=outputs, backend=backend)
        except planner.InfeasibleBudget:
            plan = planner.plan(model, (x,), loss=loss_of, budget="min", outputs=outputs, backend=backend)
        report = planner.verify(model, (x,), plan=plan, loss=loss_of, repeats=0)
        found = [*report.problems, *_differences(model, plan, x)]
    if any(_ORDER in note for note in plan.notes):
        found = [problem for problem in found if "differs" not in problem]
    for what, measured, predicted in (
        ("step", report.measured_dynamic_peak_bytes, report.predicted_dynamic_peak_bytes),
        (
            "step without a plan",
            report.baseline_measured_dynamic_peak_bytes,
            report.baseline_predicted_dynamic_peak_bytes,
        ),
    ):
        if measured != predicted:
            found.append(f"the {what} takes {measured:,} bytes, and {predicted:,} were predicted")
    said = [str(w.message) for w in warned if issubclass(w.category, planner.PlanWarning)]
    return found + [text for text in said if _ORDER not in text]


def _differences(model: torch.nn.Module, plan: planner.Plan, x: torch.Tensor) -> list[str]:
    """The gradients that differ in two steps one after the other, from those of a module without the plan."""
    plain, planned = copy.deepcopy(model), plan.apply(copy.deepcopy(model))
    found = []
    for step in range(2):
        for one in (plain, planned):
            torch.manual_seed(step)
            one.zero_grad()
            loss_of(one(x)).backward()
        for (name, a), b in zip(plain.named_parameters(), planned.parameters(), strict=True):
            if not _are_equal(a.grad, b.grad):
                found.append(f"gradient of {name} differs in step {step + 1}")
    return found


def _are_equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kind", choices=[*SHAPES], default="sequences")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="how many modules")
    parser.add_argument("--device", default="cpu", help="where they run: cpu, cuda")
    parser.add_argument(
        "--backend", choices=get_args(BackendChoice), default=PlanOptions.backend, help="what follows plans"
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON for each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_device(options.device)
    console, ran, wrong = Console(stderr=True), 0, 0
    seeds = range(options.first, options.first + options.count)
    for seed in track(seeds, "planning modules", console=console):
        try:
            found = found_in(seed, options.kind, options.backend)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        torch.compiler.reset()
        ran, wrong = ran + (found is not None), wrong + bool(found)
        if options.json:
            print(json.dumps({"seed": seed, "kind": options.kind, "found": found}), flush=True)
        elif found:
            code = random_module(seed, options.kind)[1]
            console.print(f"seed {seed}:", *found, code, sep="\n", markup=False, highlight=False)
    console.print(f"{ran} modules, something found in {wrong}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
