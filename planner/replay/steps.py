"""The program of a plan as this process follows it: its operators, and what has been said of it."""

from typing import Any

from planner.errors import warn
from planner.replay import masks
from planner.replay.program import Program


class Steps:
    """The program of a plan, with the operators of this process in the place of their names."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.calls, self.saves = program.calls, program.saves
        self._told: set[str] = set()
        self.grad, self.saved_bytes = program.grad, program.saved_bytes
        self.names, self.begun = program.operators, program.begun
        self.operators: list[Any] = [None] * len(program.operators)  # as they are first met
        self.asks = frozenset(program.runs) | frozenset(program.free) | program.over
        self.bits = frozenset(program.bits.values())
        self.in_order = sorted(program.order, key=lambda save: program.order[save])
        self.masks = {
            slot
            for slot in program.bits
            if masks.is_noise([program.operators[p] for p in program.makers.get(slot, ())])
            or len(program.makers.get(slot, ())) == 1
        }

    def tell_of_larger(self, size: int, planned: int) -> None:
        """Say, once, that data or something else sets sizes."""
        self.tell_once(
            "larger",
            f"a tensor that autograd saves takes {size:,} bytes instead of {planned:,}, although the inputs "
            "have the planned shapes: data or something else in the model set sizes, and the step may take "
            "more than predicted. Plan it where it takes most, or for a lower budget",
        )

    def tell_once(self, of: str, text: str) -> None:
        """Warn, once of each."""
        if of not in self._told:
            self._told.add(of)
            warn(text)

    def is_expected(self, position: int, func: Any) -> bool:
        """Whether an operator is the one of a position."""
        if str(func) != self.names[position]:
            return False
        self.operators[position] = func
        return True
