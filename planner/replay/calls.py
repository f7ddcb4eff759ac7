"""The operator calls that are counted, in the recording of a step and in every planned step alike.

A plan names a call by its position among the counted calls of the module's forward. Views are not counted:
they allocate nothing, and a node gets its view of a storage that is made again by sizes, strides and offset.
"""

import functools
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from planner._torch import operators
from planner._torch.execution.cast_inside import casts_inside
from planner._torch.tensors import SPARSE
from planner.training_step.recorder import QUERIES
from planner.training_step.user_lines import is_users_file

aten = torch.ops.aten

DETACH = aten.detach.default
"""The operator that autograd calls when it unpacks a node's own result."""
_LIFTS = frozenset({aten.lift_fresh.default, aten.lift.default})
_BATCH_NORMS = frozenset(
    getattr(aten, name).default
    for name in ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm")
    if hasattr(aten, name)
)
"""Their arguments begin with input, weight, bias, running mean, running variance, training."""
_STATISTICS_FROM = {
    aten.batch_norm_update_stats.default: 1,
    aten.batch_norm_gather_stats.default: 3,
    aten.batch_norm_gather_stats_with_counts.default: 3,
}
"""Parts of a normalisation across ranks that update running statistics: from which argument these begin."""
_RESHAPES_STORAGE = frozenset(
    {"aten::resize_", "aten::set_", "aten::resize_as_", "inductor::resize_storage_bytes_"}
)


@functools.cache
def is_counted(func: Any) -> bool:
    """Whether a call of an operator has a position."""
    return (
        operators.is_operator(func)
        and not func.is_view
        and func not in _LIFTS  # these hand on a tensor that Python made
        and operators.name_of(func) not in QUERIES
    )


def tensors_among(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results of an operator, in order, without sparse ones."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout not in SPARSE:
                yield value
        elif isinstance(value, list | tuple):
            yield from tensors_among(value)


def results_of(out: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operator returned, in order."""
    return tensors_among((out,))


def operands_of(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operator was given, in order."""
    yield from tensors_among((*args, *(kwargs or {}).values()))


@functools.cache
def is_factory(func: Any) -> bool:
    """Whether Python gets a tensor with another version counter than the result, as of ``torch.zeros``."""
    return operators.takes_pinning(func)


def is_batch_norm(func: Any) -> bool:
    """Whether an operator updates running statistics; not every schema says so."""
    return func in _BATCH_NORMS


def statistics_of(func: Any, args: Any) -> list[torch.Tensor]:
    """The running statistics that a batch normalisation in training updates.

    Neither the schema nor the version counters tell of it: the kernels write to the memory itself.
    """
    if is_batch_norm(func):
        return list(tensors_among(args[3:5])) if args[5] else []
    first = _STATISTICS_FROM.get(func)
    return [] if first is None else list(tensors_among(args[first : first + 2]))


def without_statistics(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a batch normalisation that runs again. In training it must not update the running
    statistics twice; in evaluation it only reads them."""
    return args if not args[5] else (*args[:3], None, None, *args[5:])


def written_operands(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments that it writes, as its schema says."""
    if not operators.writes(func):
        return []
    written: list[torch.Tensor] = []
    for position, name in operators.written_positions(func):
        given = args[position] if position < len(args) else (kwargs or {}).get(name)
        written += tensors_among((given,))
    return written


@functools.cache
def draws(func: Any) -> bool:
    """Whether an operator may draw random numbers. The tag of the CPU's attention says so, but it draws none:
    with dropout PyTorch calls other operators."""
    return operators.may_draw(func) and operators.name_of(func) != (
        "aten::_scaled_dot_product_flash_attention_for_cpu"
    )


def why_not_noted(func: Any, args: Any, kwargs: Any) -> str | None:
    """Why a call does not run again for what it is handed; None where it may.

    A generator has moved on by then. Memory of a sparse tensor is no operand: nothing keeps it until then.
    """
    for value in (*args, *(kwargs or {}).values()):
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, torch.Tensor):
                if one.layout in SPARSE:
                    return "it reads a sparse tensor"
            elif isinstance(one, torch.Generator):
                return "it draws from a generator that it was handed"
    return "autocast may cast what it calls inside" if casts_inside(func) else None


@functools.cache
def can_run_again(func: Any) -> bool:
    """Whether a second call, with the same arguments and generator state, gives the same results and has no
    other effect, as far as the operator itself is concerned."""
    name = operators.name_of(func)
    return not (
        operators.is_collective(func)
        or name in _RESHAPES_STORAGE
        or name in ("aten::_local_scalar_dense", "aten::_assert_async", "aten::record_stream")
        or func is aten._cudnn_rnn.default
        or func in operators.KEPT_BY_PYTORCH
        or func in _STATISTICS_FROM  # statistics would be updated twice
        or name == "aten::_batch_norm_with_update"
    )


def users_line(within: CodeType) -> str | None:
    """The user's innermost running line, inside of a call of a function of ours; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not within:
        file = frame.f_code.co_filename
        if is_users_file(file) and not file.endswith("/contextlib.py"):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None
