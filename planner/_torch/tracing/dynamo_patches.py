"""Tracing takes the path that eager takes, and says why it stopped."""

import contextlib
import copy
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import guards
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.trace_rules import get_legacy_mod_inlinelist
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from planner._torch.compat import of_graphs, private
from planner._torch.patches import replace, replaced
from planner._torch.tracing.breaks.bound_methods import know_methods_by_name
from planner._torch.tracing.breaks.break_patches import (
    break_at_checkpoints_with_effects,
    look_for_numbers_among_symbols,
)
from planner._torch.tracing.breaks.calls_left_out import leave_out_calls
from planner._torch.tracing.breaks.known_breaks import break_where_it_broke
from planner._torch.tracing.breaks.long_loops import (
    look_at_items_one_by_one,
    move_iterators_that_are_unpacked,
)
from planner._torch.tracing.breaks.set_up_once import set_up_before_tracing
from planner._torch.tracing.inside_compile import call_planned_modules
from planner._torch.tracing.rules import handle, handler_of
from planner._torch.without_data.fake_values import NOT_FAKE

create_build_tuple, create_call_function = of_graphs(
    "torch._dynamo.bytecode_transformation", "create_build_tuple", "create_call_function"
)

_backends: "weakref.WeakSet[Any]" = weakref.WeakSet()
_compiling: "weakref.WeakSet[Any]" = weakref.WeakSet()
_BOOKKEEPING = {"transformers.utils.output_capturing", "planner.blocks.decorators"}
"""Modules that ask only to avoid code that Dynamo cannot trace, and compute the same either way: they get the
true answer."""
_QUESTIONS = ("is_compiling", "is_dynamo_compiling", "_is_in_optimized_module")


def trace_like_eager(backend: Callable[..., Any], *, compiling: bool = False) -> None:
    """Have Dynamo trace for this backend what eager runs.

    Libraries ask ``torch.compiler.is_compiling()`` and then compute the same in another way, which differs in
    the last bits or in memory. They get the answer no. PyTorch's own code gets the true answer.

    Args:
        backend: The backend.
        compiling: Libraries get the true answer, too: the step is compared with the compiled one.
    """
    _backends.add(backend)
    if compiling:
        _compiling.add(backend)
    _answer_questions()
    _break_inside_loops()
    _round_like_eager()
    leave_out_calls(_is_ours)
    end_graphs_at_plans()
    set_up_before_tracing(_is_ours)
    break_at_checkpoints_with_effects(_is_ours)
    look_for_numbers_among_symbols(_is_ours)
    know_methods_by_name(_is_ours)
    look_at_items_one_by_one(_is_ours)
    move_iterators_that_are_unpacked(_is_ours)
    break_where_it_broke(_is_ours)


def end_graphs_at_plans() -> None:
    """Let the user's own ``torch.compile`` run the call that is installed in a module."""
    call_planned_modules(_is_ours)


def backend_of(tx: Any) -> Any:
    """The backend that an instruction translator of Dynamo's traces for."""
    return _innermost(tx.output.compiler_fn)


def _is_ours(tx: Any) -> bool:
    return _is_among(_backends, tx)


def _is_among(backends: "weakref.WeakSet[Any]", tx: Any) -> bool:
    innermost = backend_of(tx)
    # Not `in`: Inductor's own cannot be hashed.
    return any(backend is innermost for backend in backends)


@functools.cache
def _answer_questions() -> None:
    handlers = TorchInGraphFunctionVariable._get_handlers()
    for question in [q for q in handlers if getattr(q, "__name__", "") in _QUESTIONS]:
        handle("questions", question, _answer(handlers[question]))
    # Libraries ask this together with the above. Dynamo would put the call into the graph, which fails
    # without CUDA, or break it.
    for captured in (torch.cuda.is_current_stream_capturing, torch.xpu.is_current_stream_capturing):
        handle("questions", captured, _not_captured)


