"""Outputs that a plan takes for dropped say so when backward begins and they are still there."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner import _torch_joint
from planner.budget import format_bytes
from planner.plan_file import Plan
from planner.step import unique_storages


def watch_dropped(
    compiled: Callable[..., Any], outputs: Sequence[int], plan: Plan, warn: Callable[[str], None]
) -> Callable[..., Any]:
    """The callable of a graph, which warns once if outputs that are planned as dropped are held.

    Looked at are outputs that the loss does not use, of models that are one graph: nobody but the caller
    holds those. What the loss uses may be there in any case, saved for backward.

    Args:
        compiled: The callable.
        outputs: Positions of the outputs that the loss does not use.
        plan: The plan.
        warn: Told of what is held.
    """
    if plan.model.outputs != "dropped" or plan.rung != "one-graph" or not outputs:
        return compiled
    told = False

    def run(*args: Any) -> Any:
        before = _torch_joint.nodes_so_far()
        results = compiled(*args)
        node = None if told else _torch_joint.compiled_node(results, before)
        if node is not None:
            unused = [weakref.ref(results[i]) for i in outputs if isinstance(results[i], torch.Tensor)]
            node.register_prehook(lambda _: look(unused))
        return results

    def look(unused: Sequence[weakref.ref[torch.Tensor]]) -> None:
        nonlocal told
        if told or all(reference() is None for reference in unused):
            return
        gc.collect()  # what only garbage of the first capture holds is not held
        alive = [tensor for tensor in (reference() for reference in unused) if tensor is not None]
        if not alive:
            return
        told = True
        held = sum(int(t.untyped_storage().nbytes()) for t in unique_storages(alive))
        warn(
            f"the plan was made with outputs='dropped', but {len(alive)} outputs of the model are still held "
            f"while backward runs: up to {format_bytes(held)} more than predicted. Hand on the loss alone, "
            "as in loss = model(...).loss, or plan with outputs='held'"
        )

    return run
