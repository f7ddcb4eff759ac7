"""Masks of a step that is followed by replaying, kept as bits, eight elements to a byte.

Eager's dropout on the CPU saves its noise, a tensor of zeros and of one other number, as large as what it
drops: with bits in its place a thirty-second of it is kept, and no number is drawn again. Comparisons leave
booleans. Both are packed as they lie in memory, in the order of their storage.

After Gist (Jain et al., ISCA 2018), which encodes what is kept and recomputes nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from planner._torch import fake, operators
from planner._torch.execution.mask_operators import pack_bits
from planner.costs.devices import Device, round_bytes
from planner.costs.roofline import Costs
from planner.costs.workspace import NOT_RUN, WorkspaceMeter
from planner.graph.replay.packed import LEAST_ELEMENTS
from planner.problem.encodings import Packing
from planner.replay.capture import ReplayedStep
from planner.replay.problem import ReplayProblem
from planner.training_step.call import Call
from solvers.model.indices import BaseOp, base_op, listed

aten = torch.ops.aten

_CHUNK = 1 << 18
"""Elements that are packed or unpacked at once: as much as stays in a core's cache."""

_TYPES = frozenset({torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16})
_SUMMED = frozenset({torch.float32, torch.float64})
"""Types in which sums of eight such numbers are exact to less than a half."""
_MADE_EMPTY = frozenset({aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default})
_DRAWN = aten.bernoulli_.float
_DIVIDED = aten.div_.Scalar


