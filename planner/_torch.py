"""Private PyTorch APIs: tensors without data, Dynamo, operators. The project uses none outside `_torch*.py`.

A new torch release is one file's work: each function says what it hides. All of it was seen to
work with torch 2.13.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
import torch._dynamo as dynamo
from torch._C._dynamo.eval_frame import _FrameAction
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from planner._torch_breaks import marks_allowed
from planner._torch_compat import takes_argument
from planner._torch_failures import RunsAsItIs
from planner._torch_jit import leave_out_of_scripts
from planner._torch_numpy import NUMPY_SETTINGS
from planner._torch_tracing import (
    answer_like_eager,
    go_on_inside_modules,
    layouts_of_kernels,
    said_once,
    widen_grouped_products,
)

DataDependentError = DataDependentOutputException
"""Raised where a number is asked of a tensor without data."""


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

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True


def running_node() -> Any:
    """The autograd node whose backward is running in this thread; None outside of a backward."""
    return None if torch._C._current_graph_task_id() == -1 else torch._C._current_autograd_node()


def running_node_number() -> tuple[str, int] | None:
    """Which node :func:`running_node` is, by name and number.

    Who holds a node itself holds its graph, and with it the tensors whose gradients that accumulates.
    """
    node = running_node()
    return None if node is None else (node.name(), node._sequence_nr())


def current_backward() -> int:
    """A number for the backward that is running in this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


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
    # A hook that is registered after the first step would otherwise never run.
    "skip_nnmodule_hook_guards": False,
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
    **NUMPY_SETTINGS,
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
    with dynamo.config.patch(**settings), go_on_inside_modules(), layouts_of_kernels(), marks_allowed():
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
    function: FunctionType | Callable[..., Any],
    backends: Sequence[Callable[..., Any]],
    given_up: Callable[[], None],
    failed: Callable[[Exception], None],
) -> list[Callable[..., Any]]:
    """``torch.compile`` for one shape that stays, and for all others, whose sizes become symbols.

    The two look up their captures apart, so that the shape that stays never runs code for the others.
    What Dynamo learns of sizes that vary they share: with the first capture of another shape it knows.

    Args:
        function: What to compile.
        backends: Called with every graph that is captured, the first for the shape that stays, the second for
            the others.
        given_up: Called when a function has been captured so often that it never will be again.
        failed: Called with what goes wrong when one is captured; then it runs as it is.
    """
    options: dict[str, Any] = {"symbolic": True, "given_up": given_up, "failed": failed}
    if takes_argument("_optimize", "isolate_recompiles"):
        fresh = _fresh(function)
        options["isolate_recompiles"] = True
        return [_optimized(fresh, backend, **options) for backend in backends]
    return [_optimized(_fresh(function), backend, **options) for backend in backends]


def _optimized(
    function: FunctionType,
    backend: Callable[..., Any],
    *,
    symbolic: bool,
    given_up: Callable[[], None] | None = None,
    failed: Callable[[Exception], None] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    answer_like_eager(backend)
    widen_grouped_products()
    context: Any = dynamo.optimize(backend, **options)
    context.callback = _WithSettings(context.callback, symbolic, given_up)
    if failed is not None:
        context.callback = RunsAsItIs(context.callback, failed)
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


def hooks_on_all_modules() -> tuple[int, ...]:
    """The hooks that are registered on all modules at once, by number; Dynamo does not notice new ones."""
    if not torch.nn.modules.module._has_any_global_hook():
        return ()
    every = torch.nn.modules.module
    kinds = (
        every._global_forward_pre_hooks, every._global_forward_hooks,
        every._global_backward_pre_hooks, every._global_backward_hooks,
    )  # fmt: skip
    return tuple(number for hooks in kinds for number in hooks)


def installed_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What is installed in place of a module's call (by us or by ``module.compile()``)."""
    return module._compiled_call_impl


def install_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Put ``call`` in place of the module's own; None takes it out. Pickle and deepcopy drop it."""
    module._compiled_call_impl = call
    leave_out_of_scripts(module, call is not None)


# ---- operators and sizes -----------------------------------------------------------------------

OpOverload = torch._ops.OpOverload
"""The type of ATen-style operator overloads."""


def is_operator(target: object) -> bool:
    """Whether a graph node's target is an ATen-style operator overload."""
    return isinstance(target, torch._ops.OpOverload)


def uses_generator(operator: Any) -> bool:
    """Whether an operator draws random numbers."""
    return isinstance(operator, torch._ops.OpOverload) and (
        torch.Tag.nondeterministic_seeded in operator.tags
    )


_OF_PYTORCH = frozenset({"aten", "prims", "mkldnn", "torchvision"})


def is_foreign(operator: Any) -> bool:
    """Whether an operator is from outside PyTorch: nothing but the shapes of its results is known."""
    return isinstance(operator, OpOverload) and operator.namespace not in _OF_PYTORCH


def may_draw(operator: Any) -> bool:
    """Whether an operator draws random numbers, or may: nothing makes those of users say so."""
    return uses_generator(operator) or is_foreign(operator)


def sized_by_data(operator: Any) -> bool:
    """Whether the shapes of an operator's results depend on data (``nonzero``, ``masked_select``)."""
    return isinstance(operator, torch._ops.OpOverload) and torch.Tag.dynamic_output_shape in operator.tags


def deep_copy_with(module: torch.nn.Module, replaced: dict[int, Any]) -> torch.nn.Module:
    """A deep copy of a module in which objects (by ``id``) are replaced rather than copied."""
    memo: dict[int, Any] = dict(replaced)
    return copy.deepcopy(module, memo)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Suspend the dispatch modes that are active (to run real operations inside a fake step)."""
    with torch.utils._python_dispatch._disable_current_modes():
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
