"""Private names of autograd's engine."""

import contextlib
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from planner._torch import compat
from planner._torch.own_code import is_of_pytorch, is_of_this_package

DISPATCH = "__torch_dispatch__"
_RUNS_ENGINE = _engine_run_backward.__code__


class InfrastructureMode(TorchDispatchMode):
    """A dispatch mode that Dynamo and autograd ignore."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True


class _Around(threading.local):
    """The backward of this thread that the running code does not belong to; -1 for none."""

    backward = -1


_around = _Around()


@contextlib.contextmanager
def apart_from_a_backward() -> Iterator[None]:
    """A context whose code does not belong to the backward that runs around it.

    A step may be recorded in a hook of another backward, where gradient caching calls a model; it has a
    forward of its own all the same.
    """
    before, _around.backward = _around.backward, torch._C._current_graph_task_id()
    try:
        yield
    finally:
        _around.backward = before


class CountingMode(TorchDispatchMode):
    """A dispatch mode that Dynamo does not wrap at each call: compiled code under it runs without a plan."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def running_node() -> Any:
    """The autograd node whose backward is running in this thread; None outside of a backward."""
    running = torch._C._current_graph_task_id()
    return None if running in (-1, _around.backward) else torch._C._current_autograd_node()


def running_node_number() -> tuple[str, int] | None:
    """Name and number of :func:`running_node`.

    A reference to the node itself would hold its graph, and the tensors whose gradients that accumulates.
    """
    node = running_node()
    return None if node is None else (node.name(), node._sequence_nr())


def leaves_behind(node: Any) -> list[torch.Tensor]:
    """The leaves that an autograd node, or one right behind it, gives gradients to."""
    return [one.variable for one in accumulates_into(node)]


def accumulates_into(node: Any) -> list[Any]:
    """The nodes, right behind an autograd node or one further, that accumulate the gradients of leaves."""
    behind = [after for after, _ in node.next_functions if after is not None]
    further = [after for one in behind for after, _ in one.next_functions if after is not None]
    return [one for one in (*behind, *further) if hasattr(one, "variable")]


class _Alive:
    """Lives as long as an autograd node that holds it."""

    __slots__ = ("__weakref__",)


def accumulates_for_a_graph(leaf: torch.Tensor) -> Callable[[], bool] | None:
    """Whether a graph holds the node that accumulates a leaf's gradient; None where there is none now.

    A leaf has one such node at a time, which all of its graphs share and which goes with the last of them.
    """
    node: Any = get_gradient_edge(leaf).node
    alive = node.metadata.setdefault("planner: alive", _Alive())
    watched = weakref.ref(alive)
    del node, alive
    return None if watched() is None else lambda: watched() is not None


def engine_calls() -> bool:
    """Whether the engine, or a node of PyTorch's, called the operator that a dispatch mode is handed.

    If not, Python code called it: a hook, or a user's backward. The mode has to ask this itself.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != DISPATCH:
        frame = frame.f_back
    while frame is not None and frame.f_code is not _RUNS_ENGINE:
        if frame.f_code.co_name != DISPATCH and not is_of_pytorch(frame.f_code):
            return False
        frame = frame.f_back
    return True  # without a frame of it in the engine's own threads


def engine_asks() -> bool:
    """Whether the engine called this package's code that asks: a node in C++ unpacks what it has saved.

    If not, Python code does: a hook, or a backward in Python, which may read it again, or hold it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_of_this_package(frame.f_code):
        frame = frame.f_back
    return frame is None or frame.f_code is _RUNS_ENGINE


_COMPARISONS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            *("ClampBackward0", "ClampBackward1", "ClampMaxBackward1", "ClampMinBackward1"),
            *("MaximumBackward0", "MinimumBackward0", "FmaxBackward0", "FminBackward0"),
        ),
        ("masked_fill",),
    )
    if compat.version() >= (2, 14)
    else (("ClampBackward0", "ClampBackward1"), ("logical_and", "logical_or")),
)
"""From 2.14 on each of two equal elements gets half of the gradient."""

