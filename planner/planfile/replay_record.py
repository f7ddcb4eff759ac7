"""How the calls of a step are put together, for plans that are followed by replaying operators.

With it a plan is followed where nothing was captured: calls are counted, and what a call reads and makes is
looked up by its position. Values are numbered as in :class:`planner.planfile.step_record.StepRecord`.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from planner.planfile.schema import MOST_OPS, InconsistentError, Listed, Name, Record
from planner.planfile.step_record import MOST_READS, Counts, Indices

OrNone = Annotated[Listed[Annotated[int, Field(ge=-1, lt=MOST_OPS)]], Field(max_length=MOST_READS)]


class ReplayRecord(Record):
    """The calls of operators in the module's forward, views left out, and what autograd saves of them."""

    operators: Listed[Name] = Field(max_length=MOST_OPS, description="as in aten.addmm.default, by position")
    ids: OrNone = Field(description="for each position the operation of the plan's graph; -1: none")
    operand_counts: Counts = Field(description="how many tensors each call is given")
    operands: OrNone = Field(description="the values that they lie in; -1: they were there before the step")
    result_counts: Counts = Field(description="how many tensors each call returns")
    results: OrNone = Field(description="the values that they are, where the call makes them; -1: none")
    written_counts: Counts = Field(description="how many tensors each call writes")
    written: OrNone = Field(description="the values that they lie in; -1: none")
    saves: OrNone = Field(
        description="for each tensor that autograd saves, in order, its value, where it can be made again; "
        "-1: it is kept"
    )
    begun: Counts = Field(description="for each entry of `saves`, how many calls have begun by then")
    saved_bytes: Counts = Field(
        description="for each entry of `saves`, the bytes of its storage; 0: it was there before the step"
    )
    grad_switches: Indices = Field(
        description="the calls, by position, where gradients are switched off and on, by turns",
    )
    asked: Indices = Field(description="positions in `saves`, in the order in which the backward reads them")
    entries: Indices = Field(description="for each of `asked`, the id of the graph's operation that reads it")
    written_over: Indices = Field(default=[], description="those of `asked` that autograd's node writes over")

    def __repr__(self) -> str:
        return f"<ReplayRecord: {len(self.operators)} calls, {len(self.saves)} saved tensors>"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        count = len(self.operators)
        for name, expected in (
            ("ids", count),
            ("operand_counts", count),
            ("operands", sum(self.operand_counts)),
            ("result_counts", count),
            ("results", sum(self.result_counts)),
            ("written_counts", count),
            ("written", sum(self.written_counts)),
            ("begun", len(self.saves)),
            ("saved_bytes", len(self.saves)),
            ("entries", len(self.asked)),
        ):
            found = len(getattr(self, name))
            if found != expected:
                raise InconsistentError(f"{found} entries where the others ask for {expected}", name)
        made = [value for value in self.results if value >= 0]
        if len(set(made)) != len(made):
            raise InconsistentError("a value is made twice", "results")
        if sorted(self.begun) != self.begun:
            raise InconsistentError("it must not decrease: it counts calls", "begun")
        switches = self.grad_switches
        if sorted(set(switches)) != switches or max(switches, default=-1) >= max(count, 1):
            raise InconsistentError("expected ascending positions of calls", "grad_switches")
        largest = max(self.asked, default=-1)
        if largest >= len(self.saves):
            raise InconsistentError(f"{largest} is not below {len(self.saves)}", "asked")
        if not set(self.written_over) <= set(self.asked):
            raise InconsistentError("one of them is not in `asked`", "written_over")
        return self
