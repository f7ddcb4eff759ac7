"""From a graph of Dynamo's to a joint graph that computes what eager computes.

Planning a step and running the plan use the same function, so that both see the same operations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from planner._torch.execution.checkpoints import name_apart
from planner._torch.joint import aot, aot_metadata
from planner.graph.accumulation import arrivals
from planner.graph.dynamo_graph import detach_outputs
from planner.graph.joint_graph import JointGraph, read_joint
from planner.graph.joint_pass import AutocastContext, JointPass, TraceContext
from planner.graph.memory_of_gradients import keep_gradients_apart
from planner.graph.passes.per_use_gradients import uses_of, with_inputs
from planner.graph.spec import GraphSpec
from planner.graph.split.pieces import split_where_possible


@dataclass(frozen=True)
class TracedGraph:
    """A joint graph as AOTAutograd traced it, after its corrections.

    Attributes:
        joint: Forward and backward.
        reading: The same, read as operations on storages.
        forward_outputs: How many of its outputs the forward has.
        inputs: How many inputs Dynamo's graph has.
        per_use_inputs: Positions of the inputs whose gradients are to be returned unsummed.
        cached_casts: Inputs of which autocast keeps casts beyond the graph, by position, and what these are.
        arrivals: Positions of the inputs that get a gradient, in the order in which eager is done with these.
        dropped: The results of the forward that splitting does without, by position, without data.
    """

    joint: GraphModule
    reading: JointGraph
    forward_outputs: int
    inputs: int
    per_use_inputs: frozenset[int]
    cached_casts: dict[int, torch.dtype]
    arrivals: Sequence[int] = ()
    dropped: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class CompiledJoint:
    """A joint graph, compiled.

    Attributes:
        call: Runs it with the inputs of Dynamo's graph.
        followed: The part of its specification that tracing could follow.
    """

    call: Callable[..., Any]
    followed: GraphSpec


def trace_joint(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    spec: GraphSpec,
    passes: Sequence[JointPass],
    *,
    partition: Callable[[TracedGraph], tuple[GraphModule, GraphModule]],
    compile_forward: Callable[[GraphModule], aot.BoxedFunction],
    compile_backward: Callable[[GraphModule], aot.BoxedFunction],
    autocast: AutocastContext,
    cuda: bool = False,
) -> CompiledJoint:
    """Trace forward and backward of a graph into one joint graph, correct that, and compile its halves.

    Args:
        graph: The forward as Dynamo made it.
        example_inputs: Its inputs.
        spec: How to trace it.
        passes: Corrections of the joint graph, in order: :data:`planner.graph.passes.JOINT_PASSES`.
        partition: Makes a forward and a backward graph of the corrected joint graph. Not called where there
            is nothing to differentiate; ``compile_forward`` then compiles the graph as it is.
        compile_forward, compile_backward: Compile these.
        autocast: The autocast that the forward is called in.
        cuda: Whether it will run on CUDA, wherever its tensors without data are.
    """
    name_apart(graph)
    differentiated = detach_outputs(graph, spec.unused_outputs)
    uses, uncountable = uses_of(differentiated, example_inputs, spec.per_use_inputs)
    context = TraceContext(graph, example_inputs, autocast, cuda, uses)
    relaid = set(spec.tangent_layouts)

    def correct_and_partition(joint: GraphModule, outputs: int) -> tuple[GraphModule, GraphModule]:
        gradients = aot_metadata.gradients_of_outputs(joint.graph)
        relaid.intersection_update(
            i
            for i, layout in spec.tangent_layouts.items()
            if i not in gradients or not layout.is_of(gradients[i])
        )
        arriving = arrivals(joint)
        for correct in passes:
            correct(joint, context)
        dropped: Mapping[int, torch.Tensor] = {}
        if spec.split is not None:
            read_joint(joint, outputs)  # without dead code, as when it was planned
            joint, _, dropped = split_where_possible(joint, outputs, spec.split)
        keep_gradients_apart(joint.graph, outputs)
        reading = read_joint(joint, outputs, spec.handed_inputs)
        inputs, per_use = len(example_inputs), spec.per_use_inputs
        casts = context.cached_casts
        traced = TracedGraph(joint, reading, outputs, inputs, per_use, casts, arriving, dropped)
        return partition(traced)

    added = [i for i, count in uses.items() for _ in range(count - 1)]
    compiled = aot.compile_joint(
        with_inputs(differentiated, len(added)),
        [*example_inputs, *(example_inputs[i].detach().requires_grad_() for i in added)],
        partition=correct_and_partition,
        forward_compiler=compile_forward,
        backward_compiler=compile_backward,
        layouts=spec.tangent_layouts,
    )
    call = (lambda *args: compiled(*args, *[args[i] for i in added])) if added else compiled
    summed = uncountable | (uses.keys() - context.unsummed)
    followed = replace(
        spec,
        per_use_inputs=spec.per_use_inputs - summed,
        tangent_layouts={i: layout for i, layout in spec.tangent_layouts.items() if i not in relaid},
    )
    return CompiledJoint(call, followed)
