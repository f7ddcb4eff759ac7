"""Models with parts that the user compiles, and models that the user compiles elsewhere."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner._torch.tracing.callbacks import parts_run_uncompiled
from planner.errors import PlanWarning
from tests.side_by_side import assert_same, left_by, no_plan_warnings, plan_of, steps

pytestmark = pytest.mark.heavy

INPUT = (torch.randn(64, 16),)


def _gated(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x) * x.sigmoid() + x.softmax(-1)


class _Net(nn.Module):
    """Layers with an activation."""

    def __init__(
        self, activation: Callable[[torch.Tensor], torch.Tensor] = _gated, broken: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 16)) for _ in range(3)
        )
        self.activation, self.broken = activation, broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.broken:
                torch._dynamo.graph_break()
            x = x + self.activation(layer(x))
        return x.square().mean()


class _Method(_Net):
    """The activation is a method that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = self.mixed

    @torch.compile(fullgraph=True, backend="aot_eager")
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return _gated(x) + self.layers[0][2].weight.sum()


def _with_compiled_module(in_place: bool) -> nn.Module:
    model = _Net()
    if in_place:
        model.layers[1].compile(backend="aot_eager")
    else:
        model.layers[1] = torch.compile(model.layers[1], backend="aot_eager")  # type: ignore[assignment]
    return model


PARTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "function": (lambda: _Net(torch.compile(_gated, backend="aot_eager")), "_gated"),
    "fullgraph": (lambda: _Net(torch.compile(_gated, backend="aot_eager", fullgraph=True)), "_gated"),
    "method": (_Method, r"_Method\.mixed"),
    "module": (lambda: _with_compiled_module(False), r"layers\.1"),
    "module in place": (lambda: _with_compiled_module(True), r"layers\.1"),
}


@pytest.mark.parametrize(
    ("kind", "warm"),
    [pytest.param(kind, i % 2 == 0, marks=[pytest.mark.heavy] if i else []) for i, kind in enumerate(PARTS)],
)
def test_compiled_parts_run_uncompiled_by_a_plan_and_it_says_so(kind: str, warm: bool) -> None:
    build, named = PARTS[kind]
    torch.manual_seed(0)
    model = build()
    if warm:
        model(*INPUT).backward()
        model.zero_grad()
    with pytest.warns(PlanWarning, match=rf"torch\.compile is put around {named}\. .*backend='inductor'"):
        plan = planner.plan(model, INPUT, budget="min")
    assert any("torch.compile is put around" in note for note in plan.notes)
    report = planner.verify(model, INPUT, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.predicted_dynamic_peak_bytes == report.measured_dynamic_peak_bytes
    assert report.baseline_predicted_dynamic_peak_bytes == report.baseline_measured_dynamic_peak_bytes
    torch.manual_seed(0)
    reference = build()
    with parts_run_uncompiled():
        expected = left_by(reference, steps(INPUT))
    with no_plan_warnings():
        plan.apply(model)
        torch.manual_seed(0)
        model.load_state_dict(build().state_dict())
        assert_same(left_by(model, steps(INPUT)), expected)


def test_a_part_that_inductor_compiles_does_not_end_the_process() -> None:
    model = _Net(torch.compile(_gated))
    with pytest.warns(PlanWarning, match="torch.compile is put around _gated"):
        plan = planner.plan(model, INPUT, budget="60%")
    assert planner.verify(model, INPUT, plan=plan, repeats=0).ok


def _interrupted(x: torch.Tensor) -> torch.Tensor:
    y = _gated(x)
    torch._dynamo.graph_break()
    return y * x.sigmoid()


def test_parts_that_no_graph_covers_run_uncompiled_in_planned_steps_too() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    torch.manual_seed(0)
    model = _Net(torch.compile(_interrupted, backend=backend))
    with pytest.warns(PlanWarning, match="torch.compile is put around _interrupted"):
        plan = planner.plan(model, INPUT, budget="min")
    plan.apply(model)
    model(*INPUT).backward()
    assert not compiled
    report = planner.verify(model, INPUT, repeats=0)
    assert report.ok, report.problems
    assert report.predicted_dynamic_peak_bytes == report.measured_dynamic_peak_bytes
    planner.remove(model)
    model(*INPUT).backward()
    assert compiled


class _Conditional(_Net):
    """An operator of higher order, which PyTorch itself compiles where it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            moved = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))
            x = moved + self.activation(layer(x))
        return x.square().mean()


def test_operators_of_higher_order_compile_as_they_do() -> None:
    model = _Conditional(torch.compile(_gated, backend="aot_eager"))
    with pytest.warns(PlanWarning, match="around _gated"):
        plan = planner.plan(model, INPUT, budget="min")
    report = planner.verify(model, INPUT, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert plan.recomputed_operations


def test_parts_are_compiled_again_when_planning_has_ended() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    model = _Net(torch.compile(_gated, backend=backend, fullgraph=True))
    with pytest.warns(PlanWarning, match="torch.compile"):
        planner.plan(model, INPUT, budget="60%")
    assert not compiled
    model(*INPUT).backward()
    assert compiled


@pytest.mark.parametrize(
    "when", [*(pytest.param(when, marks=pytest.mark.heavy) for when in ("before", "after")), "both"]
)
def test_a_break_in_a_loop_that_the_users_compile_met_is_passed_by_a_plan(when: str) -> None:
    torch.manual_seed(0)
    model = _Net(broken=True)

    def compile_elsewhere() -> None:
        torch.compile(copy.deepcopy(model), backend="aot_eager")(*INPUT).backward()

    expected = plan_of(model, INPUT, budget="60%")
    torch._dynamo.reset()
    if when != "after":
        compile_elsewhere()
    plan = plan_of(model, INPUT, budget="60%")
    assert [g.structure for g in plan.graphs] == [g.structure for g in expected.graphs]
    if when != "before":
        compile_elsewhere()
    with no_plan_warnings():
        report = planner.verify(model, INPUT, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.predicted_dynamic_peak_bytes == report.measured_dynamic_peak_bytes


class _Looks(nn.Module):
    """Reads a number, or not."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.a, self.breaks = nn.Linear(8, 8), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).tanh()
        return y * 2 if self.breaks and y.sum() > 1000 else y.sigmoid()


class _Unhashable:
    """A backend of the user's that cannot be hashed, like Inductor's own."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return graph.forward


def test_code_of_the_users_own_is_compiled_as_before() -> None:
    x = torch.randn(4, 8)
    model: nn.Module = _Looks(breaks=False)
    planner.plan(model, x, budget="min", solver="sqrt_n", costs="roofline")
    for breaks in (False, True):
        model = _Looks(breaks)
        compiled = torch.compile(model, backend=_Unhashable())
        assert torch.equal(compiled(x), model(x))
