"""A training step does not fail by an error of the planner: it runs without the plan, with a warning."""

from planner.errors import InfeasibleBudget, PlanMismatch, warn
from planner.training_step.user_lines import line_of

PLAN_WITH_THESE = (
    "Call planner.plan(model, args) with such inputs, which makes a plan for them or says why there is none; "
    "planner.remove(model) turns this one off"
)
"""The next step for the user if inputs that were not seen before have no plan."""


def is_meant(error: BaseException | None) -> bool:
    """Whether the user asked for an error: a shape or plan that is refused, or a warning made an error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, PlanMismatch | InfeasibleBudget | Warning):
            return True
        seen.add(id(error))
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return False


def warn_unplanned(what: str, error: Exception, do: str) -> None:
    """Warn that a step, or a part of it, runs without its plan because of an error.

    Args:
        what: The step or part, the subject of the warning.
        error: The error. Its traceback goes to the log, at the level of DEBUG.
        do: The next step for the user, as sentences of their own.

    Raises:
        Exception: ``error``, where the user asked for it, see :func:`is_meant`.
    """
    if is_meant(error):
        raise error
    kind, lines = type(error).__name__, str(error).strip().splitlines()
    why = ": ".join([*[kind] * (not kind.startswith("_")), *lines[:1]])
    line = line_of(error)
    where = "" if line is None else f", at {line}"
    warn(f"{what} runs without the plan, and may exceed the budget: {why}{where}. {do}", cause=error)
