"""A training step does not fail with an error of the planner: it runs without the plan, with a warning."""

from planner.errors import InfeasibleBudget, PlanMismatch, warn


def is_meant(error: BaseException | None) -> bool:
    """Whether the user asked for an error: a shape or plan that is refused, or a warning made an error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, PlanMismatch | InfeasibleBudget | Warning):
            return True
        seen.add(id(error))
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return False


def unplanned(what: str, error: Exception) -> None:
    """Warn that something runs without its plan because of an error, and may exceed the budget.

    Raises:
        Exception: ``error``, where it is meant, see :func:`is_meant`.
    """
    if is_meant(error):
        raise error
    lines = str(error).strip().splitlines()
    warn(
        f"{what} runs without the plan, and may exceed the budget: "
        f"{type(error).__name__}: {lines[0] if lines else ''}",
        cause=error,
    )
