"""An error where a gradient arrives at an output that a plan assumes to be unused."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner._torch.tensors import is_view
from planner._torch.versions import set_version, version_of
from planner.compiled.graph_hook import GraphHook
from planner.errors import PlanMismatch


class UnusedOutputs(GraphHook):
    """Cuts off the outputs that the planned loss does not use, and reports a gradient that arrives after all.

    AOTAutograd would give such an output a full gradient of zeros, and with it parameters that only this
    output depends on, where eager leaves None.

    Args:
        outputs: The positions of these outputs.
        arrived: Called with the position of an output that gets a gradient. Left out: raise an error.
    """

    def __init__(self, outputs: Sequence[int], arrived: Callable[[int], None] | None = None) -> None:
        self._outputs, self._arrived = outputs, arrived or _refuse

    def results(self, node: Any, args: tuple[Any, ...], results: Sequence[Any]) -> Sequence[Any]:
        anchor = next((a for a in args if isinstance(a, torch.Tensor) and a.requires_grad), None)
        if anchor is None or not self._outputs:
            return results
        replaced = list(results)
        for index in self._outputs:
            replaced[index] = _guarded(anchor, replaced[index], functools.partial(self._arrived, index))
        return replaced


def _refuse(_output: int) -> None:
    raise PlanMismatch(
        "a gradient arrives at an output of the model, or at an attribute that its forward set, which the "
        "planned loss did not use. Plan again with loss= a callable that uses the same outputs as the loss "
        "you train with, as in loss=lambda output: output.logits.sum() + model.balance, or plan the function "
        "that computes it, with planner.step; or planner.remove(model). If random numbers or data decide the "
        "path of the forward, it can also be a result inside it that the planned path did not use: plan the "
        "parts that are the same on each path, with regions=, and where chance leaves parts out, as "
        "layerdrop does, plan with its probability at 0"
    )


def _guarded(anchor: torch.Tensor, output: torch.Tensor, arrived: Callable[[], None]) -> torch.Tensor:
    version = version_of(output)
    guarded: torch.Tensor = _Unused.apply(anchor, output, arrived)  # type: ignore[no-untyped-call]
    if version is not None:
        set_version(output, version)  # nothing was written
    return guarded


class _Unused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, output: torch.Tensor, arrived: Callable[[], None]
    ) -> torch.Tensor:
        # The engine calls ``backward`` with None, too: where a later graph uses the output for results that
        # the loss does not use. With zeros instead of None that would look like a gradient.
        ctx.set_materialize_grads(False)
        ctx.arrived = arrived
        # Marked as written in place. Otherwise the result would be a view, which the user could not write to.
        if not is_view(output):
            ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if gradients[0] is not None:
            ctx.arrived()
        return None, None, None