_IN_PLACE = {
    node: frozenset(names)
    for nodes, names in (
        (("IndexBackward0",), ("index_put",)),
        (("IndexSelectBackward0",), ("index_add",)),
        (("GatherBackward0", "CummaxBackward0", "CumminBackward0"), ("scatter_add",)),
        (
            (
                *("MaxBackward0", "MinBackward0", "MedianBackward1", "NanmedianBackward1", "ModeBackward0"),
                *("SortBackward0", "SortBackward1", "TopkBackward0", "KthvalueBackward0"),
            ),
            ("scatter",),
        ),
        (("MaskedSelectBackward0",), ("masked_scatter",)),
        (("TakeBackward0",), ("put",)),
        (("TraceBackward0",), ("index_fill",)),
        (("Atan2Backward0",), ("masked_fill",)),
        *_COMPARISONS,
        (("BinaryCrossEntropyWithLogitsBackward0",), ("sub", "mul", "div")),
        (("BinaryCrossEntropyBackward0",), ("mul",)),
    )
    for node in nodes
}


def in_place_for_plain_tensors(node: str, operator: Any) -> Any:
    """The operator that a node's backward runs on plain tensors instead of this one; None for the same one.

    For tensors without data, and under dispatch modes, backwards write nothing in place.
    """
    names = _IN_PLACE.get(node)
    if names is None:
        return None
    name, _, overload = str(operator).removeprefix("aten.").partition(".")
    if name not in names or torch.is_grad_enabled():
        return None
    return getattr(getattr(torch.ops.aten, f"{name}_"), overload, None)


def current_backward() -> int:
    """A number for the backward that is running in this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def runs_leaf(node: Any) -> bool:
    """Whether the running backward runs a node that accumulates a leaf's gradient.

    ``torch.autograd.grad`` does not: it takes the gradients that it is asked for before these nodes.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # in torch.autograd.grad
        return False


def graph_is_kept() -> bool:
    """Whether the running backward keeps its saved tensors (``retain_graph=True``); True if none runs."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def backward_keeps_graph() -> bool:
    """Whether a backward runs that keeps its saved tensors, unlike code that reads those of a node."""
    return graph_is_kept() and current_backward() != -1


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a batch of tensors, as inside of ``torch.func.vmap``."""
    of = torch._C._functorch
    return of.is_batchedtensor(tensor) or of.is_legacy_batchedtensor(tensor)


def exclusively_owned(tensor: torch.Tensor) -> bool:
    """Whether, seen from a dispatch mode, only the caller in C++ holds this tensor and its storage.

    The Python wrappers that a dispatch mode makes are allowed for. This is the
    condition under which the autograd engine accumulates gradients in place.
    """
    uses = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count <= 4 and uses <= 2


def hooks_on_saved_tensors() -> Any:
    """The innermost active hooks on saved tensors; None without any, and before PyTorch 2.7, which does not
    tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(False)


def saved_tensors_hooks_are_allowed() -> bool:
    """Whether hooks on saved tensors may be set here: not inside of ``torch.func.grad``, for one."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


@contextlib.contextmanager
def no_saved_tensors_hooks() -> Iterator[None]:
    """A context without the hooks on saved tensors of the code around it.

    Those of ``torch.utils.checkpoint`` count the tensors that the step saves, and would count the ones here.
    """
    state: Any = torch._C._autograd
    outer = []
    while (hooks := hooks_on_saved_tensors()) is not None:
        outer.append(hooks)
        state._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(outer):
            state._push_saved_tensors_default_hooks(pack, unpack)


class _Guard:
    """Takes the place of a hook, and calls it only where a gradient has arrived."""

    def __init__(
        self, hook: Callable[[Any], Any], arrived: dict[int, bool] | None = None, key: int = -1
    ) -> None:
        self.hook, self._arrived, self._key = hook, arrived, key

    def __call__(self, given: Any) -> Any:
        if given is None or (self._arrived is not None and not self._arrived.pop(self._key, True)):
            return None
        return self.hook(given)


class _GuardedHooks(OrderedDict[int, Any]):
    """The hooks on one tensor, each of which is guarded as soon as it is registered."""

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, hook if isinstance(hook, _Guard) else _Guard(hook))


