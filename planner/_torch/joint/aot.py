"""AOTAutograd: compiling Dynamo's graphs by joint ones, running them without data, finding their nodes."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, exceptions_allowed_to_be_fallback
from torch._functorch import aot_autograd as functorch_aot
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.passes import _tensorify_python_scalars as tensorify_pass

from planner._torch.compat import of_graphs
from planner._torch.cuda.batch_norm import cudnn_as_eager
from planner._torch.execution.decompositions import kernels_of_eager
from planner._torch.fake import fake_mode, forget_real_tensors, storage_key, without_modes
from planner._torch.joint.effects import refuse_effects
from planner._torch.joint.graph_modules import tell_sizes_alone, written_when_needed
from planner._torch.joint.in_place import results_in_place
from planner._torch.joint.memory_layout import MemoryLayout
from planner._torch.joint.strides_of_results import strides_of_results
from planner._torch.patches import replaced
from planner._torch.tensors import strided_copy
from planner._torch.versions import set_version, version_of
from planner._torch.without_data.apart import tell_results_apart

MemoryFormatMeta = of_graphs("torch._functorch._aot_autograd.schemas", "MemoryFormatMeta")
PlainAOTOutput = of_graphs("torch._functorch._aot_autograd.descriptors", "PlainAOTOutput")
collect_metadata_analysis, runtime_wrappers = of_graphs(
    "torch._functorch._aot_autograd", "collect_metadata_analysis", "runtime_wrappers"
)

BoxedFunction = Callable[[list[Any]], Sequence[Any]]
"""A compiled graph: takes its arguments in a list, which it empties, and returns its outputs."""

Partition = Callable[[torch.fx.GraphModule, int], tuple[torch.fx.GraphModule, torch.fx.GraphModule]]
"""Splits a joint graph with a number of forward outputs into a forward and a backward graph."""


DATA_DECIDE = exceptions_allowed_to_be_fallback
"""Errors of tracing that say that sizes depend on data."""

STARTS_AGAIN = TensorifyScalarRestartAnalysis
"""Raised by tracing to have Dynamo capture the same code again, with plain numbers instead of symbols."""


def compile_joint(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    partition: Partition,
    forward_compiler: Callable[[torch.fx.GraphModule], BoxedFunction],
    backward_compiler: Callable[[torch.fx.GraphModule], BoxedFunction],
    layouts: Mapping[int, MemoryLayout],
) -> Callable[..., Any]:
    """Trace forward and backward of a Dynamo graph into one joint graph and compile its halves.

    A graph without anything to differentiate is compiled by ``forward_compiler`` alone, and
    ``partition`` is not called.

    Args:
        layouts: By position of an output, the memory layout of its gradient. Other gradients have the layout
            of their outputs; so have all gradients with symbolic sizes.
    """

    def partition_fn(
        joint: torch.fx.GraphModule, _inputs: object, *, num_fwd_outputs: int, **_: object
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        refuse_effects(joint)
        forward, backward = partition(joint, num_fwd_outputs)
        _donate_nothing(forward, num_fwd_outputs)
        return forward, backward

    def inference(module: torch.fx.GraphModule, _inputs: object) -> BoxedFunction:
        refuse_effects(module)
        return _boxed(forward_compiler(module))

    tell_results_apart()
    backend = aot_autograd(
        fw_compiler=lambda gm, _inputs: _boxed(forward_compiler(gm)),
        bw_compiler=lambda gm, _inputs: _boxed(backward_compiler(gm)),
        inference_compiler=inference,
        partition_fn=partition_fn,
    )
    settings = functorch_config.patch(
        # Compile the backward with the forward, not in the user's backward.
        force_non_lazy_backward_lowering=True,
        enable_autograd_cache=False,
        debug_assert=False,
        # Trace the backward without autocast: users leave its region before they call backward.
        backward_pass_autocast="off",
        # This pass is for graphs that call ``autograd.grad`` inside. It refuses checkpoints in graphs without
        # a backward.
        remat_using_tags_for_fwd_loss_bwd_graph=False,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(settings)
        # Without it, a random operation whose result is not read is dropped, and later ones draw its numbers.
        stack.enter_context(inductor_config.patch(fallback_random=True))
        stack.enter_context(written_when_needed())
        stack.enter_context(kernels_of_eager(keep=_HARMLESS_DECOMPOSITIONS))
        stack.enter_context(cudnn_as_eager())
        stack.enter_context(_deep_recursion())
        stack.enter_context(_gradients_laid_out(layouts))
        stack.enter_context(results_in_place())
        stack.enter_context(strides_of_results())
        stack.enter_context(_numbers_stay_numbers())
        stack.enter_context(_no_check_at_first_call())
        if TracingContext.try_get() is None:
            mode = next((x.fake_mode for x in example_inputs if isinstance(x, FakeTensor)), None)
            if mode is None:
                mode = fake_mode()
                stack.callback(forget_real_tensors, mode)
            stack.enter_context(tracing(TracingContext(mode)))
        compiled = backend(graph, example_inputs)
    tell_sizes_alone(graph)  # the compiled function holds the graph, which must hold no data
    return compiled


@contextlib.contextmanager
def _gradients_laid_out(layouts: Mapping[int, MemoryLayout]) -> Iterator[None]:
    """Trace with gradients of such layouts, each in a storage of its own.

    AOTAutograd assumes that gradients have the strides of their outputs, and copies gradients with others. If
    an output is contiguous, it stands for its own gradient in the trace. Then the gradients of two parts of a
    tensor would share a storage, or lie in that of an input.
    """
    original = collect_metadata_analysis.run_functionalized_fw_and_collect_metadata

    def run(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        collect = original(*args, **kwargs)

        def collected(*inputs: Any) -> Any:
            metadata = collect(*inputs)
            occupied = {storage_key(x) for x in inputs if _is_strided(x)}
            for i, description in enumerate(metadata.traced_tangents_descs):
                source = getattr(description, "output", None)
                layout = layouts.get(source.idx) if isinstance(source, PlainAOTOutput) else None
                tangent = metadata.traced_tangents[i]
                if layout is not None and _can_have_layout(tangent, layout):
                    tangent = tangent.new_empty_strided(tangent.shape, layout.strides(tangent.shape))
                    metadata.subclass_tangent_meta[i] = dataclasses.replace(
                        metadata.subclass_tangent_meta[i], memory_format=MemoryFormatMeta.from_tensor(tangent)
                    )
                elif _is_strided(tangent) and storage_key(tangent) in occupied:
                    tangent = tangent.new_empty_strided(tangent.shape, tangent.stride())
                metadata.traced_tangents[i] = tangent
                occupied |= {storage_key(tangent)} if _is_strided(tangent) else set()
            return metadata

        return collected

    # Replaced in this module alone: other callers ignore gradients, or only compare them (`debug_assert`).
    with replaced(functorch_aot, {"run_functionalized_fw_and_collect_metadata": run}):
        yield


@contextlib.contextmanager
def _numbers_stay_numbers() -> Iterator[None]:
    """Keep floats that are computed from symbolic sizes, as ``1 / len(x)``, as Python numbers.

    As tensors they would round differently and give other operations than plain sizes do; and nothing would
    mark those of the backward as such.
    """
    with replaced(tensorify_pass, {"_is_tensorify_enabled": lambda: False}):
        yield


@contextlib.contextmanager
def _no_check_at_first_call() -> Iterator[None]:
    """Call compiled functions without the dispatch mode that checks custom operators at the first call.

    Eager has no such check, and the mode refuses tensor subclasses. PyTorch added it in
    https://github.com/pytorch/pytorch/pull/166545.
    """

    def not_first(self: Any) -> None:
        self._is_first = False

    with replaced(runtime_wrappers._FirstInvocationContext, {"__init__": not_first}):
        yield


def _is_strided(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.layout is torch.strided


def _can_have_layout(tangent: Any, layout: MemoryLayout) -> bool:
    return _is_strided(tangent) and not tangent._has_symbolic_sizes_strides and layout.fits(tangent.shape)


def _donate_nothing(forward: torch.fx.GraphModule, outputs: int) -> None:
    # AOTAutograd donates a saved tensor to the backward if it has a shape ("val") and aliases no input or
    # output, https://github.com/pytorch/pytorch/pull/130580. Then backward(retain_graph=True) is an error.
    # Switching donation off (`donated_buffer`) does not help: at run time the list of donated tensors is then
    # None, which is not the empty list either.
    results: Any = forward.graph.output_node().args[0]
    for node in results[outputs:]:
        if node.op != "placeholder" and isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            node.meta.pop("val")


# Decompositions that tracing may keep: of batch normalisations, which must not update statistics
# inside a graph (cuDNN's has another one, see planner/_torch/cuda/batch_norm.py); and of operations that only
# arrange views or sizes. The one of dropout, whose mask then takes a byte an element (see
# planner/graph/passes/cpu_dropout.py), is `dropout_of_eager`.
_HARMLESS_DECOMPOSITIONS = {
    "native_batch_norm", "cudnn_batch_norm", "empty", "one_hot", "broadcast_tensors",
    "tensor_split", "unsafe_chunk", "pad_sequence",
}  # fmt: skip


@contextlib.contextmanager
def _deep_recursion() -> Iterator[None]:
    """Allow deep recursion: AOTAutograd generates an expression that nests once for each input of a graph, a
    thousand times for ResNet-1001."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 20_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def run_without_data(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, inside: bool = False
) -> tuple[list[Any], list[Any], Sequence[Any]]:
    """Run a captured forward on leaves without data that are like its inputs.

    Nothing of the inputs changes, and no kernel runs.

    Args:
        graph: The forward.
        inputs: Its inputs.
        inside: Pass clones of the leaves that require gradients: PyTorch forbids to change a leaf in place.

    Returns:
        The leaves, what was passed, and what the forward returned.
    """
    mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None) or fake_mode()
    with mode, torch.enable_grad():
        leaves = [
            _leaf_like(mode.from_tensor(x) if not isinstance(x, FakeTensor) else x)
            if isinstance(x, torch.Tensor)
            else x
            for x in inputs
        ]
        passed = [
            x.clone() if inside and isinstance(x, torch.Tensor) and x.requires_grad else x for x in leaves
        ]
        if isinstance(graph, _LazyGraphModule):
            graph.real_recompile()
        return leaves, passed, graph.forward(*passed)  # ``graph(...)`` would print errors


