"""What can go wrong, as types that a caller can tell apart."""


class PlannerError(Exception):
    """The base of every error that this package raises on purpose."""


class CaptureError(PlannerError):
    """The module's training step could not be turned into a graph."""


class PlanMismatch(PlannerError):
    """A plan was made for another model, or for other inputs, than it is now given."""


class InputsChanged(PlannerError, RuntimeError):
    """What a planned backward reads again was changed in place since the forward."""


class PlanFileError(PlannerError, ValueError):
    """A plan file cannot be read, written, or does not hold a consistent plan."""


class PlanWarning(UserWarning):
    """A planned module runs something that its plan does not cover; what it computes is still right."""


class BudgetError(PlannerError, ValueError):
    """A memory budget is not written in a form that can be understood."""


class InfeasibleBudget(PlannerError):
    """No schedule found fits the budget.

    Attributes:
        minimum_bytes: the least peak that a plan was found for.
        budget_bytes: the peak that was asked for.
    """

    def __init__(self, message: str, *, minimum_bytes: int, budget_bytes: int) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes
        self.budget_bytes = budget_bytes

    def __reduce__(self) -> tuple[object, ...]:
        # The default would lose the keyword-only arguments; worker processes hand errors over pickled.
        return _infeasible_budget, (str(self), self.minimum_bytes, self.budget_bytes)


def _infeasible_budget(message: str, minimum_bytes: int, budget_bytes: int) -> InfeasibleBudget:
    return InfeasibleBudget(message, minimum_bytes=minimum_bytes, budget_bytes=budget_bytes)
