"""Private PyTorch APIs of AOTAutograd: from Dynamo's graphs to joint ones, and what these say.

Like :mod:`planner._torch`, each function says what it hides. All of it was seen to work with torch 2.13.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import exceptions_allowed_to_be_fallback
from torch._functorch import aot_autograd as functorch_aot
from torch._functorch._aot_autograd import (
    collect_metadata_analysis,
    graph_capture_wrappers,
    runtime_wrappers,
)
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor

from planner._torch import fake_mode, without_modes
from planner._torch_batch_norm import cudnn_as_eager
from planner._torch_effects import refuse_tokens, without_tokens
from planner._torch_in_place import results_in_place

BoxedFunction = Callable[[list[Any]], Sequence[Any]]
"""A compiled graph: takes its arguments in a list, which it empties, and returns its outputs."""

Partition = Callable[[torch.fx.GraphModule, int], tuple[torch.fx.GraphModule, torch.fx.GraphModule]]
"""Splits a joint graph with a number of forward outputs into a forward and a backward graph."""


DATA_DECIDE = exceptions_allowed_to_be_fallback
"""What tracing raises where only data tell sizes."""


def compile_joint(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    partition: Partition,
    forward_compiler: Callable[[torch.fx.GraphModule], BoxedFunction],
    backward_compiler: Callable[[torch.fx.GraphModule], BoxedFunction],
    layouts: Mapping[int, Sequence[int]],
) -> Callable[..., Any]:
    """Trace forward and backward of a Dynamo graph into one joint graph and compile its halves.

    A graph without anything to differentiate is compiled by ``forward_compiler`` alone, and
    ``partition`` is not called. ``layouts`` says of outputs, by position, how their gradients lie in
    memory: their dimensions, those of the largest steps first. The others' lie as the outputs do, where
    sizes are symbolic those of all.
    """

    def partition_fn(
        joint: torch.fx.GraphModule, _inputs: object, *, num_fwd_outputs: int, **_: object
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        refuse_tokens(joint)
        forward, backward = partition(joint, num_fwd_outputs)
        _donate_nothing(forward, num_fwd_outputs)
        return forward, backward

    backend = aot_autograd(
        fw_compiler=lambda gm, _inputs: _boxed(forward_compiler(gm)),
        bw_compiler=lambda gm, _inputs: _boxed(backward_compiler(gm)),
        inference_compiler=lambda gm, _inputs: _boxed(forward_compiler(gm)),
        partition_fn=partition_fn,
    )
    settings = functorch_config.patch(
        # Compile the backward with the forward: nothing is left to happen in the user's backward.
        force_non_lazy_backward_lowering=True,
        enable_autograd_cache=False,
        # Users leave the region of autocast before they call backward.
        backward_pass_autocast="off",
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(settings)
        stack.enter_context(without_tokens())
        stack.enter_context(kernels_of_eager(keep=_HARMLESS_DECOMPOSITIONS))
        stack.enter_context(cudnn_as_eager())
        stack.enter_context(_deep_recursion())
        stack.enter_context(_gradients_laid_out(layouts))
        stack.enter_context(results_in_place())
        if TracingContext.try_get() is None:
            mode = next((x.fake_mode for x in example_inputs if isinstance(x, FakeTensor)), None)
            stack.enter_context(tracing(TracingContext(mode or fake_mode())))
        return backend(graph, example_inputs)


@contextlib.contextmanager
def _gradients_laid_out(layouts: Mapping[int, Sequence[int]]) -> Iterator[None]:
    """AOTAutograd takes it that gradients lie in memory as their outputs do, and copies those that do not."""
    if not layouts:
        yield
        return
    original = collect_metadata_analysis.run_functionalized_fw_and_collect_metadata

    def run(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        collect = original(*args, **kwargs)

        def collected(*inputs: Any) -> Any:
            metadata = collect(*inputs)
            for i, description in enumerate(metadata.traced_tangents_descs):
                source = getattr(description, "output", None)
                dimensions = layouts.get(source.idx) if isinstance(source, PlainAOTOutput) else None
                tangent = metadata.traced_tangents[i]
                if dimensions is None or not _can_lie(tangent, dimensions):
                    continue
                tangent = tangent.new_empty_strided(tangent.shape, _strides(tangent, dimensions))
                metadata.traced_tangents[i] = tangent
                metadata.subclass_tangent_meta[i] = dataclasses.replace(
                    metadata.subclass_tangent_meta[i], memory_format=MemoryFormatMeta.from_tensor(tangent)
                )
            return metadata

        return collected

    users = (functorch_aot, runtime_wrappers, graph_capture_wrappers)
    try:
        for user in users:
            user.run_functionalized_fw_and_collect_metadata = run  # type: ignore[attr-defined]
        yield
    finally:
        for user in users:
            user.run_functionalized_fw_and_collect_metadata = original  # type: ignore[attr-defined]


def _can_lie(tangent: Any, dimensions: Sequence[int]) -> bool:
    return (
        isinstance(tangent, FakeTensor)
        and tangent.layout is torch.strided
        and not tangent._has_symbolic_sizes_strides
        and sorted(dimensions) == list(range(tangent.dim()))
    )


def lies(tensor: torch.Tensor, dimensions: Sequence[int]) -> bool:
    """Whether a tensor lies in memory densely, its dimensions in that order, the largest steps first."""
    return len(dimensions) == tensor.dim() and list(tensor.stride()) == _strides(tensor, dimensions)


def _strides(tensor: torch.Tensor, dimensions: Sequence[int]) -> list[int]:
    strides, step = [0] * tensor.dim(), 1
    for dimension in reversed(dimensions):
        strides[dimension] = step
        step *= max(tensor.shape[dimension], 1)
    return strides


def _donate_nothing(forward: torch.fx.GraphModule, outputs: int) -> None:
    # Saved tensors that AOTAutograd knows the shape of and finds nowhere else count as donated to the
    # backward, which makes backward(retain_graph=True) an error. (Switching donation off does not:
    # at run time the list of donated tensors is then None, which is not the empty list either.)
    results: Any = forward.graph.output_node().args[0]
    for node in results[outputs:]:
        if node.op != "placeholder" and isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            node.meta.pop("val")


# Decompositions that tracing may keep: of batch normalisations, which must not update statistics
# inside a graph (cuDNN's has another one, see planner/_torch_batch_norm.py); and of operations that only
# arrange views or sizes. That of dropout, whose mask then takes a byte an element (see planner/exact.py), is
# `_dropout`.
_HARMLESS_DECOMPOSITIONS = {
    "native_batch_norm", "cudnn_batch_norm", "empty", "one_hot", "broadcast_tensors",
    "tensor_split", "unsafe_chunk", "pad_sequence",
}  # fmt: skip
# Those of them that stand for what CUDA runs, see planner/_torch_kernels.py.
_CUDA_KERNELS = {"dropout", "scaled_dot_product_attention"}
_DECOMPOSED_AT = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)


@functools.cache
def _decomposed_operators() -> list[Any]:
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    return [
        getattr(packet, overload)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket) and packet.__name__ not in _CUDA_KERNELS
        for overload in packet.overloads()
        if any(key in getattr(packet, overload).py_kernels for key in _DECOMPOSED_AT)
    ]


@contextlib.contextmanager
def _deep_recursion() -> Iterator[None]:
    """AOTAutograd generates an expression as deep as a graph has inputs, a thousand for ResNet-1001."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 20_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@contextlib.contextmanager