def pack(mask: torch.Tensor, kept: float) -> torch.Tensor:
    """Which elements of a mask, or of dropout's noise, are not zero, as bits in the order of its memory.

    Args:
        mask: A tensor that fills its storage.
        kept: What those of its elements are that are not zero.
    """
    count = mask.numel()
    flat = mask.as_strided((count,), (1,))
    packed = torch.empty((count + 7) // 8, dtype=torch.uint8, device=mask.device)
    weights = None
    if mask.dtype in _SUMMED:  # a byte is the sum of the powers of two at which elements are not zero
        weights = torch.tensor([2.0**i / kept for i in range(8)], dtype=mask.dtype, device=mask.device)
    for start in range(0, count, _CHUNK):
        part = flat[start : start + _CHUNK]
        if weights is not None and len(part) % 8 == 0:
            bits = torch.mv(part.view(-1, 8), weights).round_()
        else:
            bits = pack_bits(part if part.dtype is torch.bool else part.ne(0))
        packed[start // 8 : start // 8 + len(bits)].copy_(bits)
    return packed


def unpack(packed: torch.Tensor, count: int, dtype: torch.dtype, kept: float) -> torch.Tensor:
    """The elements that :func:`pack` packed, in one dimension.

    Args:
        packed: Their bits.
        count: How many there are.
        dtype: Their type.
        kept: What those are that are not zero.
    """
    flat = torch.empty(count, dtype=dtype, device=packed.device)
    table = _bytes_of(dtype, kept, packed.device)
    whole = count // 8
    rows = flat[: 8 * whole].view(-1, 8)
    for start in range(0, whole, _CHUNK // 8):
        part = packed[start : min(whole, start + _CHUNK // 8)]
        torch.index_select(table, 0, part.int(), out=rows[start : start + len(part)])
    if count > 8 * whole:
        flat[8 * whole :] = table[int(packed[whole])][: count - 8 * whole]
    return flat


@functools.cache
def _bytes_of(dtype: torch.dtype, kept: float, device: torch.device) -> torch.Tensor:
    """For each byte the eight elements that it stands for."""
    with fake.without_modes():
        bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
        elements = bits.to(dtype)
        return (elements if kept == 1.0 else elements.mul_(kept)).to(device)


def is_noise(names: Sequence[str]) -> bool:
    """Whether operators of these names, one after the other on the same memory, make dropout's noise."""
    first, *rest = names if names else ("",)
    return first in map(str, _MADE_EMPTY) and rest in (
        [str(_DRAWN)],
        [str(_DRAWN), str(_DIVIDED)],
    )


def kept_by(func: Any, out: Any, args: Sequence[Any]) -> float | None:
    """What the elements of a mask are that are not zero, by the call that made it or wrote it last; None
    where it can be no mask."""
    if not isinstance(out, torch.Tensor) or out.dtype not in _TYPES:
        return None
    if func is _DRAWN:
        return 1.0
    if func is _DIVIDED:
        divisor = args[1]
        return (
            noise_of(float(divisor), out.dtype)
            if isinstance(divisor, int | float) and 0 < divisor <= 1
            else None
        )
    return 1.0 if out.dtype is torch.bool and not operators.writes(func) else None


@functools.cache
def noise_of(divisor: float, dtype: torch.dtype) -> float:
    """What dropout's noise is where it is not zero: one, divided by the probability to keep an element."""
    with fake.without_modes():
        return float(torch.ones(1, dtype=dtype).div_(divisor))


_library = torch.library.Library("planner", "FRAGMENT")


def _defined(schema: str, function: Any) -> Any:
    name = _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.planner, name).default


PACK_NOISE = _defined("pack_noise(Tensor mask, float kept) -> Tensor", pack)
UNPACK_NOISE = _defined(
    "unpack_noise(Tensor packed, int count, ScalarType dtype, float kept) -> Tensor", unpack
)
"""For measuring what these take."""


def divisor_of(operators: Sequence[Any], arguments: Sequence[Sequence[Any]]) -> float | None:
    """By what dropout's noise is divided that some calls make, in order; None where they make something else.

    Args:
        operators: The call that makes it, and those that write it.
        arguments: Of each.
    """
    if len(operators) not in (2, 3) or operators[0] not in _MADE_EMPTY or operators[1] is not _DRAWN:
        return None
    if len(operators) == 2:
        return 1.0
    divisor = arguments[2][1] if operators[2] is _DIVIDED and len(arguments[2]) == 2 else None
    return float(divisor) if isinstance(divisor, int | float) and 0 < divisor <= 1 else None


def find_masks(
    captured: ReplayedStep,
    problem: ReplayProblem,
    device: Device,
    meter: WorkspaceMeter | None,
    costs: Costs,
) -> tuple[Packing, ...]:
    """The masks of a problem that can be kept as bits; on the CPU only."""
    if device.kind != "cpu":
        return ()
    graph, calls, outputs = problem.graph, captured.compiled.calls, captured.compiled.outputs
    found: list[tuple[BaseOp, Any, BaseOp, torch.Tensor, float]] = []
    again = np.unique(graph.recompute_row[graph.recompute_row >= 0])
    for base in listed(BaseOp, graph.base_of[again]):
        results = [v for v in graph.ops[base].outputs if not graph.values[v].on_demand]
        of_calls = problem.calls_of[base]
        numbers = [captured.compiled.events[event].call for event in of_calls]
        if len(results) != 1 or None in numbers:
            continue
        made = outputs[numbers[0]]  # type: ignore[index]
        if not isinstance(made, torch.Tensor) or not fills_storage(made):
            continue
        known = [calls[n] for n in numbers]  # type: ignore[index]
        divisor = divisor_of([c.func for c in known], [c.args for c in known])
        kept = None if divisor is None else noise_of(divisor, made.dtype)
        if made.dtype is torch.bool and len(known) == 1:
            kept = 1.0
        if kept is None or made.dtype not in _TYPES or made.numel() < LEAST_ELEMENTS:
            continue
        found.append((base, results[0], base_op(problem.row_of_event[of_calls[-1]]), made, kept))
    taken: list[tuple[Call, torch.Tensor]] = []  # for each mask packing, and unpacking, with what they return
    for _, _, _, made, kept in found:
        with fake.mode_of([made]):
            bits = torch.empty((made.numel() + 7) // 8, dtype=torch.uint8, device=made.device)
        taken.append((Call(PACK_NOISE, (made, kept)), bits))
        taken.append((Call(UNPACK_NOISE, (bits, made.numel(), made.dtype, kept)), made))
    memories = [NOT_RUN] * len(taken) if meter is None else meter.measure([call for call, _ in taken])
    seconds = [costs.seconds(call.func, call.args, call.kwargs, out) for call, out in taken]
    return tuple(
        Packing(
            base,
            value,
            round_bytes(device, (made.numel() + 7) // 8),
            seconds[2 * i],
            memories[2 * i].workspace_bytes,
            seconds[2 * i + 1],
            memories[2 * i + 1].workspace_bytes,
            None,
            None if written == base else written,
        )
        for i, (base, value, written, made, _) in enumerate(found)
    )


def fills_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all that lies in its storage, each element once."""
    if tensor.layout is not torch.strided:
        return False
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.storage_offset() == 0