def _leaf_like(tensor: FakeTensor) -> torch.Tensor:
    copy = strided_copy(tensor.detach()).requires_grad_(tensor.requires_grad)
    if version_of(copy):
        set_version(copy, 0)  # copying has counted as a write
    if tensor.constant is not None and isinstance(copy, FakeTensor):
        with without_modes():  # a constant without data would end the process
            copy.constant = strided_copy(tensor.constant)
    return copy


def nodes_so_far() -> int:
    """The number of autograd nodes that this thread has made."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def compiled_node(results: Sequence[Any], before: int) -> Any:
    """The autograd node of a compiled graph that was just called; None where it recorded none.

    If an output is a view of another, AOTAutograd takes the view outside: then the node is behind the view's.

    Args:
        results: The results of the graph.
        before: The result of :func:`nodes_so_far` before the call.
    """
    for result in results:
        pending = [result.grad_fn] if isinstance(result, torch.Tensor) else []
        while pending:
            node = pending.pop()
            if node is None or node._sequence_nr() < before:
                continue
            if node.name() == "CompiledFunctionBackward":
                return node
            # An input that the graph changed was written by `copy_`, whose last edge leads to the graph.
            pending += [following for following, _ in node.next_functions]
    return None


def _boxed(function: BoxedFunction) -> BoxedFunction:
    function._boxed_call = True  # type: ignore[attr-defined]
    return function
