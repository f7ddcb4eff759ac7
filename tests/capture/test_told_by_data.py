"""Steps that data decide, planned for a GPU that is not here: a run on the CPU tells what they read."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner.errors import CaptureError
from planner.user_plan import Plan

pytestmark = pytest.mark.heavy


def plan_for_gpu(model: nn.Module, *args: torch.Tensor) -> Plan:
    return planner.plan(model, args, budget="100GiB", device="H100", loss=torch.sum, solver="none")


def forward_products(plan: Plan) -> int:
    return sum(
        len(graph.executions) * sum("mm" in op.name for op in graph.ops if op.phase == "forward")
        for graph in plan.graphs
    )


class Chooses(nn.Module):
    """Goes through one layer more where its input is positive on average."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        if x.mean() > 0:
            h = self.second(h)
        return h.tanh()


@pytest.mark.graphs
@pytest.mark.parametrize(("mean", "products"), [(1.0, 2), (-1.0, 1)])
def test_a_condition_is_what_it_was_with_data(mean: float, products: int) -> None:
    model, x = Chooses(), torch.randn(4, 8) * 0.1 + mean
    plan = plan_for_gpu(model, x)
    assert forward_products(plan) == products
    assert plan.coverage == "several-graphs"  # as on the GPU: the condition ends a graph there
    (note,) = [note for note in plan.notes if "decides what runs" in note]
    assert f"{__file__}:" in note
    plan.apply(model)
    model(x).sum().backward()
    planner.remove(model)


class Drops(nn.Module):
    """Leaves layers out by chance, as layerdrop does."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) < 0.5:
                continue
            x = layer(x).tanh() + x
        return x


def test_draws_are_those_of_a_step_with_data_in_their_order() -> None:
    model, x = Drops(12), torch.randn(4, 8)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    kept = [float(torch.rand([])) >= 0.5 for _ in model.layers]
    assert len(set(kept)) == 2
    torch.set_rng_state(state)
    plan = plan_for_gpu(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert forward_products(plan) == sum(kept)


class LoopsOverExperts(nn.Module):
    """Asks at the head of a loop whose body ends graphs: what is asked there again has another line."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x.sum(1) * 7).long() % 4
        total = x.new_zeros(())
        for expert in torch.nn.functional.one_hot(chosen, 4).sum(0).nonzero():
            number = expert[0]
            if number == 3:
                continue
            mine = torch.where(chosen == number)[0]
            total = total + (x[mine] @ self.experts[number]).tanh().sum()
        return total


def test_experts_that_get_something_are_looped_over() -> None:
    x = torch.zeros(64, 8)
    x[:, 0] = torch.tensor([0.2, 0.3, 0.5, 0.1]).repeat(16)  # the experts 1, 2, 3 and 0
    plan = plan_for_gpu(LoopsOverExperts(), x)
    assert forward_products(plan) == 3


class Selects(nn.Module):
    """Computes the loss of the elements that are above their mean, of which data say how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return h.square().sum() + h[x > 0.5].exp().sum()


def test_sizes_are_those_of_a_step_with_data() -> None:
    x = torch.zeros(64, 8)
    x[:32] = 1
    sizes = []
    for scaled in (x, x + 1):
        plan = plan_for_gpu(Selects(), scaled)
        sizes += [op.bytes for graph in plan.graphs for op in graph.ops if op.name == "aten.exp.default"]
    assert sizes == [1024, 2048]


class Routes(nn.Module):
    """Spreads positions over as many columns as there are, or as data say: one line reads several numbers."""

    def __init__(self, counted: bool) -> None:
        super().__init__()
        self.layer, self.counted = nn.Linear(8, 8), counted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, total = self.layer(x), x.new_zeros(())
        for scale in (3, 7):
            places = (x[:, 0] * scale).long()
            # A graph does not ask which of them is larger, and eager does.
            spread = F.one_hot(places, max(places.max() + 2, 4)) if self.counted else F.one_hot(places)
            total = total + (h.sum(1, keepdim=True) * spread).exp().sum()
        return total


@pytest.mark.graphs
@pytest.mark.parametrize("counted", [True, False])
def test_numbers_that_are_only_checked_are_not_taken_for_others(counted: bool) -> None:
    plan = plan_for_gpu(Routes(counted), torch.ones(128, 8))
    forward = [op for graph in plan.graphs for op in graph.ops if op.phase == "forward"]
    columns = [op.bytes // 512 for op in forward if op.name == "aten.mul.Tensor" and op.bytes > 512]
    assert columns == ([5, 9] if counted else [4, 8])


class Aligns(nn.Module):
    """A loss whose kernel's results are as large as its longest target."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        likely = F.log_softmax(self.layer(x), dim=-1).transpose(0, 1)
        return F.ctc_loss(likely, targets, torch.full((2,), 20), lengths)


def test_a_loss_of_aligned_sequences_is_planned() -> None:
    x, targets = torch.randn(2, 20, 8), torch.randint(1, 5, (2, 6))
    plan = plan_for_gpu(Aligns(), x, targets, torch.tensor([6, 4]))
    assert forward_products(plan) == 1


def test_the_model_is_as_it_was() -> None:
    model, x = nn.Sequential(Chooses(), nn.BatchNorm1d(8), nn.Dropout(0.5)), torch.randn(4, 8) + 1
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    plan_for_gpu(model, x)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(p.grad is None for p in model.parameters())
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_without_data_there_is_nothing_to_be_told() -> None:
    with pytest.raises(CaptureError, match="meta device"):
        plan_for_gpu(Chooses().to("meta"), torch.empty(4, 8, device="meta"))


def test_a_step_that_does_not_run_with_data_says_so() -> None:
    class Fails(Chooses):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.mean() > 0:
                raise ValueError("no such input")
            return self.first(x)

    with pytest.raises(CaptureError, match="with its data failed: ValueError: no such input, at "):
        plan_for_gpu(Fails(), torch.randn(4, 8) + 3)
