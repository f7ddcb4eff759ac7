"""The inputs of a forward that re-runs read: arguments, buffers and parameters.

Eager's backward reads only those inputs that autograd saved. A re-run of an operation reads its inputs once
more, and gets their contents of that moment. A plan assumes that nobody changes them until the backward; a
change that PyTorch counts is an error that says so. Planned with ``inputs="overwritten"``, re-runs read
copies, which the forward takes and the plan counts.
"""

from collections.abc import Sequence
from typing import get_args

import torch
from torch.fx import Node

from planner._torch import fake
from planner._torch.joint import aot_metadata
from planner.choices import InputsAre
from planner.errors import PlannerError
from planner.graph.joint_graph import JointGraph


class InputsError(PlannerError, ValueError):
    """The argument ``inputs=`` has neither of the two values."""


def checked_inputs(inputs: str) -> InputsAre:
    """The argument ``inputs=``, checked.

    Raises:
        InputsError: It has neither of the two values.
    """
    if not isinstance(inputs, str) or inputs not in get_args(InputsAre):
        raise InputsError(f"inputs={inputs!r}: expected {' or '.join(map(repr, get_args(InputsAre)))}")
    return inputs  # type: ignore[return-value]


class InputReads:
    """Which inputs of the forward a joint graph's nodes are, or are views of, but for overwritten ones.

    Args:
        joint: The graph.
    """

    def __init__(self, joint: JointGraph) -> None:
        self._joint = joint
        self._of: dict[Node, tuple[Node, ...]] = {}
        overwritten = {joint.primals[i] for i in joint.mutated if i < len(joint.primals)}
        for node in joint.primals:
            if isinstance(node.meta.get("val"), torch.Tensor) and node not in overwritten:
                self._of[node] = (node,)
        for node in joint.graph.nodes:
            if joint.is_view(node):
                sources = [n for n in node.all_input_nodes if not joint.is_size(n)]
                if sources and all(n in self._of for n in sources):
                    self._of[node] = tuple(dict.fromkeys(p for n in sources for p in self._of[n]))

    def of(self, node: Node) -> tuple[Node, ...]:
        """The inputs that a node is, or is a view of; none where it is anything else."""
        return self._of.get(node, ())

    def first_readers(self) -> dict[int, list[Node]]:
        """The inputs that each operation of the forward is the first to read, by its index."""
        seen: set[Node] = set()
        first: dict[int, list[Node]] = {}
        for op in self._joint.ops[: self._joint.forward_length]:
            for node in op.node.all_input_nodes:
                for primal in self.of(node):
                    if primal not in seen:
                        seen.add(primal)
                        first.setdefault(op.index, []).append(primal)
        return first


def to_copy(joint: JointGraph, parameters: Sequence[bool]) -> frozenset[Node]:
    """The inputs that re-runs read copies of where inputs are overwritten.

    Parameters that the backward itself reads (weights) are left out: without a plan, too, PyTorch refuses a
    backward after they change, and copies of them would take as much memory as the model.

    Args:
        joint: The graph.
        parameters: Which of the inputs that it was traced with are parameters.
    """
    reads = InputReads(joint)
    read_by_backward = {
        primal
        for op in joint.ops[joint.forward_length :]
        for node in op.node.all_input_nodes
        for primal in reads.of(node)
    }
    copied = set()
    for primal in joint.primals:
        position = aot_metadata.input_position(primal)
        known = position is not None and position < len(parameters)
        parameter = position is not None and (not known or parameters[position])
        strided = reads.of(primal) and primal.meta["val"].layout is torch.strided
        if strided and not (parameter and primal in read_by_backward):
            copied.add(primal)
    return frozenset(copied)


def copy_bytes(primal: Node) -> int:
    """Bytes of a copy of an input: from its first element to its last."""
    value = primal.meta["val"]
    sizes = [fake.concrete_size(size) for size in value.shape]
    steps = [fake.concrete_size(step) for step in value.stride()]
    span = 1 + sum((n - 1) * step for n, step in zip(sizes, steps, strict=True)) if 0 not in sizes else 0
    return int(span * value.element_size())


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same memory and version; it keeps them where ``tensor.data`` is exchanged."""
    return tensor.detach()
