"""Seconds of Python that a GPU waits for."""

import pytest
import torch
import torch.nn as nn

import planner
from planner.costs.devices import find_device
from planner.costs.host_time import ENTER, entering_seconds
from planner.user_plan import Plan


class Branching(nn.Module):
    """Two layers, and between them a branch on data if `asks`; else the data are only counted."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        if self.asks and not (x == x).all():
            return x.sum()
        return self.last(x).relu().sum()


def planned(device: str, asks: bool = True) -> Plan:
    return planner.plan(
        Branching(asks),
        (torch.randn(4, 8),),
        budget="1GiB",
        device=device,
        solver="none",
        backend="eager",
        costs="roofline",
    )


WAIT = "aten._local_scalar_dense.default"


def test_a_gpu_waits_until_python_has_entered_the_graph_behind_a_question_to_data() -> None:
    plan = planned("H100")
    assert plan.step is not None
    (wait,) = [op for op in plan.step.outside if op.name == WAIT]
    assert wait.seconds == 3 * ENTER  # the activation, a weight and a bias
    others = [op.seconds for op in plan.step.outside if op is not wait]
    assert plan.no_recompute.seconds == pytest.approx(
        wait.seconds + sum(others) + sum(op.seconds for graph in plan.graphs for op in graph.ops)
    )
    assert plan.no_recompute.seconds == pytest.approx(plan.baseline.seconds + wait.seconds)


def test_without_a_question_and_on_the_cpu_nothing_waits() -> None:
    never = planned("H100", asks=False)
    assert never.no_recompute.seconds == pytest.approx(never.baseline.seconds)
    assert entering_seconds(find_device("cpu"), 3) == 0
    on_cpu = planned("cpu")
    assert on_cpu.step is not None
    assert [op.seconds for op in on_cpu.step.outside if op.name == WAIT] == [0]


def test_what_python_takes_to_enter_graphs_is_told_where_it_is_much() -> None:
    def told(width: int) -> list[str]:
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        x = torch.randn(width, width)
        plan = planner.plan(model, (x,), budget="100%", backend="graph", costs="roofline")
        return [note for note in plan.notes if "Python enters the captured graphs" in note]

    assert "about 1 ms a step" in told(8)[0]
    assert not told(2048)
