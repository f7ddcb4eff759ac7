"""Operators that are called for their effects."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._higher_order_ops.effects as effects

from planner._torch.compat import of_graphs
from planner._torch.patches import replaced
from planner.errors import CaptureError

BackwardTokenAOTInput, ForwardTokenAOTInput = of_graphs(
    "torch._functorch._aot_autograd.descriptors", "BackwardTokenAOTInput", "ForwardTokenAOTInput"
)


def has_effects(operator: object) -> bool:
    """Whether an operator is registered as one with effects, such as the check of a factorisation."""
    return isinstance(operator, torch._ops.OpOverload) and effects._get_effect(operator) is not None


# PyTorch knows the other overload, whose error has a text, as one that is called for its effect.
torch.fx.node.has_side_effect(torch.ops.aten._assert_async.default)


@contextlib.contextmanager
def without_tokens() -> Iterator[None]:
    """Trace operators with effects as they are written.

    AOTAutograd otherwise orders them by tokens: inputs and outputs of the graph that no caller knows of. Here
    graphs run in the order in which they were traced, and no call with an effect is removed as dead code.
    """
    truth = effects.has_effects

    def only_others(operator: Any) -> bool:
        return truth(operator) and not isinstance(operator, torch._ops.OpOverload)

    with replaced(effects, {"has_effects": only_others}):
        yield


def refuse_tokens(joint: torch.fx.GraphModule) -> None:
    """Refuse a joint graph that has tokens nevertheless.

    Raises:
        CaptureError: It has.
    """
    tokens = (ForwardTokenAOTInput, BackwardTokenAOTInput)
    if any(isinstance(n.meta.get("desc"), tokens) for n in joint.graph.find_nodes(op="placeholder")):
        calls = joint.graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)
        names = ", ".join(sorted({str(call.args[1]) for call in calls}))
        raise CaptureError(
            f"the forward calls {names}, which is run for its effects and cannot be planned: move the call "
            "into a function with @torch.compiler.disable"
        )
