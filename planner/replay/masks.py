"""Masks of a step that is followed by replaying, kept as bits, eight elements to a byte.

Dropout's noise (:mod:`planner._torch.execution.noise_operators`) and the booleans that comparisons leave.

After Gist (Jain et al., ISCA 2018), which encodes what is kept and recomputes nothing.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from planner._torch import fake, operators
from planner._torch.execution.noise_operators import PACK_NOISE, UNPACK_NOISE, noise_of
from planner._torch.tensors import fills_storage
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

_TYPES = frozenset({torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16})
_MADE_EMPTY = frozenset({aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default})
_DRAWN = aten.bernoulli_.float
_DIVIDED = aten.div_.Scalar


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
        usual = isinstance(divisor, int | float) and 0 < divisor <= 1
        return noise_of(float(divisor), out.dtype) if usual else None
    return 1.0 if out.dtype is torch.bool and not operators.writes(func) else None


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
        made, left = outputs[numbers[0]], outputs[numbers[-1]]  # type: ignore[index]
        if not all(isinstance(one, torch.Tensor) and fills_storage(one) for one in (made, left)):
            continue
        known = [calls[n] for n in numbers]  # type: ignore[index]
        one_or_noise = len(known) == 1 or is_noise([str(call.func) for call in known])
        kept = kept_by(known[-1].func, made, known[-1].args) if one_or_noise else None
        if kept is None or made.numel() < LEAST_ELEMENTS:
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
