"""Every private PyTorch API that the project uses, and nothing else.

A new torch release is one file's work: each function says what it hides. All of it was seen to
work with torch 2.13.
"""

import bisect
import contextlib
import copy
import functools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch._dynamo as dynamo
import torch._functorch.config as functorch_config
from torch._C._dynamo.eval_frame import _FrameAction
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from planner._torch_tracing import (
    answer_like_eager,
    go_on_inside_modules,
    layouts_of_kernels,
    said_once,
    widen_grouped_products,
)

DataDependentError = DataDependentOutputException
"""Raised where a number is asked of a tensor without data."""

BoxedFunction = Callable[[list[Any]], Sequence[Any]]
"""A compiled graph: takes its arguments in a list, which it empties, and returns its outputs."""


# ---- fake tensors -----------------------------------------------------------------------------


def fake_mode() -> FakeTensorMode:
    """A mode under which tensors have shapes but no data; real tensors may be mixed in."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor without data like ``tensor``; one on the meta device is taken to be on the CPU, since
    PyTorch picks operations by device and has none of its own for meta."""
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor.device.type != "meta":
        return mode.from_tensor(tensor)
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def same_shape(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data like another without data, with a storage of its own."""
    mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else contextlib.nullcontext()
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def is_fake(value: object) -> bool:
    """Whether a value is a tensor without data."""
    return isinstance(value, FakeTensor)


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, the same for all of its views, while the storage lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


class InfrastructureMode(TorchDispatchMode):
    """A dispatch mode that Dynamo and autograd treat as if it were not there."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True


def current_backward_node() -> object | None:
    """The autograd node whose backward is running in this thread; None outside of a backward."""
    if torch._C._current_graph_task_id() == -1:
        return None
    node: object | None = torch._C._current_autograd_node()
    return node


def graph_is_kept() -> bool:
    """Whether the backward that is running keeps what was saved for it, to be run again."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def exclusively_owned(tensor: torch.Tensor) -> bool:
    """Whether, seen from a dispatch mode, only the caller in C++ holds this tensor and its storage.

    The Python wrappers that a dispatch mode brings into being are allowed for. This is the
    condition under which the autograd engine accumulates gradients in place.
    """
    uses = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count <= 4 and uses <= 2


# ---- Dynamo -------------------------------------------------------------------------------------

_DYNAMO_CONFIG: dict[str, Any] = {
    # nn.LSTM and its kin are otherwise skipped without a word.
    "allow_rnn": True,
    # Past the limit Dynamo runs the original without a word.
    "recompile_limit": 64,
    "accumulated_recompile_limit": 4096,
    # Inside DistributedDataParallel graphs are otherwise split at its buckets, after which no plan fits them.
    "optimize_ddp": False,
    "assume_static_by_default": True,
    # A counter among a module's attributes would otherwise mean a capture for each of its values.
    "allow_unspec_int_on_nn_module": True,
    # Symbolic floats become tensors, which round differently.
    "specialize_float": True,
    # What other processes found to vary says nothing about this one.
    "automatic_dynamic_local_pgo": False,
    "automatic_dynamic_remote_pgo": False,
}


@contextlib.contextmanager
def dynamo_settings(*, symbolic: bool = False) -> Iterator[None]:
    """Settings of Dynamo that our captures need; the user's own come back on exit.

    Args:
        symbolic: Sizes that are found to vary become symbols; a first capture is of plain numbers anyway.
    """
    ignored = dynamo.config.ignore_logging_functions | said_once()
    settings = {**_DYNAMO_CONFIG, "automatic_dynamic_shapes": symbolic, "ignore_logging_functions": ignored}
    with dynamo.config.patch(**settings), go_on_inside_modules(), layouts_of_kernels():
        yield


class _WithSettings:
    """Dynamo's callback for a frame that it has no code for; runs under :func:`dynamo_settings`.

    Calls that find their code do not come here, and pay nothing for the settings.
    """

    def __init__(self, callback: Any, symbolic: bool, given_up: Callable[[], None] | None) -> None:
        # Under this name Dynamo looks for the backend that a callback ends in.
        self._torchdynamo_orig_backend = callback
        self._symbolic, self._given_up = symbolic, given_up

    def __call__(self, *frame: Any) -> Any:
        with dynamo_settings(symbolic=self._symbolic):
            result = self._torchdynamo_orig_backend(*frame)
        strategy = result.frame_exec_strategy
        if self._given_up is not None and strategy.cur_action == _FrameAction.RUN_ONLY:
            self._given_up()
        return result


def dynamo_compile(
    function: FunctionType | Callable[..., Any], backend: Callable[..., Any]
) -> Callable[..., Any]:
    """``torch.compile`` with our settings and static sizes, of a function that has a cache of its own."""
    return _optimized(_fresh(function), backend, symbolic=False)


def dynamo_compile_shapes(
    function: FunctionType | Callable[..., Any], backend: Callable[..., Any], given_up: Callable[[], None]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``torch.compile`` for one shape that stays, and for all others, whose sizes become symbols.

    The two look up their captures apart, so that the shape that stays never runs code for the others.
    What Dynamo learns of sizes that vary they share: with the first capture of another shape it knows.

    Args:
        function: What to compile.
        backend: Called with every graph that is captured.
        given_up: Called when a function has been captured so often that it never will be again.
    """
    fresh = _fresh(function)
    planned = _optimized(fresh, backend, symbolic=True, given_up=given_up, isolate_recompiles=True)
    others = _optimized(fresh, backend, symbolic=True, given_up=given_up, isolate_recompiles=True)
    return planned, others


def _optimized(
    function: FunctionType,
    backend: Callable[..., Any],
    *,
    symbolic: bool,
    given_up: Callable[[], None] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    answer_like_eager(backend)
    widen_grouped_products()
    context: Any = dynamo.optimize(backend, **options)
    context.callback = _WithSettings(context.callback, symbolic, given_up)
    return context(function)  # type: ignore[no-any-return]


def _fresh(function: FunctionType | Callable[..., Any]) -> FunctionType:
    """The same function with a code object of its own: Dynamo caches per code object, and no two
    planned modules should share (and exhaust) a cache."""
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def checkpoint_calls(graph: torch.fx.GraphModule) -> int:
    """How many calls of ``torch.utils.checkpoint`` a graph that Dynamo made covers."""
    target = torch.ops.higher_order.tag_activation_checkpoint
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    return sum(node.target is target for part in parts for node in part.graph.nodes)


def module_call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """What ``module(*args, **kwargs)`` does when nothing is installed: hooks and forward."""
    return module._call_impl(*args, **kwargs)


def call_with_forward(
    module: torch.nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What :func:`module_call` does, with ``forward(*args, **kwargs)`` in place of the module's own.

    While ``forward`` itself runs the module's own is back in its place.
    """
    if not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    ):
        return forward(*args, **kwargs)
    attributes = vars(module)
    own = attributes.get("forward")

    def restore() -> None:
        if own is None:
            attributes.pop("forward", None)
        else:
            attributes["forward"] = own

    def run(*inner_args: Any, **inner_kwargs: Any) -> Any:
        restore()
        return forward(*inner_args, **inner_kwargs)

    attributes["forward"] = run
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        restore()


def installed_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What is installed in place of a module's call (by us or by ``module.compile()``)."""
    return module._compiled_call_impl


def install_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Put ``call`` in place of the module's own; None takes it out. Pickle and deepcopy drop it."""
    module._compiled_call_impl = call


# ---- data-parallel training ---------------------------------------------------------------------


def active_data_parallel_group() -> Any:
    """The process group of the ``DistributedDataParallel`` whose forward is running; None outside of one."""
    active: Any = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    return None if active is None else active.process_group


def default_store() -> Any:
    """The key-value store that the processes of a job met in."""
    return torch.distributed.distributed_c10d._get_default_store()


# ---- AOTAutograd ---------------------------------------------------------------------------------

Partition = Callable[[torch.fx.GraphModule, int], tuple[torch.fx.GraphModule, torch.fx.GraphModule]]
"""Splits a joint graph with a number of forward outputs into a forward and a backward graph."""


def compile_joint(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    partition: Partition,
    forward_compiler: Callable[[torch.fx.GraphModule], BoxedFunction],
    backward_compiler: Callable[[torch.fx.GraphModule], BoxedFunction],
) -> Callable[..., Any]:
    """Trace forward and backward of a Dynamo graph into one joint graph and compile its halves.

    A graph without anything to differentiate is compiled by ``forward_compiler`` alone, and
    ``partition`` is not called.
    """

    def partition_fn(
        joint: torch.fx.GraphModule, _inputs: object, *, num_fwd_outputs: int, **_: object
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
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
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(settings)
        stack.enter_context(kernels_of_eager(keep=_HARMLESS_DECOMPOSITIONS))
        stack.enter_context(_deep_recursion())
        if TracingContext.try_get() is None:
            mode = next((x.fake_mode for x in example_inputs if isinstance(x, FakeTensor)), None)
            stack.enter_context(tracing(TracingContext(mode or fake_mode())))
        return backend(graph, example_inputs)


def _donate_nothing(forward: torch.fx.GraphModule, outputs: int) -> None:
    # Saved tensors that AOTAutograd knows the shape of and finds nowhere else count as donated to the
    # backward, which makes backward(retain_graph=True) an error. (Switching donation off does not:
    # at run time the list of donated tensors is then None, which is not the empty list either.)
    results: Any = forward.graph.output_node().args[0]
    for node in results[outputs:]:
        if node.op != "placeholder" and isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            node.meta.pop("val")


# Decompositions that tracing may keep: of batch normalisations, which must not update statistics
# inside a graph; of dropout, whose mask then takes a byte an element (see planner/exact.py); and of
# operations that only arrange views or sizes.
_HARMLESS_DECOMPOSITIONS = {
    "native_batch_norm", "cudnn_batch_norm", "dropout", "empty", "one_hot", "broadcast_tensors",
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
    taken = [
        (op, dict(op.py_kernels)) for op in _decomposed_operators() if op.overloadpacket.__name__ not in keep
    ]
    try:
        for op, kernels in taken:
            for key in _DECOMPOSED_AT:
                if key in kernels:
                    del op.py_kernels[key]
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernels in taken:
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


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


def output_positions(joint: torch.fx.GraphModule, forward_outputs: int) -> dict[int, int]:
    """Which of the forward's results the outputs of a compiled graph's autograd node are."""
    outputs = list(joint.graph.output_node().meta["desc"])[:forward_outputs]
    return {i: d.idx for i, d in enumerate(outputs) if isinstance(d, PlainAOTOutput)}


def compiled_node(results: Sequence[Any], args: Sequence[Any]) -> Any:
    """The autograd node of a compiled graph that was just called; None where it recorded none.

    An output that looks at another is taken anew from it by AOTAutograd, so the node may be one further down.
    """
    before = {a.grad_fn for a in args if isinstance(a, torch.Tensor) and a.grad_fn is not None}
    for result in results:
        node = result.grad_fn if isinstance(result, torch.Tensor) else None
        while node is not None and node not in before:
            if node.name() == "CompiledFunctionBackward":
                return node
            node = node.next_functions[0][0] if node.next_functions else None
    return None


def _boxed(function: BoxedFunction) -> BoxedFunction:
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def is_operator(target: object) -> bool:
    """Whether a graph node's target is an ATen-style operator overload."""
    return isinstance(target, torch._ops.OpOverload)


def uses_generator(operator: Any) -> bool:
    """Whether an operator draws random numbers."""
    return isinstance(operator, torch._ops.OpOverload) and (
        torch.Tag.nondeterministic_seeded in operator.tags
    )


def deep_copy_with(module: torch.nn.Module, replaced: dict[int, Any]) -> torch.nn.Module:
    """A deep copy of a module in which objects (by ``id``) are replaced rather than copied."""
    memo: dict[int, Any] = dict(replaced)
    return copy.deepcopy(module, memo)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Suspend the dispatch modes that are active (to run real operations inside a fake step)."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield


# ---- measuring memory and running operators alone -----------------------------------------------

OpOverload = torch._ops.OpOverload
"""The type of ATen-style operator overloads."""


@dataclass(frozen=True, slots=True)
class CpuRecording:
    """What the CPU allocator did while something ran.

    Attributes:
        allocations: Nanosecond and bytes of each event, in order; a free has negative bytes. Only blocks
            allocated during the recording appear: the allocator's table of sizes knows nothing, or
            something outdated, of the others.
        marks: First and last nanosecond of each ``record_function`` range, by name.
    """

    allocations: list[tuple[int, int]]
    marks: dict[str, tuple[int, int]]

    def allocations_between(self, first: int, last: int) -> list[tuple[int, int]]:
        """The events from nanosecond `first` to `last`."""
        start = bisect.bisect_left(self.allocations, first, key=lambda event: event[0])
        end = bisect.bisect_right(self.allocations, last, key=lambda event: event[0])
        return self.allocations[start:end]


def profiler_is_active() -> bool:
    """Whether a profiler session is open; a second one would end it."""
    return bool(torch._C._autograd._profiler_enabled())


def record_cpu_allocations(step: Callable[[], object]) -> CpuRecording:
    """Run something and record every event of the CPU allocator; what it returns lives until the end.

    The profiler's own event list shows no addresses; its tree of raw events, which does, is private.
    """
    only_cpu = [torch.profiler.ProfilerActivity.CPU]
    with _quiet_profiler(), torch.profiler.profile(activities=only_cpu, profile_memory=True) as session:
        held = step()
    del held
    profiler: Any = session.profiler
    allocation = torch._C._profiler._EventType.Allocation
    events: list[tuple[int, int, int]] = []
    marks = {}
    nodes = list(profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children)
        kind, fields = node.typed
        if kind != allocation:
            if "::" not in node.name:
                marks[node.name] = (node.start_time_ns, node.end_time_ns)
        elif fields.device.type == "cpu":
            events.append((node.start_time_ns, fields.alloc_size, fields.ptr))
    return CpuRecording(_of_own_blocks(sorted(events, key=lambda event: event[0])), marks)


def _of_own_blocks(events: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Events in order, without the frees of blocks that none of them allocated."""
    live: dict[int, int] = {}
    kept = []
    for moment, count, address in events:
        if count >= 0:
            live[address] = count
        elif live.pop(address, None) is None:
            continue
        kept.append((moment, count))
    return kept


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """At its first start the profiler can be told not to write two lines to standard error per session."""
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        yield
    finally:
        os.environ.pop("KINETO_LOG_LEVEL", None)


@contextlib.contextmanager
def plain_execution(device_type: str) -> Iterator[None]:
    """Operators called inside run as they are: no modes, no autocast, no autograd."""
    with (
        without_modes(),
        torch._C.DisableTorchFunction(),
        torch.autocast(device_type, enabled=False),
        torch.autocast("cpu", enabled=False),
        torch.no_grad(),
    ):
        yield


def is_size(value: object) -> bool:
    """Whether a value of a captured graph is a symbolic number: a size, or computed from sizes."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's storage, of a symbolic one at the sizes that it was captured with."""
    return concrete_size(tensor.untyped_storage().nbytes())


def concrete_size(size: int | torch.SymInt) -> int:
    """A size as a number: of a symbolic one the size that it was captured with."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise ValueError(f"the size {size} depends on data")
    return int(hint)


def tf32_allowed(convolution: bool) -> bool:
    """Whether float32 convolutions, or matrix products, may use TF32."""
    if hasattr(torch.backends.cudnn, "conv"):
        backend = torch.backends.cudnn.conv if convolution else torch.backends.cuda.matmul
        return bool(backend.fp32_precision == "tf32")
    # Before torch 2.9.
    return bool(torch.backends.cudnn.allow_tf32 if convolution else torch.backends.cuda.matmul.allow_tf32)


def tree_leaves(nest: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dictionaries; ``None`` is one."""
    return list(torch.utils._pytree.tree_leaves(nest))


def cudnn_version() -> int | None:
    """The version of cuDNN; None without it."""
    version: int | None = torch.backends.cudnn.version()
    return version
