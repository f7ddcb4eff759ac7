"""Calls that no graph holds: Dynamo ends a graph before them and the line runs as written, or it is refused.

Either is a reason for ``backend="auto"`` to choose replay.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import TensorVariable

from planner._torch.patches import replace
from planner._torch.tracing.rules import handle, handler_of

IsOurs = Callable[[Any], bool]
"""Whether an instruction translator of Dynamo's traces for a planned module."""

# Names of functions that set, for the whole process, the type of new tensors, kernels, or how these round.
# Dynamo puts such a call into the graph, or after it: all of the graph would run under one setting.
_SETS = re.compile(
    r"_?set_(default_(dtype|tensor_type)|deterministic|float32|fp32|mkldnn|cudnn|cublas|nnpack|blas|linalg"
    r"|math_sdp|sdp_use)\w*|set_flags|use_deterministic_algorithms|enable_\w+_sdp"
)
_HOMES_OF_SETTINGS = re.compile(r"torch(\._C|\.backends\.\w+)?")

# Names of functions that raise an error for some data only, as where a matrix has no inverse. A graph would
# raise it where the graph runs, outside of a `try` around the call. And of what begins inference mode: a view
# that AOTAutograd takes there of what has a gradient is an error, after which no operator runs in the thread
# any more.
_REFUSED = re.compile(
    r"_enter_inference_mode|multinomial|(linalg_)?(cholesky|inv|inverse|solve|solve_ex|eigh|eigvalsh|eig|eigvals"
    r"|svd|svdvals|lstsq|pinv|pinverse|tensorinv|tensorsolve|ldl_factor|lu_factor|lu|qr)|linalg_cond"
)


def end_graph(kind: str, why: str) -> NoReturn:
    """End the graph that is being captured before the call that Dynamo has reached."""
    unimplemented(gb_type=kind, context="", explanation=why, hints=[])


def refusal(graph: torch.fx.GraphModule) -> str | None:
    """Why a graph of Dynamo's cannot do what eager does; None where it can."""
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if node.op == "call_method":
                name, home = str(node.target), "torch"
            else:
                name = getattr(node.target, "__name__", "")
                home = getattr(node.target, "__module__", None) or "torch"
            if _REFUSED.fullmatch(name) and home.partition(".")[0] == "torch":
                return f"the forward calls {name.removeprefix('_enter_')}(), which graphs leave to replays"
    return None


@functools.cache
def leave_out_calls(is_ours: IsOurs) -> None:
    """End graphs of captures of ours before such calls."""
    _leave_out_settings(is_ours)
    _leave_out_gradients(is_ours)
    _leave_out_writes_through_masks(is_ours)
    _leave_out_recurrent_layers(is_ours)
    _leave_out_where("operators taken apart", torch.bilinear, is_ours, _casts_inside)
    observe = torch.fused_moving_avg_obs_fake_quant
    _leave_out_where("operators taken apart", observe, is_ours, _makes_room_for_channels)


Refusal = Callable[..., tuple[str, str] | None]
"""Given translator and arguments: the kind of the call and why no graph may hold it; None if one may."""