def call_no_hooks_without_gradient(tensor: Any) -> None:
    """Have later hooks on a tensor, which is no leaf, called only where it gets a gradient.

    The engine calls them with None where only another result of the tensor's node gets one, and does so
    before any code of the node can look.
    """
    if tensor._backward_hooks is None:
        tensor._backward_hooks = _GuardedHooks()
        tensor.grad_fn._register_hook_dict(tensor)


def leave_out_hooks_without_gradients(node: Any, others: Sequence[dict[int, Callable[[Any], Any]]]) -> None:
    """Call no hooks, in the running backward, where a node hands on no gradient.

    For every input of a node that runs, the engine calls the hooks on the tensor, with None if there is no
    gradient, and those after accumulation. A compiled node stands for many nodes: it runs for inputs that
    eager's backward does not reach.

    Args:
        node: The node. The hooks on the leaves that it gives gradients to are guarded.
        others: Further dictionaries of hooks, as tensors have them.
    """
    guarded: list[Any] = [hooks for hooks in others if hooks]
    handles: list[Any] = []  # a leaf's node may outlive this backward

    def guard(hooks: Any, arrived: dict[int, bool] | None = None) -> None:
        for key, hook in hooks.items():
            hooks[key] = _Guard(hook.hook if isinstance(hook, _Guard) else hook, arrived, key)

    for hooks in guarded:
        guard(hooks)
    for accumulating in {id(one): one for one in accumulates_into(node)}.values():
        leaf = accumulating.variable
        if hooks := leaf._backward_hooks:
            guard(hooks)
            guarded.append(hooks)
        if hooks := leaf._post_accumulate_grad_hooks:
            arrived: dict[int, bool] = {}  # by hook; each takes its own
            seen = accumulating.register_prehook(
                lambda gradients, arrived=arrived, hooks=hooks: arrived.update(
                    dict.fromkeys(hooks, gradients[0] is not None)
                )
            )
            handles.append(seen)
            guard(hooks, arrived)
            guarded.append(hooks)

    def as_before() -> None:
        for handle in handles:
            handle.remove()
        for hooks in guarded:
            for key, hook in hooks.items():
                if isinstance(hook, _Guard):
                    hooks[key] = hook.hook

    if guarded:
        after_this_backward(as_before)


def leave_out_functions_without_gradients(node: Any) -> None:
    """Have Python's autograd functions that a node calls next do nothing where it gives them no gradient.

    The engine calls them with zeros instead, and the nodes after them get gradients of zeros. Eager's
    backward would not reach them, nor call the hooks on them, such as a module's backward hooks. Compiled
    nodes after this one do the same for the nodes that they call.
    """
    pending, seen = [node], {node}
    while pending:
        for after, _ in pending.pop().next_functions:
            if after is None or after in seen:
                continue
            seen.add(after)
            if not isinstance(after, BackwardCFunction):
                pending.append(after)
            elif not hasattr(after._forward_cls, "_aot_id"):  # type: ignore[attr-defined]
                pending.append(after)
                _do_nothing_without_gradients(after)


def _do_nothing_without_gradients(function: Any) -> None:
    if "apply" in vars(function):
        return
    arrived = {"some": True}
    before = function.register_prehook(
        lambda gradients: arrived.update(some=any(gradient is not None for gradient in gradients))
    )
    after = function.register_hook(lambda *_: None)
    for handle in (before, after):
        hooks = handle.hooks_dict_ref()  # PyTorch keeps all of a node's in one
        for key, hook in hooks.items():
            if key != handle.id:
                hooks[key] = _where_some_arrived(hook)
    after.remove()
    apply, inputs = type(function).apply, len(function.needs_input_grad)
    itself = weakref.ref(function)  # a reference cycle would keep its graph until the garbage collector runs

    def applied(*gradients: Any) -> Any:
        return apply(itself(), *gradients) if arrived["some"] else (None,) * inputs

    function.apply = applied


def _where_some_arrived(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook on a node, called where one of the node's gradients has arrived."""

    def called(*given: Any) -> Any:
        return hook(*given) if any(gradient is not None for gradient in given[-1]) else None

    return called


def after_this_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the running backward."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)
