"""How gradients lie in memory that reach the outputs of a part: a traced backward takes them as they are."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

import planner
from planner._torch.joint.memory_layout import MemoryLayout
from planner.user_plan import Plan
from tests.side_by_side import assert_same, left_by, plan_of, steps

pytestmark = pytest.mark.heavy


@given(st.data())
def test_parts_of_dense_tensors_are_described(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    whole = torch.empty(sizes)
    part = whole.permute(data.draw(st.permutations(range(len(sizes)))))
    for dimension in range(part.dim()):
        begins = data.draw(st.integers(0, part.shape[dimension] - 1))
        part = part.narrow(dimension, begins, data.draw(st.integers(1, part.shape[dimension] - begins)))
    if part.dim() > 1 and data.draw(st.booleans()):
        part = part.select(data.draw(st.integers(0, part.dim() - 1)), 0)
    layout = MemoryLayout.of(part)
    assert layout.is_of(part) or _reach(part) > 64 * part.numel()
    assert sorted(layout.dimensions) == list(range(part.dim()))
    if layout.is_of(part):  # else it is an order alone, in which dimensions of one element may have any place
        assert MemoryLayout.of(torch.empty_strided(part.shape, layout.strides(part.shape))) == layout


def _reach(tensor: torch.Tensor) -> int:
    """Elements of memory from its first to its last."""
    return sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def test_what_is_no_part_of_a_dense_tensor_has_an_order_alone() -> None:
    assert MemoryLayout.of(torch.empty(64).as_strided((3, 4), (6, 4))) == MemoryLayout((0, 1))
    assert MemoryLayout.of(torch.empty(64).as_strided((3, 4), (3, 1))) == MemoryLayout((0, 1))
    assert MemoryLayout.of(torch.empty(2, 5000)[:, 0]) == MemoryLayout((0,))  # a copy would be mostly gaps


def test_what_is_expanded_has_an_order_alone() -> None:
    assert MemoryLayout.of(torch.empty(24).as_strided((6, 1, 4), (1, 0, 6))) == MemoryLayout((2, 0, 1))


def test_smaller_batches_have_the_gaps_of_larger_ones() -> None:
    layout = MemoryLayout.of(torch.empty(8, 16, 5).chunk(2, 1)[1])
    assert layout == MemoryLayout((0, 1, 2), (0, 16, 0))
    assert layout.is_of(torch.empty(3, 16, 5).chunk(2, 1)[0])
    assert not layout.is_of(torch.empty(3, 8, 5))


class Joined(nn.Module):
    """What one part makes, the next puts side by side."""

    def __init__(self, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], image: bool) -> None:
        super().__init__()
        self.join = join
        self.first: nn.Module = nn.Conv2d(8, 8, 3, padding=1) if image else nn.Linear(8, 8)
        self.second: nn.Module = nn.Conv2d(8, 8, 1) if image else nn.Linear(8, 8)
        self.norm: nn.Module = nn.GroupNorm(2, 8) if image else nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.randn(8, 1, 1) if image else torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.norm(self.first(x)), self.second(x).tanh() * self.scale
        torch._dynamo.graph_break()
        return self.join(first, second).square()


_JOINS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bool]] = {
    "features": (lambda a, b: torch.cat([a, b], -1), False),
    "channels": (lambda a, b: torch.cat([a, b], 1), True),
    "stacked": (lambda a, b: torch.stack([a, b], -1), False),
    "turned": (lambda a, b: torch.cat([a.transpose(1, 2), b.transpose(1, 2)], -1), False),
}


@pytest.mark.graphs
@pytest.mark.parametrize("join", [*_JOINS])
def test_gradients_of_what_is_joined_are_taken_as_they_are(join: str) -> None:
    torch.manual_seed(0)
    of, image = _JOINS[join]
    model = Joined(of, image).train()
    x = torch.randn(4, 8, 6, 6) if image else torch.randn(4, 6, 8)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.mean()

    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan = planner.plan(model, (x,), budget="min", loss=loss, solver="sqrt_n")
        plan = Plan.loads(plan.dumps())  # it says all that is needed
        report = planner.verify(model, (x,), plan=plan, loss=loss, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
    layouts = plan.graphs[0].gradient_layouts
    assert layouts
    assert all(layout.inside or layout.step == 2 for layout in layouts)


class Shared(nn.Module):
    """Layers of one graph; the gradients of some lie otherwise than those of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return (x.transpose(0, 1) @ self.mix).transpose(0, 1).contiguous().square().mean()


def test_layers_of_one_graph_whose_gradients_lie_differently_are_told_of() -> None:
    torch.manual_seed(0)
    model, x = Shared().train(), torch.randn(4, 6, 8)
    with pytest.warns(planner.PlanWarning, match="have other strides"):
        planner.plan(model, (x,), budget="min", regions="auto", solver="sqrt_n")


@pytest.mark.graphs
def test_gradients_at_other_sizes_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.runtime.shapes.per_shape.MOST_SHAPES", 3)
    torch.manual_seed(0)
    model = Joined(*_JOINS["features"]).train()
    planned = copy.deepcopy(model)
    x = torch.randn(6, 6, 8)
    planner.plan(planned, (x,), budget="min", loss=torch.mean, solver="sqrt_n").apply(planned)

    def is_equal(batch: int) -> bool:
        for each in (model, planned):
            each.zero_grad()
            each(x[:batch]).mean().backward()
        pairs = zip(model.parameters(), planned.parameters(), strict=True)
        return all(torch.equal(a.grad, b.grad) for a, b in pairs)

    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        assert all(map(is_equal, (6, 5, 4, 3, 5)))
    with pytest.warns(planner.PlanWarning, match="sizes 2 gradients may differ"):
        is_equal(2)


class Pieces(nn.Module):
    """Cuts pieces out of a result, as a model does whose images are of several sizes, and turns each behind a
    break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 24, 2, 2), nn.Linear(24, 24)

    def pieces(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        return [hidden[0][..., :9, :7], hidden[1][..., :, 2:]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = self.pieces(x)
        torch._dynamo.graph_break()
        turned = torch.cat([piece.flatten(1).T for piece in pieces])
        return self.last(turned).sin().square().mean()


def test_gradients_of_pieces_lie_as_without_a_plan_however_they_arrive() -> None:
    """They are copied among zeros: a warning would be false."""
    torch.manual_seed(0)
    model, x = Pieces(), torch.randn(2, 3, 20, 22)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan_of(model, (x,)).apply(model)
        ours = left_by(model, steps((x,)))
    assert_same(ours, left_by(twin, steps((x,))))
