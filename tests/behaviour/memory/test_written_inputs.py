"""Inputs and buffers that the forward itself changes in place, outside of the graph that reads them."""

import copy

import pytest
import torch
from torch import Tensor, nn

import planner


class Queue(nn.Module):
    """Contrast with a queue of earlier keys, as MoCo has it; the keys are put in behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(32, 16)
        self.queue: Tensor
        self.register_buffer("queue", torch.randn(16, 64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        found = nn.functional.normalize(self.encoder(x), dim=1) @ self.queue.clone().detach()
        loss = nn.functional.cross_entropy(found / 0.07, torch.zeros(len(x), dtype=torch.long))
        with torch.no_grad():
            self.put(keys)
        return loss

    def put(self, keys: Tensor) -> None:
        place = int(self.place)
        self.queue[:, place : place + len(keys)] = keys.T
        self.place[0] = (place + len(keys)) % self.queue.shape[1]


@pytest.mark.graphs
def test_a_buffer_that_is_written_behind_a_graph_break_is_read_from_a_copy() -> None:
    torch.manual_seed(0)
    model = Queue()
    inputs = (torch.randn(16, 32), torch.randn(16, 16))
    eager = copy.deepcopy(model)
    plan = planner.plan(model, args=inputs, budget="min")
    assert plan.target.inputs == "overwritten"
    assert any("changes in place" in note for note in plan.notes)
    report = planner.verify(model, args=inputs, plan=plan)
    assert report.ok, report.problems
    plan.apply(model)
    for _ in range(3):
        for module in (model, eager):
            module.zero_grad()
            module(*inputs).backward()
        assert torch.equal(model.encoder.weight.grad, eager.encoder.weight.grad)
        assert torch.equal(model.queue, eager.queue)


def test_inputs_that_are_left_alone_are_not_copied() -> None:
    torch.manual_seed(0)
    plan = planner.plan(nn.Linear(8, 1), args=(torch.randn(4, 8),), budget="150%", loss=torch.sum)
    assert plan.target.inputs == "unchanged"


class HandedOn(nn.Module):
    """A result that one graph hands to two others, of which the second writes to it; gone by the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        handed = self.first(x)
        torch._dynamo.graph_break()
        found = self.second(nn.functional.gelu(handed * 2).exp())
        torch._dynamo.graph_break()
        return (handed.add_(1) * found).square().mean()


@pytest.mark.graphs
@pytest.mark.heavy
def test_a_result_that_is_written_after_it_was_read_is_read_from_a_copy() -> None:
    torch.manual_seed(0)
    model, inputs = HandedOn(), (torch.randn(64, 32),)
    plan = planner.plan(model, inputs, budget="min", solver="sqrt_n")
    assert plan.target.inputs == "overwritten"
    report = planner.verify(model, inputs, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes <= report.predicted_dynamic_peak_bytes


class Projected(nn.Module):
    """Keeps a weight small, as orthogonal fine-tuning and clipped critics do; returns its logits as well."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 128)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            self.scale.copy_(self.scale * 0.5)
        x = x * self.scale
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        logits = self.head(x)
        return {"loss": logits.square().mean(), "logits": logits}


@pytest.mark.heavy
@pytest.mark.parametrize("budget", ["100%", "min"])
def test_a_weight_that_is_written_leaves_the_peak_as_predicted(budget: str) -> None:
    """No gradient arrives at its new value, so that another backward runs, which takes no more."""
    torch.manual_seed(0)
    model, inputs = Projected(), (torch.randn(96, 32),)
    plan = planner.plan(model, inputs, budget=budget, solver="sqrt_n")
    report = planner.verify(model, inputs, plan=plan, repeats=0)
    assert report.ok, report.problems
    # The gradient of zeros that is planned for is not made.
    measured, predicted = report.measured_dynamic_peak_bytes, report.predicted_dynamic_peak_bytes
    assert predicted - model.scale.nbytes <= measured <= predicted


class Scaled(nn.Module):
    """Writes to its input, with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer, self.head = nn.Parameter(torch.ones(8)), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.mul_(self.scale)).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", ["replay", pytest.param("graph", marks=pytest.mark.graphs)])
def test_an_input_that_a_weight_is_multiplied_into(backend: str) -> None:
    batch = torch.randn(8, 8)
    before, model = batch.clone(), Scaled()
    plan = planner.plan(model, (batch,), budget="min", solver="sqrt_n", backend=backend)
    for x in (batch, batch[:4]):  # PyTorch takes no history from a view
        report = planner.verify(model, (x,), plan=plan, repeats=0)
        assert report.ok, report.problems
        assert [batch.requires_grad, x.requires_grad] == [False, False]
        assert torch.equal(batch, before)
