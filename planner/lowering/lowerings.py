"""From a forward or a backward graph to the function that runs it: the interface, and its implementations."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch.fx import GraphModule

from planner._torch.inductor.fusion_names import Fusion
from planner._torch.joint.aot import BoxedFunction
from planner.lowering.codegen import compile_graph
from planner.lowering.partition import Role, user_outputs
from planner.planfile.schema import BackendName


class Lowering(Protocol):
    """Compiles graphs to functions."""

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
    gradients = role == "backward"
    return compile_graph(module, role, fixed_outputs=fixed, gradients=gradients)


def chosen_lowering(
    backend: BackendName = "eager", options: Mapping[str, Any] | None = None, fusion: Fusion = "in-order"
) -> Lowering:
    """The lowering of a plan's backend.

    Args:
        backend: "inductor" for Inductor's programs; operators are called one by one for all others.
        options: Options of Inductor.
        fusion: Which fusions Inductor may make.
    """
    if backend == "inductor":
        from planner.lowering.inductor import InductorLowering  # Inductor is not imported without need

        return InductorLowering(options or {}, fusion)
    return python_code
