"""The bytes that are there throughout a training step: parameters, buffers, inputs, gradients at entry."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from planner._torch import fake
from planner.capture.captured_step import CapturedStep
from planner.costs.devices import Device, round_bytes
from planner.costs.optimizer_step import OptimizerStep
from planner.parallel.rank import Rank
from planner.planfile.plan import Resident
from planner.problem.build import Problem
from planner.training_step.step import unique_storages


@dataclass(frozen=True)
class ThroughoutBytes:
    """Bytes of each storage that is there throughout, in the order in which a training loop makes them.

    The device's allocator has not rounded them up.

    Attributes:
        parameters, buffers, inputs: What the step is given.
        buckets: Those of ``DistributedDataParallel``, without the parts that are gradients at the same time.
        unreduced: Whole gradients that ``fully_shard`` keeps between micro-batches.
        gradients: Those that are there when the step begins.
    """

    parameters: Sequence[int]
    buffers: Sequence[int]
    buckets: Sequence[int]
    unreduced: Sequence[int]
    gradients: Sequence[int]
    inputs: Sequence[int]

    def resident(self, update: OptimizerStep, device: Device) -> Resident:
        """The sum of each, rounded up, and the bytes of an optimizer's state."""

        def total(sizes: Sequence[int]) -> int:
            return sum(round_bytes(device, size) for size in sizes)

        return Resident(
            parameter_bytes=total(self.parameters),
            buffer_bytes=total(self.buffers),
            input_bytes=total(self.inputs),
            gradient_bytes=total(self.gradients),
            optimizer_bytes=update.state_bytes,
            bucket_bytes=total(self.buckets),
            unreduced_bytes=total(self.unreduced),
        )

    def tensors(self, device: Device) -> tuple[int, ...]:
        """The bytes of each, rounded up, in order."""
        gradients = [*self.buckets, *self.unreduced, *self.gradients]
        sizes = [*self.parameters, *self.buffers, *gradients, *self.inputs]
        return tuple(round_bytes(device, size) for size in sizes)


def bytes_throughout(
    captured: CapturedStep,
    rank: Rank | None,
    parameters: Sequence[torch.Tensor],
    added_to: Sequence[bool],
    in_flight: int | None = None,
) -> ThroughoutBytes:
    """The bytes that are there throughout a captured step.

    Args:
        captured: The step.
        rank: The rank whose step it is; None for a single process.
        parameters: The parameters of its module.
        added_to: Whether each of these has a gradient when the step begins.
        in_flight: In a stage of a pipeline, the number of micro-batches whose forward has run when the first
            backward begins; else None.
    """

    def sizes(tensors: Sequence[torch.Tensor]) -> list[int]:
        return [int(t.untyped_storage().nbytes()) for t in unique_storages(tensors)]

    buffers, inputs = sizes(captured.buffers), sizes(captured.inputs)
    if in_flight is not None:  # each has inputs of its own, and memory for the gradients that it is sent
        inputs = [*inputs, *(t.numel() * t.element_size() for t in captured.arriving)] * in_flight
    if rank is None:
        return ThroughoutBytes(sizes(captured.parameters), buffers, (), (), sizes(captured.gradients), inputs)
    return ThroughoutBytes(
        rank.parameter_bytes(parameters),
        buffers,
        rank.bucket_bytes(parameters, added_to),
        rank.unreduced_bytes(parameters),
        rank.gradient_bytes(parameters, added_to),
        inputs,
    )


def recorded_bytes(
    captured: CapturedStep, problem: Problem, resident: Resident, device: Device, *, dropped: bool
) -> int:
    """The bytes that recorded graphs read and write at fixed addresses, beside a step's own tensors.

    Args:
        captured, problem: The step.
        resident: The bytes that are there throughout.
        device: The device that the step runs on.
        dropped: Whether the step drops its outputs.
    """
    graphs = [graph.joint for graph in captured.graphs if graph.joint is not None]
    outputs = [
        round_bytes(device, fake.storage_bytes(node.meta["val"]))
        for joint in graphs
        for node in dict.fromkeys(joint.outputs[0])
        if isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)
    ]
    # Each output is copied to be handed out, and its gradient when it arrives. Where the step drops its
    # outputs, those that the graphs wrote stay all the same. If another graph reads them, it reads a copy,
    # and the gradient that it returns is copied.
    copies = 2 + dropped + 2 * (len(graphs) > 1)
    # Each graph has a pool. The step's peak, which is counted elsewhere, is at least the largest of them.
    pools = sorted(problem.peaks_by_graph().values())
    inputs = len(graphs) * resident.input_bytes
    # Gradients that are there at entry are added to, so the graphs hand out copies of those that they make.
    return inputs + copies * sum(outputs) + sum(pools[:-1]) + resident.gradient_bytes + device.library_bytes