def _answer(truth: Callable[..., Any]) -> Callable[..., Any]:
    def handler(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = str(tx.f_globals.get("__name__", "")).partition(".")[0] == "torch" or _keeps_books(tx)
        if theirs or not _is_ours(tx) or _is_among(_compiling, tx):
            return truth(variable, tx, *args, **kwargs)
        return VariableTracker.build(tx, False)

    return handler


def _keeps_books(tx: Any) -> bool:
    caller = tx.parent if tx.parent is not None and tx.f_globals.get("__name__") in NOT_FAKE else tx
    return caller.f_globals.get("__name__") in _BOOKKEEPING


@functools.cache
def _round_like_eager() -> None:
    """Keep operators whole that Dynamo takes apart into operations that round otherwise.

    For those that it takes apart as methods it has a setting, ``enable_dynamo_decompositions``.
    """
    for whole in (torch.addcdiv, torch._foreach_lerp_):
        if (taken_apart := handler_of(whole)) is not None:
            handle("operators taken apart", whole, _whole(taken_apart))


def _whole(taken_apart: Callable[..., Any]) -> Callable[..., Any]:
    def handler(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return None if _is_ours(tx) else taken_apart(variable, tx, *args, **kwargs)

    return handler


def _not_captured(_variable: Any, tx: Any) -> Any:
    return VariableTracker.build(tx, False) if _is_ours(tx) else None


def _innermost(backend: Any) -> Any:
    while True:
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "compiler_fn", None)
        if inner is None:
            return backend
        backend = inner


@functools.cache
def _break_inside_loops() -> None:
    """Go on after a graph break inside a loop, a graph for each part of each iteration.

    Dynamo otherwise gives up the whole function, and captures nothing of it. The code that it makes is
    right either way; there are more graphs.
    """
    has_backedge = InstructionTranslatorBase.maybe_has_backedge

    def only_for_others(self: Any) -> bool:
        return not _is_ours(self) and has_backedge(self)

    replace(InstructionTranslatorBase, "maybe_has_backedge", only_for_others)
    views = private("DictViewIterator")
    if views is not None and "reconstruct" not in vars(views):
        replace(views, "reconstruct", _rest_of_iterator)


def _rest_of_iterator(iterator: Any, codegen: Any) -> None:
    """Code that makes what is left of a dictionary's iterator, where a loop over an nn.ModuleList breaks."""
    left = list(copy.copy(iterator._iter))  # a copy of a dictionary's iterator is one of a list
    if iterator.view_type == "keys":
        left = [key.vt for key in left]
    elif iterator.view_type == "items":
        left = [TupleVariable([key.vt, value]) for key, value in left]
    codegen.add_push_null(lambda: codegen.append_output(codegen.create_load_python_module(iter)))
    codegen.foreach(left)
    codegen.append_output(create_build_tuple(len(left)))
    codegen.extend_output(create_call_function(1, False))


def said_once() -> set[Callable[..., Any]]:
    """The methods by which transformers logs a text once.

    The text was logged when the eager step ran, so no graph needs to end there.
    """
    named = [getattr(logging.Logger, name, None) for name in ("warning_once", "info_once")]
    return {function for function in named if function is not None}


@contextlib.contextmanager
def nothing_told_or_timed() -> Iterator[None]:
    """Let Dynamo recommend no setting where code asks a tensor for a number: no plan is made with it. And let
    it time no guards, which takes 25 ms a graph and is for its logs alone."""
    with (
        replaced(TensorVariable, {"_warn_capture_scalar_outputs": lambda *_: None}),
        replaced(guards, {"profile_guard_manager": lambda *_: 0.0}),
    ):
        yield


_FOLLOWED = (
    "nn/modules/transformer",
    "nn/modules/container",
    "ao/quantization/quantize",
    "ao/quantization/fake_quantize",
)
"""Files of PyTorch's with code of modules, without their ending."""


@contextlib.contextmanager
def go_on_inside_modules() -> Iterator[None]:
    """Capture the code of nn.Transformer and of containers after a break, as where they call a region.

    Dynamo traces calls into PyTorch's modules, but after a break it lets their code run as written. It traces
    no calls into the wrappers that quantisation in training puts around every module.
    """
    folder = Path(torch.__file__).parent.as_posix()
    files = get_legacy_mod_inlinelist()
    added = {f"{folder}/{name}" for name in _FOLLOWED} - files
    files |= added
    try:
        yield
    finally:
        files -= added
