"""The program of a plan as this process follows it: its operators, and the warnings that were given."""

from typing import Any

from planner.errors import warn
from planner.replay import masks
from planner.replay.program import Program


class LoadedProgram:
    """The program of a plan, with the operators of this process in the place of their names.

    Attributes:
        operators: By position; None until a call has matched the name.
        bits: The slots of the bits of packed masks.
        in_order: The saves of ``asking_order``, in that order.
        masks: The slots of masks that this version can pack.
        kept_as_is: By save, whether it is kept and nothing is done for it in the backward.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.calls, self.saves = program.calls, program.saves
        self._told: set[str] = set()
        self.grad, self.saved_bytes = program.grad, program.saved_bytes
        self.names, self.begun = program.operators, program.begun
        self.operators: list[Any] = [None] * len(program.operators)
        asks = frozenset(program.runs) | frozenset(program.free) | program.written_over
        self.kept_as_is = [slot < 0 and save not in asks for save, slot in enumerate(program.saves)]
        self.bits = frozenset(program.bits.values())
        self.in_order = sorted(program.asking_order, key=lambda save: program.asking_order[save])
        self.masks = {
            slot
            for slot in program.bits
            if masks.is_noise([program.operators[p] for p in program.makers.get(slot, ())])
            or len(program.makers.get(slot, ())) == 1
        }

    def tell_of_larger(self, size: int, planned: int) -> None:
        """Warn, once, of a saved tensor that is larger than planned."""
        self.tell_once(
            "larger",
            f"a tensor that autograd saves takes {size:,} bytes instead of {planned:,}, although the inputs "
            "have the planned shapes: data or something else in the model set sizes, and the step may take "
            "more than predicted. Plan it where it takes most, or for a lower budget",
        )

    def tell_once(self, key: str, text: str) -> None:
        """Warn, once for each key."""
        if key not in self._told:
            self._told.add(key)
            warn(text)

    def is_expected(self, position: int, func: Any) -> bool:
        """Whether an operator is the one of a position, by name. Later steps compare identities."""
        if str(func) != self.names[position]:
            return False
        self.operators[position] = func
        return True
