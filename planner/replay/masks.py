"""Masks of a replayed step that are kept as bits, eight elements to a byte.

These are dropout's noise (:mod:`planner._torch.execution.noise_operators`) and results of comparisons. After
Gist (Jain et al., ISCA 2018), which encodes kept tensors and recomputes nothing.
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
    return first in map(str, _MADE_EMPTY) and rest in ([str(_DRAWN)], [str(_DRAWN), str(_DIVIDED)])


def nonzero_value(func: Any, out: Any, args: Sequence[Any]) -> float | None:
    """The value of a mask's elements other than zero, given the operator that made it or wrote it last; None
    where the result can be no mask."""
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
    captured: ReplayedStep, problem: ReplayProblem, device: Device, meter: WorkspaceMeter | None, costs: Costs
) -> tuple[Packing, ...]:
    """The masks of a problem that can be kept as bits; none on a GPU."""
    if device.kind != "cpu":
        return ()
    graph, calls, outputs = problem.graph, captured.compiled.calls, captured.compiled.outputs
    found: list[tuple[BaseOp, Any, BaseOp, torch.Tensor, float]] = []
    reruns = np.unique(graph.recompute_row[graph.recompute_row >= 0])
    for base in listed(BaseOp, graph.base_of[reruns]):
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
        nonzero = nonzero_value(known[-1].func, made, known[-1].args) if one_or_noise else None
        if nonzero is None or made.numel() < LEAST_ELEMENTS:
            continue
        found.append((base, results[0], base_op(problem.row_of_event[of_calls[-1]]), made, nonzero))
    measured: list[tuple[Call, torch.Tensor]] = []  # two of each mask: packing and unpacking, with results
    for _, _, _, made, nonzero in found:
        with fake.mode_of([made]):
            bits = torch.empty((made.numel() + 7) // 8, dtype=torch.uint8, device=made.device)
        measured.append((Call(PACK_NOISE, (made, nonzero)), bits))
        measured.append((Call(UNPACK_NOISE, (bits, made.numel(), made.dtype, nonzero)), made))
    memories = [NOT_RUN] * len(measured) if meter is None else meter.measure([call for call, _ in measured])
    seconds = [costs.seconds(call.func, call.args, call.kwargs, out) for call, out in measured]
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
