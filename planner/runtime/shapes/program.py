"""A way to run a module: a plan, compiled, and the shapes and paths that it is known to fit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from planner.planfile.plan import PlanRecord
from planner.runtime.first_forward import OtherPaths

Shapes = dict[str, tuple[int, ...]]
"""Shapes of the tensors among the arguments, by the name of the argument and the path inside it."""

Compiled = Callable[..., Any]


@dataclass
class Program:
    """A way to run the module: a plan, and what has been found to fit its memory.

    Attributes:
        plan: The plan.
        planned: The shapes that it was made for.
        run_planned: The compiled forward for these: called with the module, arguments and keyword arguments.
        run_others: The compiled forward for others.
        covered: Shapes that are known to run as the warnings said; what is nowhere larger than one of
            them does so too.
        paths: What is known of paths of the forward that the plan has not seen.
    """

    plan: PlanRecord
    planned: Shapes
    run_planned: Callable[..., Any]
    run_others: Callable[..., Any]
    covered: list[Shapes]
    paths: OtherPaths

    def run(self, shapes: Shapes) -> Callable[..., Any]:
        """The compiled forward for some shapes."""
        return self.run_planned if shapes == self.planned else self.run_others


class Others:
    """Whether other shapes have come than those that were planned.

    What was compiled asks it, and PyTorch holds that as long as the module: it must not refer to it.
    """

    came = False

    def __call__(self) -> bool:
        return self.came


def covers(known: Mapping[str, tuple[int, ...]], shapes: Shapes) -> bool:
    """Whether shapes are nowhere larger than known ones."""
    return known.keys() >= shapes.keys() and all(
        len(shape) == len(known[name]) and all(a <= b for a, b in zip(shape, known[name], strict=True))
        for name, shape in shapes.items()
    )


def structures_of_plan(plan: PlanRecord) -> set[str]:
    """Structures of all graphs that a plan has seen."""
    return {*(graph.structure for graph in plan.graphs), *plan.forward_only}
