"""Seconds that Python takes to follow a plan, beside those of the operators.

On the CPU no operator runs while Python does. The seconds for following a plan by replays are counted. Those
for entering graphs do not depend on the schedule: they are only reported. On a GPU operators wait in a queue
while Python goes on. Python's seconds count only after it waited for data of the device, as to take a branch:
then the queue is empty, and the device waits until Python has entered the next planned graph.
``benchmarks/host_time.py`` compares these seconds with steps.
"""

import time
from dataclasses import dataclass
from functools import cache

import torch

from planner._torch.autograd import CountingMode
from planner.costs.devices import Device
from planner.costs.kernel_timer import MeasuredCosts
from planner.costs.roofline import Costs

USUAL = 4e-6
"""Seconds of a call of an operator under a dispatch mode that does nothing, if they are not measured."""

CALL, SAVE, AGAIN = 2.5, 3.0, 4.0
"""Multiples of these seconds: for a call that is counted, for a tensor that autograd saves, for a re-run."""

GRAPH = 1e-3
"""Seconds of Dynamo's guards, AOTAutograd's wrappers and hooks for each graph in a step on the CPU: 0.7 to
1.4 ms on a core of an AMD EPYC. They are not measured anew, so that other processes make the same plan."""

ENTER = 4e-6
"""Seconds for each tensor that a planned graph is given, from a wait for data to the graph's first operator:
guards look at the tensor, and callers hand it on. As ``benchmarks/host_time.py`` measured on a core of an AMD
EPYC; hosts differ."""

_REPEATS = 100


@dataclass(frozen=True)
class HostTime:
    """Seconds of Python.

    Attributes:
        call: For each call of an operator in a forward of which something is dropped.
        save: For each tensor that autograd saves there.
        again: For each call that runs again, beside the operator itself.
        graph: For each graph that runs.
    """

    call: float = 0.0
    save: float = 0.0
    again: float = 0.0
    graph: float = 0.0


def host_time(device: Device, costs: Costs) -> HostTime:
    """What Python takes on a device: measured, once, where the seconds of operators are."""
    if device.kind != "cpu":
        return HostTime()
    unit = _measured() if isinstance(costs, MeasuredCosts) else USUAL
    return HostTime(CALL * unit, SAVE * unit, AGAIN * unit, GRAPH)


def entering_seconds(device: Device, tensors: int) -> float:
    """How long a device whose queue is empty waits until Python has entered a graph of so many tensors."""
    return ENTER * tensors if device.kind == "cuda" else 0.0


class _Passing(CountingMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


@cache
def _measured() -> float:
    """Seconds that a dispatch mode adds to a call, the least of three times."""
    one = torch.zeros(4)

    def calls() -> float:
        started = time.process_time()
        for _ in range(_REPEATS):
            torch.neg(one)
        return time.process_time() - started

    def under_a_mode() -> float:
        with _Passing():  # type: ignore[no-untyped-call]
            return calls()

    calls(), under_a_mode()
    least = min(under_a_mode() for _ in range(3)) - min(calls() for _ in range(3))
    return max(least / _REPEATS, 0.0)
