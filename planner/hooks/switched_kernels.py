"""A warning, or an error, where switches of PyTorch's kernels change between a forward and its backward.

Re-runs in the backward would take other kernels than the first run, and round differently.
"""

from collections.abc import Callable
from typing import Any

import torch

from planner._torch.tracing.definitions import DETERMINISTIC, kernel_switches, switched
from planner.compiled.graph_hook import GraphHook, HookContext
from planner.errors import PlanMismatch


class SwitchedKernels(GraphHook):
    """Compares the switches in the forward and in the backward of one planned graph.

    Args:
        recomputes: Whether the plan computes anything again.
        warn: Called, once, if it does so with other switches.
    """

    watches = True

    def __init__(self, recomputes: bool, warn: Callable[[str], None]) -> None:
        self._recomputes, self._warn = recomputes, warn
        self._warned = False

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        before = kernel_switches()
        node.register_prehook(lambda _: self._compare(before))

    def _compare(self, before: tuple[object, ...]) -> None:
        now = kernel_switches()
        if now == before:
            return
        changed = switched(before, now)
        if DETERMINISTIC in changed and torch.are_deterministic_algorithms_enabled():  # as PyTorch refuses it
            raise PlanMismatch(
                f"{DETERMINISTIC}(True) was called between the forward and the backward of a planned module, "
                "whose backward was made before. Call it before the forward, or use planner.remove(model)"
            )
        if self._recomputes and not self._warned:
            self._warned = True
            self._warn(
                f"{', '.join(changed)} was changed between the forward and the backward of a planned module: "
                "recomputed values may differ in the last bits, and gradients with them. Change it before "
                "the forward or after the backward"
            )


def hook(context: HookContext) -> SwitchedKernels:
    """A hook for every graph; it warns the user."""
    return SwitchedKernels(context.plan.recomputed_operations > 0, context.warn)