def _leave_out_where(subject: str, function: Callable[..., Any], is_ours: IsOurs, refusal: Refusal) -> None:
    before = handler_of(function)

    def handler(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        refused = refusal(tx, *args, **kwargs) if is_ours(tx) else None
        if refused is not None:
            end_graph(*refused)
        return None if before is None else before(variable, tx, *args, **kwargs)

    handle(subject, function, handler)


def _leave_out_settings(is_ours: IsOurs) -> None:
    for function in list(get_torch_obj_rule_map()):
        name, home = getattr(function, "__name__", ""), getattr(function, "__module__", None) or ""
        if _SETS.fullmatch(name) and _HOMES_OF_SETTINGS.fullmatch(home):
            why = "a setting of PyTorch's", f"{name}() sets how PyTorch computes, for the whole process."
            _leave_out_where("settings", function, is_ours, lambda *_, why=why, **__: why)


def _leave_out_gradients(is_ours: IsOurs) -> None:
    """End a graph at gradients that the forward takes inside, where Dynamo would trace them wrong, silently.

    It traces the backward of a ``torch.autograd.Function`` without gradients, so that gradients of its
    gradients would be missing; under ``torch.func`` it leaves that backward out. ``tensor.backward()`` would
    pass by hooks, and add to no gradient in place.
    """
    call, backward = AutogradFunctionVariable.call_apply, TensorVariable.method_backward

    def differentiated_again(tx: Any, *args: Any, **named: Any) -> tuple[str, str] | None:
        again = args[4] if len(args) > 4 else named.get("create_graph")
        if again is None or not again.as_python_constant():
            return None
        if not any(name.startswith("bwd_body") for name in tx.output.nn_modules):
            return None
        return "gradients of gradients", "A torch.autograd.Function is differentiated, and then again."

    def unless_transformed(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None and is_ours(tx):
            end_graph("a transformed autograd function", "torch.func transforms a torch.autograd.Function.")
        return call(self, tx, *args, **kwargs)

    def as_written(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(tx):
            end_graph("a backward inside of the forward", "tensor.backward() is called.")
        return backward(self, tx, *args, **kwargs)

    _leave_out_where("gradients", torch.autograd.grad, is_ours, differentiated_again)
    replace(AutogradFunctionVariable, "call_apply", unless_transformed)
    replace(TensorVariable, "method_backward", as_written)


def _leave_out_writes_through_masks(is_ours: IsOurs) -> None:
    """End a graph at a write through a boolean mask that needs a gradient, as ``x[mask] = token`` does.

    Data decide how many elements are written. AOTAutograd refuses such a graph when it traces the backward;
    Dynamo does not notice before.
    """
    write = TensorVariable.method___setitem__

    def unless_masked(self: Any, tx: Any, key: Any, value: Any) -> Any:
        written = _example(value)
        if written is not None and written.requires_grad and is_ours(tx):
            keys = key.items if isinstance(key, TupleVariable) else [key]
            if any(tensor is not None and tensor.dtype is torch.bool for tensor in map(_example, keys)):
                why = "What is written through a mask needs a gradient, whose size is data."
                end_graph("a write through a mask", why)
        return write(self, tx, key, value)

    replace(TensorVariable, "method___setitem__", unless_masked)


def _example(variable: Any) -> torch.Tensor | None:
    """The tensor without data that a variable of Dynamo's stands for, if it is one."""
    if not isinstance(variable, TensorVariable):
        return None
    tensor = variable.as_proxy().node.meta.get("example_value")
    return tensor if isinstance(tensor, torch.Tensor) else None


def _leave_out_recurrent_layers(is_ours: IsOurs) -> None:
    """End a graph where a recurrent layer is called whose weights are on a GPU.

    Eager runs nn.LSTM, nn.GRU and nn.RNN by cuDNN there. Which operators that takes is decided by the memory
    that the weights share, by cuDNN's handle and by its one state of dropout, none of which tensors without
    data have. Nor could such a layer run again: dropout between its layers draws from that state.
    """
    call = UnspecializedNNModuleVariable.call_function

    def unless_recurrent(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if runs_on_gpu(self.value) and is_ours(tx):
            why = (
                "cuDNN's recurrent layers run as written: they keep what was recorded, and do not run again."
            )
            end_graph("a recurrent layer on a GPU", why)
        return call(self, tx, *args, **kwargs)

    replace(UnspecializedNNModuleVariable, "call_function", unless_recurrent)


def runs_on_gpu(module: torch.nn.Module) -> bool:
    """Whether a module is a recurrent layer whose weights are on a GPU."""
    return isinstance(module, torch.nn.RNNBase) and any(w.is_cuda for w in module.parameters())


def _casts_inside(_tx: Any, *_args: Any, **_kwargs: Any) -> tuple[str, str] | None:
    # Its kernel multiplies through the dispatcher, where autocast casts: no graph can do that.
    if not torch._C._is_any_autocast_enabled():
        return None
    return "a bilinear product under autocast", "Autocast casts inside of its kernel."


def _makes_room_for_channels(_tx: Any, *args: Any, **kwargs: Any) -> tuple[str, str] | None:
    # An observer of channels begins with empty tensors, and resizes them when it first runs.
    lowest = args[3] if len(args) > 3 else kwargs.get("running_min")
    if 0 not in (getattr(lowest, "size", None) or ()):
        return None
    return "the first run of what observes channels", "Its tensors get their sizes there."
