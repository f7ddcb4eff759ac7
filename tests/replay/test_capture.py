"""Capturing a step: the baseline, the graphs, and the glue between them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import planner
from planner._torch import fake
from planner._torch import modules as modules_
from planner._torch.execution import allocator_events
from planner.capture.capture import capture
from planner.costs.devices import find_device
from planner.costs.eager_timeline import eager_timeline, peak_by_shapes
from planner.costs.workspace import WorkspaceMeter
from planner.graph.dynamo_graph import structure_of
from planner.problem.build import build_problem
from planner.training_step.step import Step
from solvers.model.schedule import check, simulate
from tests.small import (
    Built,
    classifier,
    graph_break_model,
    logits_loss,
    small_gpt,
    small_resnet,
)

BUILDERS = [small_gpt, small_resnet, graph_break_model]


def _measured_peak(model: nn.Module, step: Step) -> int:
    from planner.verification.measure import measure_peak

    for _ in range(2):
        step.run(model)
        model.zero_grad(set_to_none=True)
    return measure_peak(lambda: step.run(model), "cpu").peak_bytes


@pytest.mark.graphs
@pytest.mark.heavy
@pytest.mark.parametrize("builder", BUILDERS)
def test_the_eager_step_is_predicted(builder: Callable[[], Built]) -> None:
    model, args, kwargs = builder()
    step = Step(args, kwargs)
    captured = capture(model, step)
    meter = WorkspaceMeter("cpu", None)
    predicted = eager_timeline(captured.eager, find_device("cpu"), meter).peak_bytes
    assert predicted == _measured_peak(model, step)


@pytest.mark.parametrize("name", ["cpu", "H100"])
def test_the_peak_by_shapes_is_that_of_the_timeline_without_workspaces(name: str) -> None:
    model, args, kwargs = small_gpt(layers=1)
    recording, device = capture(model, Step(args, kwargs)).eager, find_device(name)
    assert peak_by_shapes(recording, device) == eager_timeline(recording, device, None).peak_bytes > 0


@pytest.mark.heavy
def test_gradients_that_meet_are_accumulated_in_place_as_the_engine_does() -> None:
    torch.manual_seed(0)

    # Every layer's input gets gradients from three consumers.
    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).sin() + x.cos() + torch.tanh(x)
            return x.sum()

    model, step = Fan(), Step((torch.randn(256, 64),))
    captured = capture(model, step)
    predicted = eager_timeline(captured.eager, find_device("cpu"), WorkspaceMeter("cpu", None)).peak_bytes
    assert predicted == _measured_peak(model, step)


@pytest.mark.heavy
def test_a_step_without_a_loss_is_noted() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for loss, noted in ((None, True), (torch.sum, False)):
        plan = planner.plan(model, x, budget="1MiB", loss=loss, solver="none")
        assert any("returned no loss" in note for note in plan.notes) == noted


def test_nothing_of_the_users_changes() -> None:
    model, args, kwargs = small_resnet()
    model.stem.eval()
    model.body[0].register_forward_hook(lambda module, inputs, output: output * 1.0)
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before = copy.deepcopy(model.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    versions = [t._version for t in [*model.parameters(), *model.buffers(), *args]]
    generator = torch.get_rng_state()
    captured = capture(model, Step(args, kwargs))
    assert captured.graphs[0].joint is not None
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)
    assert [m.training for m in model.modules()] == modes
    assert [t._version for t in [*model.parameters(), *model.buffers(), *args]] == versions
    assert torch.equal(torch.get_rng_state(), generator)
    assert modules_.installed_call(model) is None
    assert not any(fake.is_fake(t) for t in [*model.parameters(), *model.buffers()])


def test_no_memory_is_allocated_while_capturing() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    x = torch.randn(4096, 512)  # each activation has 8 MiB
    recording = allocator_events.record_cpu_allocations(
        lambda: capture(model, Step((x,), loss=lambda y: y.sum()))
    )
    largest = max((size for _, size in recording.allocations), default=0)
    assert largest < 2**20, "a real tensor was made"


@pytest.mark.graphs
@pytest.mark.heavy
def test_graph_breaks_give_several_graphs_that_are_one_problem() -> None:
    model, args, kwargs = graph_break_model()
    captured = capture(model, Step(args, kwargs))
    assert len([g for g in captured.graphs if g.joint is not None]) == 2
    problem = build_problem(captured, find_device("cpu"), None)
    check(problem.graph, problem.graph.base_schedule)
    rows = problem.graph.ops[: problem.graph.base_length]  # those of re-runs come after them
    regions = [op.region for op in rows if op.region >= 0]
    assert set(regions) == {0, 1}
    # forward 1, forward 2, backward 2, backward 1
    order = [r for i, r in enumerate(regions) if i == 0 or regions[i - 1] != r]
    assert order == [0, 1, 0]


def test_outputs_that_the_loss_does_not_use_are_found() -> None:
    model, args, kwargs = classifier()
    assert capture(model, Step(args, kwargs, logits_loss)).graphs[0].spec.unused_outputs == (1,)
    assert capture(model, Step(args, kwargs)).graphs[0].spec.unused_outputs == ()


@pytest.mark.heavy
def test_operations_know_their_module() -> None:
    model, args, kwargs = small_gpt(layers=2)
    joint = capture(model, Step(args, kwargs)).graphs[0].joint
    assert joint is not None
    modules = {op.module for op in joint.ops}
    assert {"blocks.0.query_key_value", "blocks.1.dropout", "head"} <= modules
    assert all(not m or m.split(".")[0] in dict(model.named_children()) for m in modules)


@pytest.mark.heavy
def test_a_model_on_the_meta_device_is_captured() -> None:
    model, args, kwargs = small_gpt(layers=1)
    expected = capture(model, Step(args, kwargs))
    on_meta = [a.to("meta") for a in args]
    captured = capture(model.to("meta"), Step(tuple(on_meta), kwargs))
    assert captured.graphs[0].joint is not None
    assert expected.graphs[0].joint is not None
    assert captured.graphs[0].joint.fingerprint == expected.graphs[0].joint.fingerprint


@pytest.mark.heavy
def test_structure_does_not_depend_on_the_batch_but_the_fingerprint_does() -> None:
    two = [capture(m, Step(a)) for m, a, _ in (small_gpt(2, layers=1), small_gpt(6, layers=1))]
    assert two[0].graphs[0].structure == two[1].graphs[0].structure
    prints = [c.graphs[0].joint.fingerprint for c in two if c.graphs[0].joint is not None]
    assert len(set(prints)) == 2
    model, args, _ = small_gpt(2, layers=1)
    again = capture(model, Step(args))
    assert again.graphs[0].joint is not None
    assert again.graphs[0].joint.fingerprint == prints[0]


@pytest.mark.heavy
def test_the_schedule_that_recomputes_nothing_is_valid_and_frees_earlier_than_eager() -> None:
    model, args, kwargs = small_gpt(layers=2)
    problem = build_problem(capture(model, Step(args, kwargs)), find_device("cpu"), None)
    assert simulate(problem.graph, problem.graph.base_schedule).peak_bytes <= problem.eager.peak_bytes


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no such luck with {x.shape}")


class Answering(nn.Linear):
    """Returns what something else makes of its result."""

    def __init__(self, answer: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(4, 4)
        self.answer = answer

    def forward(self, x: torch.Tensor) -> Any:
        return self.answer(super().forward(x))


@pytest.mark.heavy
def test_a_forward_whose_hook_counts_is_captured_and_the_count_is_as_before() -> None:
    model, args, kwargs = small_resnet()
    calls: list[int] = []
    model.body[0].register_forward_hook(lambda *_: calls.append(1))
    assert capture(model, Step(args, kwargs)).graphs
    assert calls == []


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Failing(), "no such luck"),
        (nn.Linear(4, 4).requires_grad_(False), "nothing to differentiate: no parameter of the module"),
        (Answering(torch.Tensor.detach), "output requires no gradient: it was detached, or made under"),
        (Answering(lambda y: None), "nothing to differentiate: the module returned None"),
        (Answering(lambda y: [1]), "the module returned a list without a tensor"),
    ],
)
def test_what_cannot_be_captured_says_why(model: nn.Module, words: str) -> None:
    with pytest.raises(planner.CaptureError, match=words):
        planner.plan(model, (torch.randn(2, 4),), budget="80%")


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(planner.CaptureError, match=r"scalar.*\(2, 4\)"):
        planner.plan(nn.Linear(4, 4), (torch.randn(2, 4),), budget="80%", loss=lambda y: y)


def test_numbers_that_are_taken_of_sizes_are_no_part_of_a_structure() -> None:
    def graph(index: bool) -> torch.fx.GraphModule:
        made = torch.fx.Graph()
        size, x = made.placeholder("i"), made.placeholder("x")
        size.meta["example_value"] = ShapeEnv().create_unbacked_symint()
        x.meta["example_value"] = torch.ones(2)
        if index:  # as from PyTorch 2.15 on, where a layer is read at a place that is symbolic
            made.call_method("__index__", (size,)).meta["example_value"] = 0
        shifted = made.call_function(torch.add, (x, x))
        shifted.meta["example_value"] = torch.ones(2)
        made.output((shifted,))
        return torch.fx.GraphModule(nn.Module(), made)

    assert structure_of(graph(True)) == structure_of(graph(False))


def test_structure_is_of_operations_and_wiring() -> None:
    def structure(function: Callable[..., torch.Tensor]) -> str:
        return structure_of(torch.fx.symbolic_trace(function))

    assert structure(lambda x, y: x.sin() + y) == structure(lambda x, y: x.sin() + y)
    assert structure(lambda x, y: x.sin() + y) != structure(lambda x, y: x.cos() + y)
    assert structure(lambda x, y: x.sin() + y) != structure(lambda x, y: x.sin() + x)
