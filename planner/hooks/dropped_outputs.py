"""A warning where outputs that a plan assumes to be dropped still exist when backward begins."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner.compiled.graph_hook import GraphHook, HookContext
from planner.planfile.budget import format_bytes
from planner.planfile.plan import PlanRecord
from planner.training_step.step import unique_storages


class DroppedOutputs(GraphHook):
    """Warns once if the caller still holds outputs, while backward runs, that the plan assumes to be dropped.

    It checks the outputs that the loss does not use, of models that are one graph: nobody but the caller
    holds these. Autograd may hold the other outputs.

    Args:
        outputs: Positions of the outputs that the loss does not use.
        plan: The plan.
        warn: Called, once, with a text that says how much is held.
    """

    def __init__(self, outputs: Sequence[int], plan: PlanRecord, warn: Callable[[str], None]) -> None:
        # A stage of a pipeline holds its outputs until its backward has run, and its plan counts them.
        alone = plan.coverage == "one-graph" and plan.target.in_flight is None
        dropped = plan.model.outputs == "dropped" and alone
        self._outputs = outputs if dropped else ()
        self._warn = warn
        self._warned = False

    def results(self, node: Any, args: tuple[Any, ...], results: Sequence[Any]) -> Sequence[Any]:
        if node is not None and self._outputs and not self._warned:
            tensors = [results[i] for i in self._outputs if isinstance(results[i], torch.Tensor)]
            unused = [weakref.ref(tensor) for tensor in tensors]
            node.register_prehook(lambda _: self._look(unused))
        return results

    def _look(self, unused: Sequence[weakref.ref[torch.Tensor]]) -> None:
        if self._warned or all(reference() is None for reference in unused):
            return
        gc.collect()  # reference cycles that the capture left hold nothing for the caller
        alive = [tensor for tensor in (reference() for reference in unused) if tensor is not None]
        if not alive:
            return
        self._warned = True
        held = sum(int(t.untyped_storage().nbytes()) for t in unique_storages(alive))
        self._warn(
            f"the plan was made with outputs='dropped', but {len(alive)} outputs of the model are still held "
            f"while backward runs: up to {format_bytes(held)} more than predicted. Hand on the loss alone, "
            "as in loss = model(...).loss, or plan with outputs='held'"
        )


def hook(context: HookContext) -> DroppedOutputs:
    """A hook for the outputs that the plan's loss does not use."""
    return DroppedOutputs(context.unused_outputs, context.plan, context.warn)
