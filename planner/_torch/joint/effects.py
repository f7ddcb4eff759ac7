"""Operators that are called for their effects."""

import torch
import torch._higher_order_ops.effects as effects

from planner.errors import CaptureError


def has_effects(operator: object) -> bool:
    """Whether an operator is registered as one with effects, such as the check of a factorisation."""
    return isinstance(operator, torch._ops.OpOverload) and effects._get_effect(operator) is not None


# PyTorch knows the other overload, whose error has a text, as one that is called for its effect.
torch.fx.node.has_side_effect(torch.ops.aten._assert_async.default)


def refuse_effects(graph: torch.fx.GraphModule) -> None:
    """Refuse a traced graph that calls operators with effects.

    AOTAutograd orders them by tokens: inputs and outputs of the graph that no caller knows of.

    Raises:
        CaptureError: It does.
    """
    calls = graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)
    if names := ", ".join(sorted({str(call.args[1]) for call in calls})):
        raise CaptureError(
            f"the forward calls {names}, which is run for its effects and is left to replays: plan with "
            "backend='replay', or leave backend= out, or move the call into a function with "
            "@torch.compiler.disable"
        )