def kernels_of_eager(keep: Collection[str] = frozenset()) -> Iterator[None]:
    """Dispatch interpolations, recurrent layers, matrix products and some more as eager runs them.

    Where the Python dispatcher is on, as in tracing, PyTorch otherwise replaces them by decompositions
    in Python, which round differently, hold more memory, and leave out the dropout between layers of
    nn.LSTM.

    Args:
        keep: Names of operators whose decompositions stay.
    """
    dropout = torch.ops.aten.dropout.default
    taken = [
        (op, dict(op.py_kernels)) for op in _decomposed_operators() if op.overloadpacket.__name__ not in keep
    ]
    taken.append((dropout, dict(dropout.py_kernels)))
    try:
        for op, kernels in taken:
            for key in _DECOMPOSED_AT:
                if key in kernels:
                    del op.py_kernels[key]
            op._dispatch_cache.clear()
        dropout.py_kernels.update(dict.fromkeys(_DECOMPOSED_AT, _dropout))
        yield
    finally:
        for op, kernels in taken:
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


def _dropout(tensor: torch.Tensor, probability: float, train: bool) -> torch.Tensor:
    """Dropout that keeps everything is its input, and what keeps nothing draws no numbers, as in eager.

    PyTorch's decomposition copies the one and draws for the other.
    """
    if not train or probability == 0:
        return tensor
    if probability == 1:
        return tensor.mul(torch.zeros((), dtype=tensor.dtype, device=tensor.device))
    kept: torch.Tensor = torch.ops.aten.native_dropout(tensor, probability, train)[0]
    return kept


def run_without_data(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    """Run a captured forward on copies of its inputs that have no data and are leaves; returns both.

    Nothing of the inputs changes, and no kernel runs.
    """
    mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None) or fake_mode()
    with mode, torch.enable_grad():
        copies = [
            _leaf_like(mode.from_tensor(x) if not isinstance(x, FakeTensor) else x)
            if isinstance(x, torch.Tensor)
            else x
            for x in inputs
        ]
        return copies, graph(*copies)


def _leaf_like(tensor: FakeTensor) -> torch.Tensor:
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if tensor.constant is not None and isinstance(copy, FakeTensor):
        with without_modes():  # without data it would be taken for data, which ends the process
            copy.constant = tensor.constant.clone()
    return copy


