"""An error where gradients that were computed in the forward are asked for twice: the first backward
multiplies them in place."""

from typing import Any

from planner.compiled.graph_hook import GraphHook
from planner.errors import FreedError
from planner.graph.dying_operands import RUNS_ONCE
from planner.graph.trace import TracedGraph


class SecondBackward(GraphHook):
    """Refuses a second backward of a graph whose loss is in pieces with gradients in the forward."""

    def on_traced(self, traced: TracedGraph) -> None:
        self.watches = any(RUNS_ONCE in node.meta for node in traced.joint.graph.nodes)

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        ran: list[bool] = []
        node.register_prehook(lambda _: _look(ran))


def _look(ran: list[bool]) -> None:
    if ran:
        raise FreedError(
            "a second backward (retain_graph=True) of a loss whose gradients the plan computed in the "
            "forward (split='loss'), which the first backward has used up. Add up the losses and call "
            "backward once, or plan with split='none'"
        )
    ran.append(True)
