"""Which models of the zoo need which correction that graphs make where a forward is more than one graph.

    python benchmarks/needed.py [--models hf_bert,hf_mixtral] [--regions] [--out out/needed.md]

Each model is captured as ``backend="auto"`` captures it, or by regions, and counted is where a correction had
something to do. One that no model needs is a candidate to be left to replays.
"""

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planner._torch.tracing.breaks import break_patches, calls_left_out
from planner.capture import capture
from planner.capture.capture import Most
from planner.capture.graphs import graph_runner, runners
from planner.errors import PlannerError
from planner.graph.passes import absent_gradients
from planner.planning.one_backend import prepare_for_backend
from planner.planning.options import PlanOptions
from planner.planning.prepare import MOST_GRAPHS, MOST_OPERATIONS
from planner.training_step.step import Step
from tests import zoo

_COUNTED: dict[str, tuple[Any, str, Callable[[Any], object]]] = {
    "views taken outside": (runners, "views_outside", lambda found: found is not None),
    "per-use gradients": (capture, "ask_for_per_use_gradients", bool),
    "copies of what the forward overwrites": (graph_runner.GraphRunner, "written_inputs", bool),
    "gradients inside of the forward": (graph_runner, "differentiated_inputs", bool),
    "gradients that never arrive": (absent_gradients, "leave_out", lambda _: True),
}
"""Where each does its work, and whether what that returned was anything."""


def counted(hits: Counter[str]) -> None:
    """Have corrections count, for the rest of the process, where they had something to do."""

    def counting(function: Any, name: str, had: Callable[[Any], object]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            hits[name] += bool(had(found))
            return found

        return call

    for name, (owner, attribute, had) in _COUNTED.items():
        setattr(owner, attribute, counting(getattr(owner, attribute), name, had))
    for owner in (calls_left_out, break_patches):
        end = owner.end_graph

        def ending(kind: str, why: str, end: Callable[[str, str], None] = end) -> None:
            hits[f"a graph ends at {kind}"] += 1
            end(kind, why)

        vars(owner)["end_graph"] = ending


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=",".join(zoo.everything()))
    parser.add_argument("--regions", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    hits, needed = Counter[str](), dict[str, list[str]]()
    counted(hits)
    options = PlanOptions(costs="roofline", backend="eager", regions="auto" if given.regions else None)
    most = None if given.regions else Most(MOST_GRAPHS, MOST_OPERATIONS)
    captured = 0
    for model in given.models.split(","):
        hits.clear()
        module, args, kwargs = zoo.build(model)
        try:
            prepared = prepare_for_backend(module, Step(args, kwargs, zoo.scalar_loss), options, most=most)
        except PlannerError as error:
            sys.stderr.write(f"{model}: {str(error)[:100]}\n")
            continue
        if prepared.captured.eager_operations and not given.regions:
            continue  # "auto" replays it
        captured += 1
        for name, count in hits.items():
            if count:
                needed.setdefault(name, []).append(model)
        torch.compiler.reset()
    for name in _COUNTED:
        needed.setdefault(name, [])
    rows = [f"| {name} | {len(models)} | {', '.join(models)} |" for name, models in sorted(needed.items())]
    table = "\n".join(["| what graphs need | models | which |", "|---|---:|---|", *rows])
    text = f"{captured} models captured as graphs.\n\n{table}\n"
    if given.out is None:
        sys.stdout.write(text)
    else:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