def mutated_inputs(joint: torch.fx.GraphModule) -> frozenset[int]:
    """Which inputs of a joint graph the step overwrites (running statistics), by position.

    The graph itself is functional; AOTAutograd copies new values into these inputs after the forward.
    """
    inputs = [n for n in joint.graph.nodes if n.op == "placeholder"]
    written = {
        d.mutated_input
        for d in joint.graph.output_node().meta["desc"]
        if isinstance(d, InputMutationAOTOutput)
    }
    return frozenset(i for i, n in enumerate(inputs) if n.meta.get("desc") in written)


def input_position(placeholder: torch.fx.Node) -> int | None:
    """Which of the forward's inputs an input of the joint graph is; None for what is no plain input."""
    description = placeholder.meta.get("desc")
    return description.idx if isinstance(description, PlainAOTInput) else None


def forward_inputs(joint: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The inputs of a joint graph that are inputs of the forward."""
    nodes = joint.graph.find_nodes(op="placeholder")
    return [n for n in nodes if not isinstance(n.meta.get("desc"), TangentAOTInput)]


def gradient_places(joint: torch.fx.GraphModule) -> dict[int, int]:
    """Which outputs of a joint graph are the gradients of the forward's plain inputs, by their position."""
    found = {}
    for place, description in enumerate(joint.graph.output_node().meta["desc"]):
        if isinstance(description, GradAOTOutput) and isinstance(description.grad_of, PlainAOTInput):
            found[description.grad_of.idx] = place
    return found


def gradients_of_outputs(joint: torch.fx.Graph) -> dict[int, torch.Tensor]:
    """The gradients that a joint graph was traced with, by position of the outputs that they are of.

    Outputs that look at one result of the graph, or at an input, are taken anew outside of it, and have none.
    """
    return {s.idx: n.meta["val"] for n, s in _gradients(joint) if isinstance(s, PlainAOTOutput)}


def gradients_of_results(joint: torch.fx.Graph) -> dict[int, torch.fx.Node]:
    """The gradients of a joint graph, by position of one of the outputs that they are of.

    Where several outputs look at one result of the graph, its gradient is theirs.
    """
    found = {}
    for node, source in _gradients(joint):
        output = source.base_of if isinstance(source, IntermediateBaseAOTOutput) else source
        if isinstance(output, PlainAOTOutput):
            found[output.idx] = node
    return found


def _gradients(joint: torch.fx.Graph) -> list[tuple[torch.fx.Node, Any]]:
    descriptions = [(n, n.meta.get("desc")) for n in joint.find_nodes(op="placeholder")]
    return [(n, d.output) for n, d in descriptions if isinstance(d, TangentAOTInput)]


def origin(node: torch.fx.Node) -> str | None:
    """Name of the forward's node that a node of the joint graph was traced from."""
    sources = node.meta.get("from_node")
    return sources[0].name if sources else None


def tangent_positions(joint: torch.fx.GraphModule, forward_outputs: int) -> dict[int, int]:
    """Which output of a compiled graph's autograd node each gradient among the joint graph's inputs is of.

    Returns:
        Position among the tangents, by position among the forward's outputs.
    """
    outputs = list(joint.graph.output_node().meta["desc"])[:forward_outputs]
    descriptions = [n.meta.get("desc") for n in joint.graph.nodes if n.op == "placeholder"]
    sources = [d.output for d in descriptions if isinstance(d, TangentAOTInput)]
    return {outputs.index(source): i for i, source in enumerate(sources)}


def gradients_of_nodes(joint: torch.fx.GraphModule, forward_outputs: int) -> dict[int, torch.Tensor]:
    """The gradients that a joint graph was traced with, by position among the forward's outputs."""
    values = [node.meta["val"] for node, _ in _gradients(joint.graph)]
    return {i: values[p] for i, p in tangent_positions(joint, forward_outputs).items()}


def output_positions(joint: torch.fx.GraphModule, forward_outputs: int) -> dict[int, int]:
    """Which of the forward's results the outputs of a compiled graph's autograd node are."""
    outputs = list(joint.graph.output_node().meta["desc"])[:forward_outputs]
    return {i: d.idx for i, d in enumerate(outputs) if isinstance(d, PlainAOTOutput)}


def nodes_so_far() -> int:
    """How many autograd nodes this thread has made."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def compiled_node(results: Sequence[Any], before: int) -> Any:
    """The autograd node of a compiled graph that was just called; None where it recorded none.

    An output that looks at another is taken anew from it by AOTAutograd, so the node may be one further down.

    Args:
        results: What the graph returned.
        before: What :func:`nodes_so_far` was before the call.
    """
    for result in results:
        node = result.grad_fn if isinstance(result, torch.Tensor) else None
        while node is not None and node._sequence_nr() >= before:
            if node.name() == "CompiledFunctionBackward":
                return node
            node = node.next_functions[0][0] if node.next_functions else None
    return None


def _boxed(function: BoxedFunction) -> BoxedFunction:
    function._boxed_call = True  # type: ignore[attr-defined]
    return function
