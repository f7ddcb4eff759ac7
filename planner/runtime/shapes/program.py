"""A program: a plan, compiled, and the shapes and paths that it is known to fit."""

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
    """A plan, compiled, with the shapes and paths that are known to fit its memory.

    Attributes:
        plan: The plan.
        planned: The shapes that it was made for.
        run_planned: The compiled forward for these: called with the module, arguments and keyword arguments.
        run_others: The compiled forward for other shapes.
        covered: Shapes that need no further look: they fit, or the user was warned of them. Shapes that are
            nowhere larger than one of these need none either.
        paths: The paths of the forward that the plan has not seen.
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
    """Whether shapes have come that were not planned.

    Compiled code asks it, and PyTorch holds compiled code as long as the module: it must not refer to the
    module.
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
    """The structures of all graphs of a plan."""
    return {*(graph.structure for graph in plan.graphs), *plan.forward_only}
