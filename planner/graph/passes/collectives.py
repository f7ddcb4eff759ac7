"""The result of a collective and that of waiting for it are one tensor.

Ranks that share a model by tensor parallelism call functional collectives, as `all_reduce`, and wait for
their results by `wait_tensor`. That returns the tensor that it is given; traced, it returns another.
"""

from typing import Any

from torch.fx import GraphModule, Node

from planner._torch import fake, operators
from planner.graph.joint_pass import TraceContext


def wait_in_place(joint: GraphModule, context: TraceContext) -> None:  # noqa: ARG001
    """Let a collective's result lie where that of the call that waits for it lies."""
    for wait in [node for node in joint.graph.nodes if operators.waits(node.target)]:
        made = wait.args[0]
        if not wait.users:
            joint.graph.erase_node(wait)  # the collective then has no reader, and is dead code too
        elif isinstance(made, Node) and sum(operators.waits(user.target) for user in made.users) == 1:
            _set_value(made, fake.alias(wait.meta["val"]))


def _set_value(node: Node, value: Any) -> None:
    node.meta["val"] = value
    whole = node.args[0] if node.args else None
    if operators.takes_item(node.target) and isinstance(whole, Node):  # one of several that were made at once
        position: Any = node.args[1]
        values = list(whole.meta["val"])
        values[position] = value
        whole.meta["val"] = tuple(values)
