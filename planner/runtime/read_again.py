"""An error where tensors that a planned backward reads were changed in place since the forward.

These are inputs that re-runs read (:mod:`planner.graph.overwritten`), and results that the plan keeps:
PyTorch hands out views of kept results and does not notice writes to them.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from planner._torch import autograd, fake, module_paths, versions
from planner._torch.execution.host_place import HostPlace
from planner._torch.joint import aot_metadata
from planner.compiled.graph_hook import GraphHook
from planner.errors import InputsChanged
from planner.graph.joint_graph import JointGraph
from planner.graph.overwritten import to_copy
from planner.graph.trace import TracedGraph
from planner.lowering.partition import Partition, partition
from planner.planfile.plan import PlanRecord


class ReadAgain(GraphHook):
    """Compares versions of the tensors that a planned backward reads again with those in the forward.

    Args:
        plan: The plan.
        graph, example_inputs: The captured forward, and the inputs that it was captured with.
        host: Keeps the results that the plan sends to the host; None if it sends none.
    """

    def __init__(
        self,
        plan: PlanRecord,
        graph: GraphModule,
        example_inputs: Sequence[Any],
        host: HostPlace | None = None,
    ) -> None:
        self._plan, self._graph, self._host = plan, graph, host
        # Not the inputs themselves: the hook would hold the first batch for good.
        self._parameters = [isinstance(x, torch.nn.Parameter) for x in example_inputs]
        self._positions: list[int] = []  # of the inputs that only re-runs read
        self._results: list[int] = []  # positions of the results that the plan keeps
        self._outputs: dict[int, int] = {}  # output of the joint graph -> position among the results

    def on_traced(self, traced: TracedGraph) -> None:
        self._outputs = aot_metadata.output_positions(traced.joint, traced.forward_outputs)

    def emitted(
        self,
        joint: JointGraph,
        backward: Sequence[int],
        packed: Collection[int],
        completed: Mapping[int, int],
    ) -> Partition:
        """The graphs of a schedule, see :func:`planner.lowering.partition.partition`."""
        joint.to_copy = to_copy(joint, self._parameters)
        copying = self._plan.target.inputs == "overwritten"
        halves = partition(
            joint, backward, copying=copying, packed=packed, host=self._host, completed=completed
        )
        positions = map(aot_metadata.input_position, halves.read_again)
        count = len(self._graph.graph.find_nodes(op="placeholder"))
        self._positions = sorted(p for p in positions if p is not None and p < count)
        self.watches = bool(self._positions)
        self._results = self._kept_results(halves, joint.forward_outputs)
        return halves

    def _kept_results(self, halves: Partition, count: int) -> list[int]:
        """Positions of the results that the backward reads."""
        outputs: Any = halves.forward.graph.output_node().args[0]
        storages = [
            fake.storage_key(o.meta["val"])
            if isinstance(o, Node) and isinstance(o.meta.get("val"), torch.Tensor)
            else None
            for o in outputs
        ]
        kept = {*storages[count:]} - {None}
        return [self._outputs[i] for i in range(count) if storages[i] in kept and i in self._outputs]

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        kept = [(i, args[i], versions.version_of(args[i])) for i in self._positions]
        node.register_prehook(lambda _: self._look(kept))

    def results(self, node: Any, args: tuple[Any, ...], results: Sequence[Any]) -> Sequence[Any]:
        if node is not None and self._results:
            handed_out = [results[i] for i in self._results if isinstance(results[i], torch.Tensor)]
            shapes = [t.shape for t in handed_out]
            kept = versions.Watched(dict(enumerate(handed_out)))
            node.register_prehook(lambda _: self._look_at_results(shapes, kept))
        return results

    def _look_at_results(self, shapes: Sequence[torch.Size], kept: versions.Watched) -> None:
        for i in kept.written():
            plan, sizes = self._plan, "x".join(map(str, shapes[i])) or "a scalar"
            raise InputsChanged(
                f"a result of a part of the forward ({sizes}) was changed in place before the backward, "
                f"and the plan for {plan.model.class_name} (budget {plan.target.budget_text}) keeps it "
                "for the backward, since the planned step did not change it. Plan the step that changes it "
                "(loss= is a part of it), or change a copy (y = y + 1, not y += 1)"
            )

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
