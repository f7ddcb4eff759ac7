"""A graph that runs several times in a step: each run, an *execution*, has a program of its own.

Layers of the same code are graphs of one structure. Dynamo captures each of them, or captures one and runs it
for those that follow. Which of the two it does changes: where a number differs between two layers, it
captures the second one for any number, and from the next step on that capture may run for the first layer
too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.compiled.calls import Calls
from planner.graph.spec import GraphSpec
from planner.planfile.graph_record import GraphRecord
from planner.planfile.plan import PlanRecord

Program = Callable[..., Any]


@dataclass(eq=False)
class Alike:
    """The executions, in a step, of all graphs of one structure.

    Attributes:
        records: The plan's graphs.
        programs: The different programs of their executions.
        order: The program, by number, of each execution in the order of the step.
        of_graph: The places in that order of each graph's executions, by the graph's occurrence.
        last: The place of the last execution in this step that followed the program of its own graph.
        is_disordered: Whether executions have run in another order than planned. From then on all follow
            ``order``.
    """

    records: list[GraphRecord]
    programs: list[GraphRecord]
    order: list[int]
    of_graph: dict[int, list[int]]
    _numbers: dict[Any, int]
    last: int = -1
    is_disordered: bool = False

    def number(self, program: GraphRecord) -> int:
        """The number of a program."""
        return self._numbers[_key(program)]


def _key(program: GraphRecord) -> tuple[Any, ...]:
    packed = tuple(program.packed), tuple(program.completed)
    return tuple(program.backward), packed, GraphSpec.of(program).digest


def alike(plan: PlanRecord, structure: str) -> Alike:
    """The executions that a plan has of the graphs of one structure."""
    numbers = [i for i, graph in enumerate(plan.graphs) if graph.structure == structure]
    runs = [(i, execution) for i in numbers for execution in range(len(plan.graphs[i].executions))]
    if len(numbers) > 1 and plan.step is not None:
        places = plan.step.places()
        if plan.graphs[numbers[0]].forward_length == 0:  # its forward only takes views: backwards alone count
            places.reverse()
        seen = dict.fromkeys((i, execution) for i, execution, _ in places)
        if seen.keys() >= {*runs}:
            runs = [run for run in seen if run[0] in numbers]
    by_graph = {i: plan.graphs[i].by_execution for i in numbers}
    programs: list[GraphRecord] = []
    numbered: dict[Any, int] = {}
    order: list[int] = []
    of_graph: dict[int, list[int]] = {plan.graphs[i].occurrence: [] for i in numbers}
    for i, execution in runs:
        program = by_graph[i][execution]
        number = numbered.setdefault(_key(program), len(programs))
        programs += [program] if number == len(programs) else []
        of_graph[plan.graphs[i].occurrence].append(len(order))
        order.append(number)
    return Alike([plan.graphs[i] for i in numbers], programs, order, of_graph, numbered)


class Executions:
    """The callable of a graph that runs a plan's programs, execution by execution.

    At first it runs the programs of the graph that it was captured for. If it runs more often than that graph
    does, Dynamo runs it for other layers too: from then on it takes the programs in the order of the step. So
    do all graphs of the structure once one of them runs in another order than planned. That happens where the
    first step skipped a layer, which is then captured after the layers that follow it.

    Args:
        plan: The plan's executions of its structure.
        occurrence: The occurrence of the graph that it was captured for.
        programs: The compiled programs, by number.
        compile_: Compiles a further program for arguments; None where all are compiled.
        calls: Counts the executions.
        shared: Called when it begins to run for other layers too, with whether executions of this step have
            run each other's programs.
        beyond: Called with the number of planned executions where there are more; these run the last program.
    """

    def __init__(
        self,
        plan: Alike,
        occurrence: int,
        programs: dict[int, Program],
        compile_: Callable[[int, Sequence[Any]], Program] | None,
        calls: Calls,
        shared: Callable[[bool], None],
        beyond: Callable[[int], None],
    ) -> None:
        self._plan, self._mine, self._programs = plan, plan.of_graph[occurrence], programs
        self._compile, self._calls, self._shared, self._beyond = compile_, calls, shared, beyond
        self._is_shared, self._strayed = len(plan.of_graph) == 1, False

    def __call__(self, *args: Any) -> Any:
        number = self._next()
        program = self._programs.get(number)
        if program is None:
            assert self._compile is not None
            program = self._programs[number] = self._compile(number, args)
        return program(*args)

    def _next(self) -> int:
        """The number of the next program."""
        order = self._plan.order
        position, mine = self._calls.next_execution(self._plan), self._calls.next_execution(self)
        self._strayed = mine > 0 and self._strayed
        beyond = position >= len(order)
        if beyond:
            self._beyond(len(order))
        own = not self._is_shared and not self._plan.is_disordered and mine < len(self._mine)
        if own and (beyond or not self._is_out_of_order(position, self._mine[mine])):
            number = order[self._mine[mine]]
            self._strayed |= beyond or order[position] != number
            return number
        if beyond:
            return order[-1]
        if not self._is_shared:
            self._is_shared = True
            self._shared(self._strayed)
        return order[position]

    def _is_out_of_order(self, position: int, place: int) -> bool:
        """Whether an execution follows one that the plan has at a later place, or at the same."""
        plan = self._plan
        disordered = position > 0 and place <= plan.last
        plan.last = place
        if disordered and len(set(plan.order)) > 1:
            plan.is_disordered = self._strayed = True
        return plan.is_disordered
