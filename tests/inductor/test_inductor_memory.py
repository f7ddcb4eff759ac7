"""What programs that Inductor emits for a plan hold no longer than the plan does."""

import operator
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import planner
from planner._torch import fake
from planner._torch.inductor.decompositions import nll_loss_backward
from planner._torch.inductor.fusion_names import Fusion
from planner.lowering.inductor import InductorLowering, as_given, for_inductor
from planner.lowering.partition import no_recomputation, partition
from planner.planning import inductor
from planner.planning.inductor import FUSIONS, emitted_model
from solvers import portfolio
from solvers.model.schedule import simulate


def without_recomputation(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> tuple[int, int]:
    """The peak over entry of the programs that recompute nothing, and that of single operations, in bytes."""
    prepared = planner.prepare(model.train(), inputs, backend="inductor", backend_options=options)._prepared
    problem = prepared.problem
    base = problem.graph.base_schedule
    emitted = emitted_model(prepared).step(problem.backward_sequences(prepared.captured, base))
    return emitted.peak_bytes, simulate(problem.graph, base).peak_bytes


class Classes(nn.Module):
    """The loss of many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 200)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.inside(x), target)


def test_the_gradient_of_a_loss_of_classes_is_not_scattered_first() -> None:
    emitted, single = without_recomputation(Classes(), torch.randn(64, 4), torch.randint(0, 200, (64,)))
    assert emitted < single + 64 * 200  # logits are four times as much


@pytest.mark.parametrize("shape", [(6, 5), (5,), (2, 5, 3, 4)])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_a_loss_of_classes_is_exact(
    shape: tuple[int, ...], reduction: int, weighted: bool
) -> None:
    torch.manual_seed(0)
    aten: Any = torch.ops.aten
    spatial = "2d" if len(shape) > 2 else ""
    channel = 0 if len(shape) < 2 else 1
    values = torch.randn(shape).log_softmax(channel)
    target = torch.randint(0, 5, [s for d, s in enumerate(shape) if d != channel])
    if target.dim():
        target.view(-1)[0] = -100
    weight = torch.rand(5) if weighted else None
    loss, total = getattr(aten, f"nll_loss{spatial}_forward")(values, target, weight, reduction, -100)
    taken = (torch.randn_like(loss), values, target, weight, reduction, -100, total)
    expected = getattr(aten, f"nll_loss{spatial}_backward")(*taken)
    assert torch.equal(nll_loss_backward(*taken), expected)


def test_what_is_not_read_is_not_held() -> None:
    drawn = Graph()
    a, _, c = (drawn.placeholder(name) for name in "abc")
    for node in drawn.nodes:
        node.meta["val"] = torch.empty(3, device="meta")
    drawn.output([drawn.call_function(torch.ops.aten.add.Tensor, (a, c))])
    module = GraphModule({}, drawn)
    graph = for_inductor(module)
    assert len(graph.inputs) == 2
    args = [torch.ones(3), torch.ones(3), torch.full((3,), 2.0)]
    unread = weakref.ref(args[1])

    def run(taken: list[Any]) -> list[Any]:
        assert unread() is None
        a, c = taken
        taken.clear()
        return [a + c]

    (result,) = as_given(run, graph)(args)
    assert not args
    assert torch.equal(result, torch.full((3,), 3.0))


def test_results_have_the_types_that_the_other_half_reads() -> None:
    """Inductor computes bfloat16 statistics where the CPU's kernel gives floats: read as floats, half of each
    was what happened to lie behind it."""
    image, weight = torch.randn(4, 32, dtype=torch.bfloat16), torch.randn(32)
    drawn = Graph()
    given = [drawn.placeholder(name) for name in ("image", "weight")]
    kept = drawn.call_function(
        torch.ops.aten.native_layer_norm.default, (given[0], [32], given[1], None, 1e-5)
    )
    results = torch.native_layer_norm(image, [32], weight, None, 1e-5)
    made = [drawn.call_function(operator.getitem, (kept, i)) for i in range(3)]
    for node, value in zip([*given, *made], (image, weight, *results), strict=True):
        node.meta["val"] = value.to("meta")
    made[1].meta["tensor_meta"] = made[1].meta.pop("val")  # as AOTAutograd leaves a saved tensor
    drawn.output(made)
    for_all = for_inductor(GraphModule({}, drawn)).module.graph.output_node().args[0]
    assert [node.meta["val"].dtype for node in for_all] == [r.dtype for r in results]  # type: ignore
    assert results[1].dtype is torch.float32


def test_a_backward_is_compiled_for_what_its_forward_saves() -> None:
    cell = nn.GRUCell(16, 16)  # eager writes into chunks of the results of its products, and saves those
    prepared = planner.prepare(
        cell, torch.randn(8, 16), loss=lambda y: y.square().mean(), backend="inductor"
    )._prepared
    joint = prepared.captured.graphs[0].joint
    assert joint is not None
    halves, lowering = partition(joint, no_recomputation(joint)), InductorLowering({})
    _, run, arguments = lowering.emitted(halves.forward, "forward")
    _, _, read = lowering.emitted(halves.backward, "backward")
    with fake.without_modes(), arguments[0].fake_mode:
        results = run(arguments)
    tangents = sum("tangents" in node.name for node in halves.backward.graph.find_nodes(op="placeholder"))
    assert [t.stride() for t in results[tangents:]] == [t.stride() for t in read[:-tangents]]


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_saved_view_that_inductor_copies_is_read_as_it_lies(fusion: Fusion) -> None:
    def keys_of_groups(x: torch.Tensor) -> list[torch.Tensor]:
        keys = x.view(2, 8, 2, 4).transpose(1, 2)
        turned = keys * x.cos().sum() + torch.cat([-keys[..., 2:], keys[..., :2]], -1) * x.sin().sum()
        groups = turned[:, :, None].expand(2, 2, 3, 8, 4)
        queries = groups.reshape(12, 8, 4)
        return [groups, torch.bmm(queries, queries.transpose(1, 2))]

    mode = fake.fake_mode_with_sizes()
    with mode:
        inputs = [torch.empty(2, 8, 8)]
    lowering = InductorLowering({}, fusion)
    _, run, arguments = lowering.emitted(make_fx(keys_of_groups)(*inputs), "forward")
    with fake.without_modes(), arguments[0].fake_mode:
        results = run(arguments)
    assert [result.stride() for result in results] == list(lowering._results)


class Attention(nn.Module):
    """Attention, of which each product takes a copy that is laid out for it."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (
            part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.all(x).split(32, dim=-1)
        )
        weights = (queries @ keys.transpose(-1, -2)).softmax(-1)
        return x + self.out((weights @ values).transpose(1, 2).flatten(2))


