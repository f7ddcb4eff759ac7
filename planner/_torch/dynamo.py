"""Dynamo: its settings, and compiling a function with a backend of ours."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
import torch._dynamo as dynamo
from torch._dynamo import eval_frame
from torch._dynamo.exc import (
    InternalTorchDynamoError,
    TorchRuntimeError,
    Unsupported,
    UserError,
)
from torch._dynamo.utils import ExactWeakKeyDictionary

from planner._torch.compat import of_graphs, takes_argument
from planner._torch.layouts.shape_functions import layouts_of_kernels, widen_grouped_products
from planner._torch.tracing.breaks.graph_breaks import reason_of_error
from planner._torch.tracing.breaks.known_breaks import forget_known_breaks
from planner._torch.tracing.callbacks import Callback, call_ours_in_any_stance
from planner._torch.tracing.dynamo_patches import (
    go_on_inside_modules,
    nothing_told_or_timed,
    said_once,
    trace_like_eager,
)
from planner._torch.tracing.generator_states import states_apart
from planner._torch.tracing.hindrances import (
    RunsAsItIs,
    guarded,
    left_alone,
    no_other_thread_traces,
    saved_tensors_are_changed,
    switched_on,
    trace_methods_of,
)
from planner._torch.tracing.let_go import Captured
from planner._torch.tracing.rules import keep_rules
from planner._torch.without_data.fake_values import lists_count
from planner.errors import CaptureError
from planner.heap import room_on_the_stack

_FrameAction, reset_code = of_graphs("torch._C._dynamo.eval_frame", "_FrameAction", "reset_code")
error_on_graph_break = of_graphs("torch._dynamo.decorators", "error_on_graph_break")

_DYNAMO_CONFIG: dict[str, Any] = {
    # A plan is followed also where the user's own torch.compile is switched off.
    "disable": False,
    # Settings that users try out for their own compiled code would leave no graph that can be planned.
    **dict.fromkeys(
        ("install_free_tensors", "prepare_freezing", "use_graph_deduplication", "verify_correctness"), False
    ),
    # A hook that is registered after the first step would otherwise never run.
    "skip_nnmodule_hook_guards": False,
    # nn.LSTM and the like are otherwise skipped silently.
    "allow_rnn": True,
    # Past the limit Dynamo runs the original silently.
    "recompile_limit": 64,
    "accumulated_recompile_limit": 1 << 16,
    # Inside DistributedDataParallel graphs are otherwise split at its buckets, after which no plan fits them.
    "optimize_ddp": False,
    "assume_static_by_default": True,
    # A counter among a module's attributes would otherwise mean a capture for each of its values.
    "allow_unspec_int_on_nn_module": True,
    # torch.autograd.grad inside of a forward becomes operations of the graph.
    "trace_autograd_ops": True,
    # Symbolic floats become tensors, which round differently.
    "specialize_float": True,
    # addcdiv_ and the like are otherwise taken apart, and round differently.
    "enable_dynamo_decompositions": False,
    # Dynamo traces numpy's functions as PyTorch's, which round differently: numpy is left to numpy.
    "trace_numpy": False,
    "use_numpy_random_stream": True,
    # A tensor with weak references cannot be exchanged in place (torch.utils.swap_tensors).
    "invalidate_compile_context_weakrefs": True,
    # Sizes that varied in other processes say nothing about this one.
    "automatic_dynamic_local_pgo": False,
    "automatic_dynamic_remote_pgo": False,
}


@contextlib.contextmanager
def dynamo_settings(*, symbolic: bool = False, parts: int = 0) -> Iterator[None]:
    """Settings of Dynamo that our captures need; the user's own come back on exit.

    Args:
        symbolic: Sizes that are found to vary become symbols; a first capture is of plain numbers anyway.
        parts: How many calls of one line may end a graph, as of a loop over layers. The code after each is
            captured by itself, and does not count as captured again.
    """
    keep_rules()
    # Dynamo patches PyTorch when it is first used, so that distributions look at no values: before any step.
    eval_frame.TorchPatcher.patch()
    ignored = dynamo.config.ignore_logging_functions | said_once()
    limit = _DYNAMO_CONFIG["recompile_limit"] + parts
    settings = {
        **_DYNAMO_CONFIG,
        "recompile_limit": limit,
        "automatic_dynamic_shapes": symbolic,
        "ignore_logging_functions": ignored,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(dynamo.config.patch(**settings))
        contexts = (nothing_told_or_timed, go_on_inside_modules, layouts_of_kernels)
        for context in (*contexts, lists_count, states_apart):
            stack.enter_context(context())
        yield


_OF_TRACING = (InternalTorchDynamoError, TorchRuntimeError, IndexError)
"""Errors of tracing; Dynamo passes an IndexError on as it is, since the traced code may handle it."""

MANY_CAPTURES = 16
"""More captures of one function than a training loop needs for its modes and shapes."""


NOT_A_GRAPH = (
    "Plan it with backend='replay', or leave backend= out: the plan then follows the step as it is written. "
    "Or change that line, or name parts of the model that are graphs in regions="
)
"""The next step where a forward breaks too often."""

_frames_looked_at = 0


def frames_looked_at() -> int:
    """How many frames without fitting code Dynamo was asked to capture, while it ran our captures."""
    return _frames_looked_at


class _WithSettings(Callback):
    """Dynamo's callback for a frame that it has no code for; runs under :func:`dynamo_settings`.

    Calls that find their code do not come here, and pay nothing for the settings. Where a forward sets hooks
    on saved tensors, the code inside runs as it is: the hooks see the tensors that eager saves.

    Raises:
        CaptureError: It breaks where ``unbroken`` says that it must not.
    """

    def __init__(
        self,
        callback: Any,
        symbolic: Callable[[], bool],
        given_up: Callable[[], None] | None,
        often: Callable[[int], None] | None,
        parts: int,
        whole: CodeType,
        unbroken: Callable[[], bool],
    ) -> None:
        super().__init__(callback)
        self._unbroken = unbroken
        self._symbolic, self._given_up, self._parts, self._whole = symbolic, given_up, parts, whole
        self._often = often
        self._captures: Any = ExactWeakKeyDictionary()  # of each module: regions share the code
        self._captured = Captured(self)
        self._with_graphs: Any = ExactWeakKeyDictionary()

    @room_on_the_stack
    def __call__(self, frame: Any, *rest: Any) -> Any:
        global _frames_looked_at
        if saved_tensors_are_changed():
            return left_alone()
        _frames_looked_at += 1
        module = frame.f_locals.get("module")
        if isinstance(module, torch.nn.Module):
            trace_methods_of(module)
        # One call without an operation, of a step that skips a batch or after the last part of a loop, and
        # what was captured before would never run again.
        whole = frame.f_code is self._whole
        empty = whole or frame.f_code in self._with_graphs or dynamo.config.allow_empty_graphs
        with (
            no_other_thread_traces(),
            dynamo_settings(symbolic=self._symbolic(), parts=self._parts),
            dynamo.config.patch(allow_empty_graphs=empty),
            error_on_graph_break(self._unbroken()),
        ):
            try:
                result = self._traced(frame, *rest)
            except (Unsupported, UserError) as error:
                raise CaptureError(
                    "the forward breaks into too many graphs; one ends at "
                    f"{reason_of_error(error)}. {NOT_A_GRAPH}"
                ) from error
        self._captured.add(result)
        if result.guarded_code is not None:
            self._with_graphs[frame.f_code] = True
        strategy = result.frame_exec_strategy
        if self._given_up is not None and strategy.cur_action == _FrameAction.RUN_ONLY:
            self._given_up()
        if whole and self._often is not None:
            self._captures[module] = times = self._captures.get(module, 0) + 1
            if times == MANY_CAPTURES:
                self._often(times)
                self._often = None
        return result

    def _traced(self, *frame: Any) -> Any:
        """Dynamo's capture of a frame.

        It has plain numbers where Dynamo cannot trace with symbols, as where a number that changes decides
        whether gradients or autocast are on.
        """
        try:
            return self._torchdynamo_orig_backend(*frame)
        except _OF_TRACING:
            if not dynamo.config.automatic_dynamic_shapes:
                raise
            with dynamo.config.patch(automatic_dynamic_shapes=False):
                return self._torchdynamo_orig_backend(*frame)


def _never() -> bool:
    return False


def dynamo_compile(
    function: FunctionType | Callable[..., Any],
    backend: Callable[..., Any],
    *,
    parts: int = 0,
    compiling: bool = False,
    unbroken: Callable[[], bool] = _never,
) -> Callable[..., Any]:
    """``torch.compile`` with our settings and static sizes, of a function that has a cache of its own.

    Args:
        function, backend: The function to compile, and Dynamo's backend.
        parts: As for :func:`dynamo_settings`.
        compiling: Whether libraries are told that they are compiled.
        unbroken: Whether a break of the present capture is an error.
    """
    # The code after a break is the user's, whose cache all captures would share.
    alone: dict[str, Any] = (
        {"isolate_recompiles": True} if takes_argument("_optimize", "isolate_recompiles") else {}
    )
    options = {"parts": parts, "compiling": compiling, "unbroken": unbroken, **alone}
    return _optimized(_fresh(function), backend, symbolic=_never, **options)


def dynamo_compile_shapes(
    function: FunctionType | Callable[..., Any],
    backends: Sequence[Callable[..., Any]],
    given_up: Callable[[], None],
    failed: Callable[[Exception], None],
    often: Callable[[int], None],
    *,
    plain: Callable[[], bool],
    parts: int = 0,
    compiling: bool = False,
) -> list[Callable[..., Any]]:
    """``torch.compile`` for one shape that stays, and for all others, whose sizes become symbols.

    The two have captures of their own, so that the shape that stays never runs code for the others. They
    share the sizes that Dynamo has seen vary: it knows these from the first capture of another shape on.

    Args:
        function: The function to compile.
        backends: Called with every captured graph: the first for the shape that stays, the second for the
            others.
        given_up: Called when a function was captured so often that Dynamo gives up.
        failed: Called with the error of a capture; the function then runs as it is.
        often: Called once with how often the function was captured for a module, if that is often.
        plain: Whether the present captures for the shape that stays have plain numbers, even where sizes vary
            among parts of the same code.
        parts: As for :func:`dynamo_settings`.
        compiling: As for :func:`dynamo_compile`.
    """
    options: dict[str, Any] = {"given_up": given_up, "failed": failed, "parts": parts}
    options |= {"compiling": compiling, "often": often}
    if takes_argument("_optimize", "isolate_recompiles"):
        fresh = _fresh(function)
        options["isolate_recompiles"] = True
        functions = [fresh] * len(backends)
    else:
        functions = [_fresh(function) for _ in backends]
    symbolic = [lambda: not plain(), *[_always] * (len(backends) - 1)]
    return [
        _optimized(of, backend, symbolic=now, **options)
        for of, backend, now in zip(functions, backends, symbolic, strict=True)
    ]


def _always() -> bool:
    return True


def _optimized(
    function: FunctionType,
    backend: Callable[..., Any],
    *,
    symbolic: Callable[[], bool],
    given_up: Callable[[], None] | None = None,
    failed: Callable[[Exception], None] | None = None,
    often: Callable[[int], None] | None = None,
    parts: int = 0,
    compiling: bool = False,
    unbroken: Callable[[], bool] = _never,
    **options: Any,
) -> Callable[..., Any]:
    trace_like_eager(backend, compiling=compiling)
    forget_known_breaks()
    widen_grouped_products()
    call_ours_in_any_stance()
    with switched_on():
        context: Any = dynamo.optimize(backend, **options)
    # Dynamo would keep it there, and with it the plan's optimizer, for as long as the process runs.
    eval_frame.cached_backends.pop(id(eval_frame.innermost_backend(context.callback)), None)
    rest = symbolic, given_up, often, parts, function.__code__, unbroken
    context.callback = _WithSettings(context.callback, *rest)
    if failed is not None:
        context.callback = RunsAsItIs(context.callback, failed)
    return guarded(context(function))


def forget(compiled: Callable[..., Any]) -> None:
    """Free the captures of a function that :func:`dynamo_compile` returned; it cannot be called any more.

    Dynamo puts compiled functions among global variables, and removes them when the code that names them is
    freed.
    """
    reset_code(inspect.unwrap(compiled).__code__)


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
