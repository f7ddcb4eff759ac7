"""How long planning and a planned training step take here, against another revision.

    python benchmarks/compare_times.py --against <git revision> [--models gpt,resnet] [--repeats 15]

Small versions of models of `benchmarks/models.py` are planned and trained by two processes, one with the
code of this checkout and one with the other revision's. They take turns, a short piece of work each: a plan
(capture, costs and solve), or some steps of the planned module. Which one goes first alternates. Printed are
medians of process time with one thread, and the median and quartiles of the ratio of two pieces that ran one
after the other. How a process happens to lie in memory moves its time by a percent or two: hence several
pairs of processes. "none" recomputes nothing and compares what surrounds the kernels, "sqrt_n" recomputes.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare_plans import checkout_of

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = {"none": "200%", "sqrt_n": "75%"}
"""By solver: the budget that it plans for."""
STEPS = 5
"""How many training steps are timed at once."""
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 << 30), "OMP_NUM_THREADS": "1"}
"""Environment variables with which memory is reused, so that no time is spent on pages of the system."""


def work(checkout: Path) -> None:
    """Do what each line of the standard input asks for with a checkout's code, and print its seconds."""
    sys.path.insert(0, str(checkout))
    import torch

    import planner
    from benchmarks import models
    from tests import zoo

    assert Path(planner.__file__).is_relative_to(checkout)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    built: dict[str, tuple[Any, ...]] = {}
    trained: dict[tuple[str, str], Callable[[], Any]] = {}

    def planned(name: str, solver: str) -> Any:
        if name not in built:
            torch.manual_seed(0)
            built[name] = models.build(name, small=True)
        model, args, kwargs = built[name]
        return planner.plan(model, args, kwargs, loss=zoo.scalar_loss, budget=BUDGETS[solver], solver=solver)

    def training(name: str, solver: str) -> Callable[[], Any]:
        plan = planned(name, solver)
        torch.manual_seed(0)
        model, args, kwargs = models.build(name, small=True)
        plan.apply(model)

        def run() -> None:
            for _ in range(STEPS):
                model.zero_grad(set_to_none=True)
                zoo.scalar_loss(model(*args, **kwargs)).backward()

        run()
        return run

    for line in sys.stdin:
        kind, name, solver = json.loads(line)
        if kind == "step" and (name, solver) not in trained:
            trained[name, solver] = training(name, solver)
        run = trained[name, solver] if kind == "step" else lambda: planned(name, solver)  # noqa: B023
        begin = time.process_time()
        run()
        print(json.dumps(time.process_time() - begin), flush=True)


class Side:
    """A process that works with the code of one checkout."""

    def __init__(self, checkout: Path) -> None:
        command = [sys.executable, __file__, "--checkout", str(checkout)]
        environment = os.environ | ALLOCATOR | {"PYTHONPATH": str(checkout)}
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, task: tuple[str, str, str]) -> float:
        """Process seconds of a piece of work."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(task), file=self._process.stdin, flush=True)
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


Taken = tuple[list[float], list[float]]
"""The seconds here and there."""


def compare(other: Path, tasks: list[tuple[str, str, str]], repeats: int, pairs: int) -> None:
    """Print the seconds of both checkouts for every piece of work."""
    found: dict[tuple[str, str, str], list[Taken]] = {task: [] for task in tasks}
    for _ in range(pairs):
        sides = Side(ROOT), Side(other)
        for task in tasks:
            found[task].append(_taken(sides, task, repeats))
            _show(task, found[task])
        for side in sides:
            side.close()


def _taken(sides: tuple[Side, Side], task: tuple[str, str, str], repeats: int) -> Taken:
    for side in sides:
        side.seconds(task)  # what happens once
    here, there = [], []
    both = [(here, sides[0]), (there, sides[1])]
    for turn in range(repeats):
        for taken, side in both if turn % 2 else reversed(both):
            taken.append(side.seconds(task))
    return here, there


def _show(task: tuple[str, str, str], runs: list[Taken]) -> None:
    kind, name, solver = task
    scale = 1e3 / (STEPS if kind == "step" else 1)
    here, there = (statistics.median(itertools.chain(*side)) * scale for side in zip(*runs, strict=True))
    turns = [a / b for run in runs for a, b in zip(*run, strict=True)]
    low, middle, high = statistics.quantiles(turns, n=4)
    ratio = f"{middle:.3f}x (quartiles {low:.3f} to {high:.3f}, {len(runs)} pairs of processes)"
    print(f"{kind} {name:8} {solver:8} {here:9.2f} ms, there {there:9.2f} ms: {ratio}", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", help="a git revision")
    parser.add_argument("--models", default="gpt,resnet", help="names, separated by commas")
    parser.add_argument("--work", default="plan,step", help="what is timed, separated by a comma")
    parser.add_argument("--solvers", default=",".join(BUDGETS), help="of these, separated by a comma")
    parser.add_argument("--repeats", type=int, default=15, help="in each pair of processes")
    parser.add_argument("--pairs", type=int, default=3, help="of processes")
    parser.add_argument("--checkout", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.checkout is not None:
        work(options.checkout)
        return
    if options.against is None:
        parser.error("--against names the revision to compare with")
    kinds, names, solvers = (text.split(",") for text in (options.work, options.models, options.solvers))
    with checkout_of(options.against) as other:
        compare(other, list(itertools.product(kinds, names, solvers)), options.repeats, options.pairs)


if __name__ == "__main__":
    main()
