"""The result of capturing: a step's recordings and graphs, and the note on a step without a loss."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from planner.choices import Attention
from planner.graph.joint_graph import JointGraph
from planner.graph.spec import GraphSpec
from planner.training_step.recorder import Recording

NO_LOSS = (
    "the module returned no loss: all its outputs are differentiated, and the memory of a loss outside of it "
    "does not count. Pass the targets with which it returns one (labels=), or loss= a function of its output"
)
"""A note on a step."""


@dataclass
class CapturedGraph:
    """One graph that Dynamo made, with its joint graph.

    Attributes:
        structure: Digest of the graph without shapes, by which a plan recognises it.
        occurrence: How many graphs of that structure the step runs for the first time before it.
        occurrences: How many graphs of that structure it runs.
        spec: How it was traced.
        joint: Forward and backward; None where there is nothing to differentiate.
        passes_gradients: Whether gradients arrive at its outputs. Where there is no joint graph, these are
            views of its inputs.
        overwritten: Results that the step changes in place before their backward, by position.
        split_runs: The modules that it computes in pieces, each with its number of rows.
    """

    structure: str
    occurrence: int
    occurrences: int
    spec: GraphSpec
    joint: JointGraph | None = None
    passes_gradients: bool = False
    overwritten: frozenset[int] = frozenset()
    split_runs: tuple[tuple[str, int], ...] = ()


@dataclass
class CapturedStep:
    """Everything that planning needs to know of a step.

    Attributes:
        graphs: The captured graphs, in order of first execution.
        eager: The recording of the uncompiled step.
        compiled: The recording of the compiled step, with graphs as single events.
        parameters, buffers, inputs: The tensors that are there before the step.
        gradients: The gradients that are there before the step and are added to.
        arriving: Tensors like the gradients of outputs, where the next stage of a pipeline sends these.
        breaks: Where and why the forward was cut into graphs, a line each.
        eager_operations: Operations of the module's forward that no graph covers: they run as written.
        with_data: Whether it took a run with data, since the data decide what runs.
        autocast: The regions of autocast around the step, as in ``cuda:bfloat16``.
        notes: Things that the user should know.
        uncompiled: Names of functions that the user compiles and that ran as written.
        overwritten: Inputs of graphs that the step changes in place before their backward.
        state_in_hooks: The state of optimizers that hooks on weights step in the backward.
    """

    graphs: list[CapturedGraph]
    eager: Recording
    compiled: Recording
    parameters: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor] = ()
    arriving: Sequence[torch.Tensor] = ()
    breaks: list[str] = field(default_factory=list)
    eager_operations: int = 0
    with_data: bool = False
    autocast: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    uncompiled: list[str] = field(default_factory=list)
    overwritten: list[str] = field(default_factory=list)
    state_in_hooks: Sequence[torch.Tensor] = ()


@dataclass(frozen=True)
class CudaKernels:
    """The step will run on CUDA though it is captured on the CPU.

    Attributes:
        capability: Compute capability of the device.
        attention: Its attention kernel; None for the one that PyTorch chooses.
        cudnn: Whether cuDNN runs on the device.
    """

    capability: tuple[int, int]
    attention: Attention | None = None
    cudnn: bool = True
