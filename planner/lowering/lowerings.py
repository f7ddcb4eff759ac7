"""From a forward or a backward graph to the function that runs it: the interface, and its implementations."""

from typing import Literal, Protocol

from torch.fx import GraphModule

from planner._torch.joint.aot import BoxedFunction
from planner.lowering.codegen import compile_graph
from planner.lowering.partition import user_outputs

Role = Literal["forward", "backward"]
"""Which half of a step a graph is."""


class Lowering(Protocol):
    """Makes functions of graphs."""

    def __call__(self, module: GraphModule, role: Role) -> BoxedFunction:
        """Compile a graph.

        Args:
            module: A graph of operator calls, see :class:`planner.lowering.partition.Partition`. It may be
                changed.
            role: Which half it is.

        Returns:
            A function of one list. It empties the list, holds nothing longer than the graph uses it, and
            returns the list of outputs.
        """


def python_code(module: GraphModule, role: Role) -> BoxedFunction:
    """Generated Python code that calls the operators one by one, as eager does."""
    fixed = user_outputs(module) if role == "forward" else 0
    return compile_graph(module, role, fixed_outputs=fixed)


LOWERINGS: dict[str, Lowering] = {"python": python_code}
"""By name."""


def chosen_lowering() -> Lowering:
    """The one that planning and training use."""
    return LOWERINGS["python"]
