"""Sparse tensors among inputs and buffers, as the adjacency of a graph."""

import pytest
import torch
from torch import nn

import planner
from planner.errors import CaptureError, PlanWarning


class Layer(nn.Module):
    """A graph convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, nodes: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        messages = self.linear(nodes).tanh()
        return torch.sparse.mm(adjacency, messages)


class Network(nn.Module):
    """Two of them; the adjacency is a buffer, or passed."""

    def __init__(self, adjacency: torch.Tensor | None) -> None:
        super().__init__()
        self.first, self.second = Layer(8, 16), Layer(16, 4)
        self.register_buffer("adjacency", adjacency)

    def forward(self, nodes: torch.Tensor, adjacency: torch.Tensor | None = None) -> torch.Tensor:
        adjacency = self.adjacency if adjacency is None else adjacency
        hidden = torch.relu(self.first(nodes, adjacency))
        return torch.log_softmax(self.second(hidden, adjacency), -1).square().sum()


@pytest.mark.graphs
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
@pytest.mark.parametrize("buffer", [False, True])
def test_a_graph_network_trains_by_its_plan(layout: torch.layout, buffer: bool) -> None:
    torch.manual_seed(0)
    adjacency = (torch.eye(12) + torch.eye(12).roll(1, 0)).to_sparse(layout=layout)
    model = Network(adjacency if buffer else None)
    args = (torch.rand(12, 8),) if buffer else (torch.rand(12, 8), adjacency)
    with pytest.warns(PlanWarning, match="sparse tensors"):
        plan = planner.plan(model, args=args, budget="min", costs="roofline")
    report = planner.verify(model, args=args, plan=plan, repeats=0)
    assert not [problem for problem in report.problems if "over the prediction" not in problem]
    assert len(plan.graphs) == 2


@pytest.mark.graphs
def test_gradients_that_are_sparse_are_a_clear_error() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8, sparse=True)

        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            return self.table(numbers).tanh().square().sum()

    with pytest.raises(CaptureError, match="make the embedding with sparse=False"):
        planner.plan(Embedded(), args=(torch.arange(6),), budget="min", costs="roofline")
