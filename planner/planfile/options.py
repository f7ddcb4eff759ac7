"""What a plan was made with and its file does not hold, to plan again or for other shapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.training_step.step import Outputs


@dataclass(frozen=True, eq=False)
class PlanOptions:
    """Arguments of :func:`planner.plan`; see there.

    Nothing of it is part of the plan: files do not hold it, copies by pickle lose it (losses are often
    not to be pickled), and plans that differ in nothing else are equal.
    """

    loss: Any = None
    outputs: "Outputs" = "held"
    optimizer: Any = None
    device: Any = None
    attention: Any = None
    accumulate: bool | None = None
    costs: Any = "roofline"
    inputs: Any = "unchanged"
    solver: str = "auto"
    time_limit: float = 60
    keep: Sequence[str] = ()
    recompute: Sequence[str] = ()
    checkpoints: Sequence[str] = ()

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, PlanOptions)

    def __hash__(self) -> int:
        return hash(PlanOptions)

    def __reduce__(self) -> tuple[type["PlanOptions"], tuple[()]]:
        return PlanOptions, ()
