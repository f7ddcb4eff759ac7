"""Watching that what re-runs read again is as it was in the forward; see :mod:`planner.graph.overwritten`."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from planner._torch import autograd, module_paths, versions
from planner._torch.joint import aot_metadata
from planner.compiled.graph_hook import GraphHook
from planner.errors import InputsChanged
from planner.graph.joint_graph import JointGraph
from planner.graph.overwritten import to_copy
from planner.lowering.partition import Partition, partition
from planner.planfile.plan import PlanRecord


class ReadAgain(GraphHook):
    """Watches that what a planned backward reads again is as it was in the forward.

    Args:
        plan: The plan.
        graph, example_inputs: The captured forward, and what it was captured with.
    """

    def __init__(self, plan: PlanRecord, graph: GraphModule, example_inputs: Sequence[Any]) -> None:
        self._plan, self._graph, self._example_inputs = plan, graph, example_inputs
        self._positions: list[int] = []

    def emitted(self, joint: JointGraph, backward: Sequence[int], packed: Collection[int]) -> Partition:
        """The graphs of a schedule, see :func:`planner.lowering.partition.partition`."""
        joint.to_copy = to_copy(joint, self._example_inputs)
        self._example_inputs = ()  # or the first batch would be held for good
        copying = self._plan.target.inputs == "overwritten"
        halves = partition(joint, backward, copying=copying, packed=packed)
        positions = map(aot_metadata.input_position, halves.read_again)
        count = len(self._graph.graph.find_nodes(op="placeholder"))
        self._positions = sorted(p for p in positions if p is not None and p < count)
        self.watches = bool(self._positions)
        return halves

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        kept = [(i, args[i], versions.version_of(args[i])) for i in self._positions]
        node.register_prehook(lambda _: self._look(kept))

    def _look(self, kept: list[tuple[int, torch.Tensor, int | None]]) -> None:
        for position, tensor, version in kept:
            if version is not None and versions.version_of(tensor) != version:
                raise InputsChanged(self._message(position, tensor))
        if not autograd.graph_is_kept():
            kept.clear()

    def _message(self, position: int, tensor: torch.Tensor) -> str:
        placeholder = self._graph.graph.find_nodes(op="placeholder")[position]
        name, plan = module_paths.source_name(placeholder), self._plan
        shape = "x".join(map(str, tensor.shape)) or "a scalar"
        what = "a tensor between two parts of the forward" if name is None else name
        return (
            f"{what} ({shape}) was changed in place between forward and backward, and the plan for "
            f"{plan.model.class_name} (budget {plan.target.budget_text}) reads it again in the backward, "
            "which no step does without a plan. Change it after backward(), or plan with "
            "inputs='overwritten': the plan then reads copies, and counts them"
        )
