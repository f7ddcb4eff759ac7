"""Are the plans of this checkout those of another revision?

    python benchmarks/compare_plans.py --against <git revision> [--models gpt,bert-large] [--seconds 900]

Plans small versions of the models of `benchmarks/models.py` and the first models of the tests' zoo, with
solvers that always answer the same, in this checkout and in one of the other revision (a git worktree in a
temporary folder). A model that does not fit 75 % of its peak is planned for the least that the solver
reaches. Says where schedules, predicted bytes or digests of graphs differ, and exits with 1 if any do. Each
side runs in a process of its own with its own code, models included; after `--seconds` what both have planned
is compared. Where neither side can plan a model, they agree if both give the same reason.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOLVERS = ("sqrt_n", "chain")
BUDGET = "75%"
FROM_ZOO = 40
"""How many models of the zoo are planned."""


def plans_of(checkout: Path, wanted: list[str], solvers: list[str]) -> None:
    """Print what comes of planning every model with the code of a checkout, each as a line of JSON."""
    sys.path.insert(0, str(checkout))
    import torch

    import planner
    from benchmarks import models
    from tests import zoo

    names = [("frontier", n) for n in models.MODELS] + [("zoo", n) for n in list(zoo.everything())[:FROM_ZOO]]
    assert Path(planner.__file__).is_relative_to(checkout)
    warnings.simplefilter("ignore")
    for solver, (family, name) in itertools.product(solvers, names):
        if wanted and name not in wanted:
            continue
        try:
            model, args, kwargs = zoo.build(name) if family == "zoo" else models.build(name, small=True)
            torch.manual_seed(0)
            plan = partial(planner.plan, model, args, kwargs, loss=zoo.scalar_loss, solver=solver)
            try:
                found = _described(plan(budget=BUDGET))
            except planner.InfeasibleBudget as error:
                found = _described(plan(budget=error.minimum_bytes))
        except Exception as error:
            found = {"refused": f"{type(error).__name__}: {str(error)[:200]}"}
        print(json.dumps([f"{family} {name} {solver}", found]), flush=True)


def _described(plan: Any) -> dict[str, Any]:
    parts = ("predicted", "baseline", "no_recompute")
    return {
        "schedules": [graph.backward for graph in plan.graphs],
        "predicted bytes": {part: getattr(plan, part).peak_bytes for part in parts},
        "predicted seconds": {part: getattr(plan, part).seconds for part in parts},
        "digests": [[graph.structure, graph.fingerprint] for graph in plan.graphs],
        "operations": [[op.name, op.module, op.bytes] for graph in plan.graphs for op in graph.ops],
    }


@contextmanager
def checkout_of(revision: str) -> Iterator[Path]:
    """The files of a git revision, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "other"
        add = ["git", "worktree", "add", "--detach", str(place), revision]
        subprocess.run(add, cwd=ROOT, check=True, capture_output=True)
        try:
            yield place
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(place)], cwd=ROOT, check=True)


def compare(against: str, wanted: list[str], solvers: list[str], seconds: float) -> int:
    """Plan in both checkouts at once, print what differs, and return how many plans do."""
    with checkout_of(against) as other, tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "mine.jsonl", Path(folder) / "theirs.jsonl"]
        sides = [_planned(c, file, wanted, solvers) for c, file in zip((ROOT, other), files, strict=True)]
        end = time.monotonic() + seconds
        for process in sides:
            try:
                process.wait(max(end - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        mine, theirs = map(_read, files)
    return _differences(mine, theirs)


def _planned(checkout: Path, file: Path, wanted: list[str], solvers: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--checkout", str(checkout)]
    command += ["--models", ",".join(wanted), "--solvers", ",".join(solvers)]
    with open(file, "wb") as output:
        return subprocess.Popen(command, cwd=checkout, stdout=output)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True)
    return dict(json.loads(line) for line in lines if line.endswith("\n"))


def _differences(mine: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> int:
    both = [key for key in mine if key in theirs]
    differing = 0
    for key in both:
        fields = {*mine[key], *theirs[key]}
        other = sorted(field for field in fields if mine[key].get(field) != theirs[key].get(field))
        differing += bool(other)
        if other:
            print(f"{key}: other {', '.join(other)}")
        for field in other:
            if field in ("predicted bytes", "predicted seconds", "refused"):
                print(f"    {field}: {theirs[key].get(field)} there, {mine[key].get(field)} here")
    planned = sum("refused" not in mine[key] for key in both)
    print(f"{len(both)} compared, {planned} of them planned; {differing} differ")
    return differing


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Compare the plans of this checkout with another revision's."
    )
    parser.add_argument("--against", help="a git revision")
    parser.add_argument("--models", default="", help="names, separated by commas; all if left out")
    parser.add_argument("--solvers", default=",".join(SOLVERS), help="of these, separated by commas")
    parser.add_argument("--seconds", type=float, default=900, help="how long to plan at most")
    parser.add_argument("--checkout", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = [name for name in options.models.split(",") if name]
    solvers = [name for name in options.solvers.split(",") if name]
    if options.checkout is not None:
        plans_of(options.checkout, wanted, solvers)
        return
    if options.against is None:
        parser.error("--against names the revision to compare with")
    sys.exit(1 if compare(options.against, wanted, solvers, options.seconds) else 0)


if __name__ == "__main__":
    main()