@pytest.mark.heavy
def test_what_runs_again_is_let_go_of_as_the_schedule_has_it() -> None:
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (Attention(), nn.LayerNorm(32), nn.GELU())]
    model = nn.Sequential(*layers).train()
    prepared = planner.prepare(
        model, torch.randn(8, 32, 32), loss=lambda y: y.square().mean(), backend="inductor"
    )._prepared
    problem = prepared.problem
    most = simulate(problem.graph, problem.graph.base_schedule).peak_bytes
    found = portfolio.solve(problem.graph, int(most * 0.5), time_limit=5)
    emitted = emitted_model(prepared).step(problem.backward_sequences(prepared.captured, found.schedule))
    assert emitted.peak_bytes <= found.peak_bytes * 1.05


class Shortcuts(nn.Module):
    """Two branches that are added up, each of convolutions: gradients are sums that are read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.long, self.short = (
            nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.long(x) + self.short(x))


def test_a_sum_of_gradients_is_held_in_the_place_of_what_is_added() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), Shortcuts(), Shortcuts(), nn.Flatten(), nn.Linear(1024, 10))
    emitted, single = without_recomputation(model, torch.randn(64, 3, 8, 8))
    assert emitted <= single * 1.01


class Norms(nn.Module):
    """Many operations, in the forward and in the backward, that no library is called between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for norm in self.norms:
            h = h + norm(torch.tanh(h)).softmax(-1)
        return self.last(h).square().mean()


@pytest.mark.heavy
def test_a_kernel_ends_where_what_it_has_read_would_raise_the_peak() -> None:
    emitted, single = without_recomputation(Norms(), torch.randn(512, 8))
    assert emitted < single * 1.5  # in one kernel between the two products it is twice as much


def test_a_way_of_fusing_that_takes_far_more_is_not_lowered_again() -> None:
    beyond = {"anywhere": 4.0, "earlier": 1.3, "in-order": 1.2}  # what programs take, by what the solver says
    asked: set[tuple[int, Fusion]] = set()

    class Lowering:
        def __call__(self, solution: Any, fusions: Any, room: int = 0) -> Any:
            steps = [self.step(solution.schedule, fusion) for fusion in fusions]
            return SimpleNamespace(step=min(steps, key=lambda step: step.peak_bytes), solution=solution)

        def step(self, schedule: int, fusion: Fusion) -> Any:
            asked.add((schedule, fusion))
            return SimpleNamespace(peak_bytes=schedule * beyond[fusion])

    def solve(room: int | None, _seconds: float) -> Any:
        return SimpleNamespace(peak_bytes=room, schedule=room, seconds=1.0, feasible=True)

    nothing: Any = SimpleNamespace(step=SimpleNamespace(peak_bytes=1_500))
    lowering: Any = Lowering()
    fitting, _ = inductor._within(solve, lowering, 1_000, 1_500, nothing, 1.0)
    assert fitting is not None
    assert fitting.step.peak_bytes <= 1_000
    lowered = [fusion for _, fusion in asked]
    assert lowered.count("anywhere") == 1
    assert lowered.count("earlier") == lowered.count("in-order") > 2


def lowerings(beyond: list[float]) -> int:
    """How many schedules are lowered for the least peak.

    Args:
        beyond: By how much the programs of each, in order, take more than single operations.
    """
    factors = iter(beyond)

    def solve(room: int | None, _seconds: float) -> Any:
        return SimpleNamespace(peak_bytes=100 if room is None else room)

    known: dict[Any, Any] = {}

    def lowered(solution: Any, _fusions: Any, _room: int = 0) -> Any:
        if solution.peak_bytes not in known:
            step = SimpleNamespace(peak_bytes=solution.peak_bytes * next(factors))
            known[solution.peak_bytes] = SimpleNamespace(step=step, solution=solution)
        return known[solution.peak_bytes]

    inductor._least(solve, lowered, 1.0)
    return len(beyond) - len(list(factors))


def test_schedules_are_lowered_while_that_lowers_the_peak() -> None:
    assert lowerings([1.0, 0.1]) == 1  # as the solver says: no other has less
    assert lowerings([1.2, 1.2, 0.1]) == 2
    assert lowerings([1.5, 1.2, 1.0, 1.0, 1.0]) == 4
