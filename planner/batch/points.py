"""The results of a search for the largest batch: batches, and those among which to choose."""

from dataclasses import asdict, dataclass
from typing import Any

from planner.user_plan import Plan


@dataclass(frozen=True)
class BatchPoint:
    """One batch, with the fastest plan found for it, or without a plan.

    Attributes:
        batch: The batch.
        total_bytes: Bytes that the device must have for the whole step.
        allocated_bytes: The most bytes that are allocated.
        reserved_bytes: Bytes that a GPU's allocator reserves for these, workspaces of libraries included.
        seconds: Predicted time of forward, backward and the optimizer's step.
        samples_per_second: Batch over seconds.
        overhead: Time of forward and backward per sample, over that of the largest unplanned batch, as it is
            or as it is captured, whichever takes longer: 0.29 is 29 % slower. Over the same batch without
            recomputation where no unplanned batch fits.
        captured: Whether the step was captured at this batch, not estimated from others.
        planned: Whether it is a planned step.
    """

    batch: int
    total_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    seconds: float
    samples_per_second: float
    overhead: float
    captured: bool
    planned: bool = True


@dataclass(frozen=True)
class BatchChoice:
    """A batch that one may want, and why.

    Attributes:
        name: "no plan", "fastest", "largest at +15%" or "largest at any price".
        point: The batch.
        max_overhead: The most extra time per sample that was allowed; None for any.
    """

    name: str
    point: BatchPoint
    max_overhead: float | None = None


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch within a budget, and what else there is to choose from.

    Attributes:
        batch: The largest batch at the overhead that was allowed.
        plan: The plan for it.
        budget_bytes: The budget that bounded it.
        largest: The largest batch's figures.
        unplanned: The largest batch that fits without a plan; None where not even one sample does.
        fastest: The batch of most samples a second of all that were looked at; often that is `unplanned`.
        points: The planned batches that were found to fit, ascending.
        captures: How often the step was captured.
        choices: No plan, the fastest, and the largest at several overheads. All but `largest` may be
            estimates, a few percent below the largest that there is.
    """

    batch: int
    plan: Plan
    budget_bytes: int
    largest: BatchPoint
    unplanned: BatchPoint | None
    fastest: BatchPoint
    points: list[BatchPoint]
    captures: int
    choices: list[BatchChoice]

    @property
    def ratio(self) -> float | None:
        """How many times the unplanned batch the planned one is; None where nothing fits unplanned."""
        return self.batch / self.unplanned.batch if self.unplanned else None

    def to_dict(self) -> dict[str, Any]:
        """Everything but the plan, as plain data."""
        return {
            "batch": self.batch,
            "ratio": self.ratio,
            "budget_bytes": self.budget_bytes,
            "unplanned": None if self.unplanned is None else asdict(self.unplanned),
            "fastest": asdict(self.fastest),
            "choices": [asdict(choice) for choice in self.choices],
            "points": [asdict(point) for point in self.points],
            "captures": self.captures,
        }


def named(max_overhead: float | None) -> str:
    """The name of the largest batch at an overhead."""
    return "largest at any price" if max_overhead is None else f"largest at +{100 * max_overhead:.3g}%"
