"""Forwards that eager runs and PyTorch's front end refuses: they are planned, or planned around."""

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import planner
from planner._torch.joint.aot import run_without_data
from planner._torch.without_data.fake_values import ConstantTrackingFakeMode, fake_with_values, known_values
from planner.errors import CaptureError
from tests.side_by_side import (
    Layers,
    assert_same,
    assert_trains_alike,
    counting_runs,
    layers,
    left_by,
    no_plan_warnings,
    plan_of,
    step_of,
    steps,
)

pytestmark = pytest.mark.heavy

# ---- marks for the compiler ---------------------------------------------------------------------------


class MarksItsCache(Layers):
    """Marks what it keeps for the compiler, unless it is being compiled, as caches of transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros_like(x)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(kept)
            torch._dynamo.mark_dynamic(x, 0)
        return super().forward(x + kept)


def test_a_forward_that_marks_tensors_is_replayed() -> None:
    model, args, _ = layers(partial(MarksItsCache, 2))
    twin = copy.deepcopy(model)
    plan = plan_of(model, args, backend="auto")
    assert plan.coverage == "replayed"
    plan.apply(model)
    assert_same(left_by(model, steps(args)), left_by(twin, steps(args)))


# ---- checkpoints inside which buffers change ----------------------------------------------------------


class Inside(nn.Module):
    """A part with a running statistic, of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("variance", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        if self.kind == "module":
            return self.norm(x)  # type: ignore[no-any-return]
        if self.kind == "function":
            return F.batch_norm(x, self.mean, self.variance, training=True)
        if self.kind == "average":
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean.clone()


class ChecksSomeParts(Layers):
    def __init__(self, kind: str) -> None:
        super().__init__(3)
        self.inside = Inside(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + checkpoint(self.layers[0], x, use_reentrant=False)
        x = x + checkpoint(self.inside, x, use_reentrant=False)
        return super().forward(x)


@pytest.mark.graphs
@pytest.mark.parametrize("kind", ["module", "function", "average"])
def test_a_checkpoint_in_which_buffers_change_runs_as_written(kind: str) -> None:
    model, args, _ = layers(partial(ChecksSomeParts, kind))
    twin = copy.deepcopy(model)
    plan = plan_of(model, args)
    assert plan.coverage == "partly-captured"
    assert any(re.search(r"checkpoint\(self\.inside.*: a checkpoint with effects", n) for n in plan.notes)
    plan.apply(model)
    with counting_runs() as runs, no_plan_warnings():
        ours = left_by(model, steps(args))
    assert runs.backward == 4
    assert_same(ours, left_by(twin, steps(args)))


def test_a_checkpoint_that_changes_nothing_is_seen_through() -> None:
    model, args, _ = layers(partial(ChecksSomeParts, "none"))
    assert plan_of(model, args).coverage == "one-graph"


# ---- TorchScript, export ------------------------------------------------------------------------------


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class ReturnsAll(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("used", [False, True])
def test_a_planned_module_is_traced_and_scripted(used: bool) -> None:
    model, (x,), _ = layers(partial(ReturnsAll, 1))
    before = set(vars(model))
    plan_of(model, (x,), loss=_loss).apply(model)
    if used:
        _loss(model(x)).backward()
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    expected = model(x)
    for made in (torch.jit.trace(model, (x,)), torch.jit.script(model)):  # type: ignore[no-untyped-call]
        assert torch.equal(made(x), expected)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        # TorchScript itself leaves the second.
        assert set(vars(planner.remove(each))) - before <= {"_compiled_call_impl", "__overloads__"}


@pytest.mark.parametrize(
    ("regions", "lazily"),
    [
        (None, False),
        pytest.param("auto", False, marks=pytest.mark.heavy),
        pytest.param(None, True, marks=pytest.mark.heavy),
    ],
)
@pytest.mark.parametrize(
    "record",
    [
        partial(torch.export.export, strict=False),
        partial(torch.export.export, strict=True),
        lambda model, args: make_fx(lambda *args: model(*args))(*args),
    ],
    ids=["export", "strict_export", "make_fx"],
)
def test_a_planned_module_is_exported_and_goes_on_by_its_plan(
    record: Any, regions: Any, lazily: bool
) -> None:
    model, args, _ = layers(Layers)
    twin = copy.deepcopy(model)
    if lazily:
        planner.auto_checkpoint(model, budget="min", solver="sqrt_n", regions=regions)
    else:
        plan_of(model, args, regions=regions).apply(model)
    with no_plan_warnings():
        recorded, expected = record(model, args), record(twin, args)
    graphs = [_operations(made) for made in (recorded, expected)]
    assert graphs[0] == graphs[1]
    with counting_runs() as runs, no_plan_warnings():
        ours = left_by(model, partial(_recorded_between_steps, record, args))
    assert runs.backward == 2 * (1 if regions is None else 9)
    assert_same(ours, left_by(twin, partial(_recorded_between_steps, record, args)))


def _recorded_between_steps(record: Any, args: Any, model: nn.Module) -> list[torch.Tensor]:
    losses = [step_of(model, args)]
    record(model, args)
    model.zero_grad()
    return [*losses, step_of(model, args)]


def _operations(recorded: Any) -> list[str]:
    graph = recorded.graph_module if hasattr(recorded, "graph_module") else recorded
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_what_a_user_leaves_out_of_scripts_stays_so() -> None:
    model, (x,), _ = layers(partial(ReturnsAll, 1))
    model.__jit_ignored_attributes__ = ["anything"]  # type: ignore[assignment]
    plan = plan_of(model, (x,), loss=_loss)
    plan.apply(plan.apply(model))
    assert model.__jit_ignored_attributes__ == ["anything", "_compiled_call_impl"]
    assert planner.remove(model).__jit_ignored_attributes__ == ["anything"]


# ---- sparse and nested tensors ------------------------------------------------------------------------


class SparseBetween(Layers):
    """Products of sparse matrices, as of adjacencies, among layers that are planned."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run(x)
        weights = x.detach().mean(1).abs()[:4]
        rows, columns = torch.tensor([0, 2, 3, 4]), torch.tensor([0, 1, 2, 0])
        adjacent = torch.sparse_csr_tensor(rows, columns, weights, size=(3, 3))
        squared = (adjacent @ adjacent).to_sparse_coo().coalesce()
        return self.run(x).square().mean() * squared.values().sum()


@pytest.mark.graphs
def test_sparse_matrices_between_graphs_run_as_written() -> None:
    model, args, _ = layers(SparseBetween)
    plan = assert_trains_alike(model, args, steps(args), expected_runs=4)
    assert plan.coverage == "partly-captured"


class Nested(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside, self.layer = inside, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside:
            x = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 6]))
        return self.layer(x).values().square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("inside", [False, True])
def test_nested_tensors_are_an_error_that_says_what_to_do(inside: bool) -> None:
    parts = [torch.randn(2, 8), torch.randn(4, 8)]
    x = torch.cat(parts) if inside else torch.nested.nested_tensor(parts, layout=torch.jagged)
    with pytest.raises(CaptureError, match="nested tensors cannot be planned: pad them"):
        planner.plan(Nested(inside), (x,), budget="min")


class _NestedOfParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.nested.as_nested_tensor([self.layer(x), self.layer(x[:1])])
        return parts.to_padded_tensor(0.0).square().sum()


def test_so_are_nested_tensors_of_the_older_layout() -> None:
    with pytest.raises(CaptureError, match="nested tensors cannot be planned: pad them"):
        planner.plan(_NestedOfParts(), (torch.randn(2, 8),), budget="min")


def test_known_values_that_a_graph_changes_are_computed_on_data() -> None:
    # Taken for data, a copy without data ends the process.
    mode = ConstantTrackingFakeMode(allow_non_fake_inputs=True)
    count = fake_with_values(torch.tensor(3), mode)
    graph = torch.fx.Graph()
    graph.output((graph.call_method("add_", (graph.placeholder("count"), 1)),))
    _, passed, _ = run_without_data(torch.fx.GraphModule(nn.Module(), graph), [count])
    assert not any(isinstance(values, FakeTensor) for values in known_values(passed[:1]))
    assert known_values([count]) == [torch.tensor(3)]


# ---- what cannot be traced is left out by one line ------------------------------------------------------

_CALLS: list[int] = []


class NeverTheSame(Layers):
    """Loops once more at every call, whoever calls it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _CALLS.append(0)
        for _ in range(len(_CALLS)):
            x = x + torch.tanh(x)
        return self.run(x)


class PartlyTheSame(Layers):
    def __init__(self) -> None:
        super().__init__(2)
        self.inside = NeverTheSame(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.inside(self.run(x))).square().mean()


def test_what_cannot_be_traced_is_replayed_as_the_error_says() -> None:
    _CALLS.clear()
    model, args, _ = layers(PartlyTheSame)
    with pytest.raises(CaptureError, match=r"differently every time.*leave backend= out"):
        plan_of(model, args, backend="graph")
    assert plan_of(model, args).coverage == "replayed"


# ---- forwards that run bit by bit -----------------------------------------------------------------------


class Yields(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = x + layer(x)
            yield x


def test_a_forward_that_is_a_generator_is_refused() -> None:
    model, args, _ = layers(Yields)
    with pytest.raises(CaptureError, match="is a generator"):
        plan_of(model, args, loss=lambda results: sum(y.square().mean() for y in results))


# ---- named tuples whose class has a constructor of its own ----------------------------------------------


class ReplacesInPacked(nn.Module):
    """Changes the data of packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.recurrent = nn.Linear(8, 8), nn.GRU(8, 8)

    def forward(self, x: nn.utils.rnn.PackedSequence) -> torch.Tensor:
        x = x._replace(data=self.widen(x.data))
        out, _ = self.recurrent(x)
        loss: torch.Tensor = out.data.square().mean()
        return loss


def test_a_named_tuple_that_loses_its_fields_in_a_graph_is_replayed() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 8), torch.tensor([5, 4, 2]))
    model = ReplacesInPacked()
    plan = planner.plan(model, (packed,), budget="200%", costs="roofline")
    assert plan.target.backend == "replay"
    assert planner.verify(model, (packed,), plan=plan, repeats=0).ok
