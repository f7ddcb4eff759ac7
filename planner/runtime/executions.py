"""A graph that runs several times in a step: each time its backward may run something else."""

from collections.abc import Callable, Sequence
from typing import Any

from planner.compiled.calls import Calls


class Executions:
    """The callable of a graph that follows a plan's programs, execution by execution.

    Args:
        programs: The compiled graph of each program.
        order: Which of them each execution in a call of the module runs.
        calls: Counts the executions.
        beyond: Called with the number of planned executions where there are more; these run the last one's.
    """

    def __init__(
        self,
        programs: Sequence[Callable[..., Any]],
        order: Sequence[int],
        calls: Calls,
        beyond: Callable[[int], None],
    ) -> None:
        self._by_execution = [programs[i] for i in order]
        self._calls, self._beyond = calls, beyond

    def __call__(self, *args: Any) -> Any:
        planned = len(self._by_execution)
        execution = self._calls.next_execution(self)
        if execution >= planned:
            self._beyond(planned)
            execution = planned - 1
        return self._by_execution[execution](*args)
