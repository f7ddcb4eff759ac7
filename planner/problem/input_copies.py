"""Copies of a graph's inputs: re-runs read them if the step changes the inputs in place."""

from collections.abc import Sequence

from torch.fx import Node

from planner.graph.joint_graph import JointGraph, JointOp
from planner.graph.overwritten import InputReads
from solvers.model.indices import ValueId


class InputCopies:
    """Copies of the inputs of a graph, which re-runs read in their place.

    Attributes:
        values: By input the value of its copy, once it was taken.
    """

    def __init__(self, joint: JointGraph, wanted: bool) -> None:
        self.values: dict[Node, ValueId] = {}
        self._joint, self._reads = joint, InputReads(joint) if wanted else None
        self._before = self._reads.first_readers() if self._reads is not None else {}

    def before(self, op: JointOp) -> list[Node]:
        """The inputs that are copied right before an operation."""
        return [p for p in self._before.get(op.index, ()) if p in self._joint.to_copy]

    def are_read(self, nodes: Sequence[Node]) -> bool:
        """Whether a re-run with such arguments reads copies."""
        return self._reads is not None and any(p in self.values for n in nodes for p in self._reads.of(n))

    def read(self, nodes: Sequence[Node], storages: dict[int, ValueId]) -> tuple[ValueId, ...]:
        """The values that a re-run with such arguments reads."""
        found: list[ValueId] = []
        for node in nodes:
            inputs = () if self._reads is None else self._reads.of(node)
            for source in inputs or (node,):
                if source in self.values:
                    found.append(self.values[source])
                else:
                    found += [storages[s] for s in self._joint.storages_of(source) if s in storages]
        return tuple(dict.fromkeys(found))
