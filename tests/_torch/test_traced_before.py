"""Joint graphs that were traced before are copied: which these are, and that no other is taken for one."""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from functorch.compile import default_partition, make_boxed_func
from torch._functorch._aot_autograd import collect_metadata_analysis
from torch._functorch._aot_autograd import graph_compile as functorch_compile
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

import planner
from planner._torch.joint import aot, traced_before
from planner._torch.joint.trace_key import trace_key
from planner._torch.joint.traced_before import TRACED_BEFORE, Traced, TracedBefore
from planner._torch.module_paths import name_modules
from planner._torch.without_data.fake_values import (
    ConstantTrackingFakeMode,
    fake_with_values,
    values_count,
)
from tests.side_by_side import no_plan_warnings
from tests.small import small_gpt, small_resnet

Made = tuple[GraphModule, list[Any]]


@pytest.fixture
def nothing_traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[TracedBefore]:
    """No graph was traced before."""
    traced = TracedBefore()
    monkeypatch.setattr(aot, "TRACED_BEFORE", traced)
    with no_plan_warnings():
        yield traced


def _dynamo(model: nn.Module, *args: Any, around: Callable[[], Any] = contextlib.nullcontext) -> Any:
    """The keys of the graphs that Dynamo makes of a module."""
    keys = []

    def backend(graph: GraphModule, inputs: list[Any]) -> Any:
        name_modules(graph, model)
        keys.append(trace_key(graph, inputs, {}))
        return graph.forward

    torch._dynamo.reset()
    with around():
        torch.compile(model, backend=backend, dynamic=False)(*args)
    return keys


def _key(model: nn.Module, *args: Any, around: Callable[[], Any] = contextlib.nullcontext) -> Any:
    (key,) = _dynamo(model, *args, around=around)
    return key


class _Net(nn.Module):
    def __init__(self, value: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.a, self.b, self.value = nn.Linear(8, 8, **options), nn.Linear(8, 8), value

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.b(self.a(x).tanh()) + y * self.value, 0.5, self.training)


def _net(**options: Any) -> nn.Module:
    return _Net(**options).train()


@pytest.mark.heavy
@pytest.mark.parametrize("made", [small_gpt, small_resnet])
def test_a_plan_that_runs_and_plans_of_other_budgets_trace_nothing(
    made: Callable[[], Any], nothing_traced: TracedBefore
) -> None:
    model, args, kwargs = made()
    args = tuple(arg.clone() for arg in args)  # batches that share memory count as others
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
    assert nothing_traced.found == 0
    report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    assert nothing_traced.found == 1
    again = planner.plan(model, args, kwargs, budget="80%", solver="sqrt_n")
    assert nothing_traced.found == 2
    assert [g.ops for g in again.graphs] == [g.ops for g in plan.graphs]


@pytest.mark.heavy
def test_copies_are_what_would_have_been_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    traced, seen, collected = TracedBefore(), list[Any](), list[Any]()
    monkeypatch.setattr(aot, "TRACED_BEFORE", traced)
    collect = collect_metadata_analysis.run_functionalized_fw_and_collect_metadata

    def collecting(*args: Any, **kwargs: Any) -> Any:
        found = collect(*args, **kwargs)
        return lambda *inputs: collected.append(found(*inputs)) or collected[-1]

    name = "run_functionalized_fw_and_collect_metadata"
    monkeypatch.setattr(collect_metadata_analysis, name, collecting)
    original_dispatch = functorch_compile.aot_dispatch_autograd_graph
    given = list[Any]()

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        given.append(_of_metadata(kwargs["fw_metadata"]))
        return original_dispatch(*args, **kwargs)

    monkeypatch.setattr(functorch_compile, "aot_dispatch_autograd_graph", dispatch)
    original = aot.refuse_tokens
    monkeypatch.setattr(aot, "refuse_tokens", lambda joint: (seen.append(_told(joint)), original(joint)))
    model, args, kwargs = small_gpt()
    for again in (False, True, False):
        if not again:
            traced.clear()
        planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
    assert traced.found == 1
    assert seen[0] == seen[1] == seen[2]
    assert len(collected) == 2
    assert given[0] == given[1] == given[2]


def _of_metadata(metadata: Any) -> Any:
    """All that was found out about inputs and outputs."""
    tangents = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in metadata.traced_tangents]
    rest = {name: value for name, value in vars(metadata).items() if name != "traced_tangents"}
    return tangents, {name: list(v) if isinstance(v, list) else v for name, v in rest.items()}


def _told(joint: GraphModule) -> list[Any]:
    told = []
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        tensors = [t for t in (value if isinstance(value, list | tuple) else [value]) if torch.is_tensor(t)]
        lies = [(t.shape, t.stride(), t.storage_offset(), t.dtype, t.device) for t in tensors]
        call = (node.name, node.op, str(node.target), str(node.args), str(node.kwargs))
        told.append((*call, sorted(node.meta), lies))
    return told


def test_what_changes_the_trace_changes_the_key() -> None:
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    half, both = torch.randn(2, 4, 8)

    def frozen() -> nn.Module:
        model = _net()
        model.a.weight.requires_grad_(False)
        return model

    @contextlib.contextmanager
    def deterministic() -> Iterator[None]:
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    keys = [
        _key(_net(), x, y),
        _key(_net(value=-0.0), x, y),
        _key(_net(value=1.0), x, y),
        _key(_net(bias=False), x, y),
        _key(_net().eval(), x, y),
        _key(frozen(), x, y),
        _key(_net(), torch.randn(5, 8), torch.randn(5, 8)),
        _key(_net(), torch.randn(8, 4).t(), y),
        _key(_net(), x, x.view(4, 8)),
        _key(_net(), half, both),
        _key(_net(), x, y.clone().requires_grad_()),
        _key(_net(), x, y, around=lambda: torch.autocast("cpu", torch.bfloat16)),
        _key(_net(), x, y, around=lambda: torch.autocast("cpu", torch.float16)),
        _key(_net(), x, y, around=deterministic),
        _key(_net(), x, y, around=lambda: torch.backends.mkldnn.flags(enabled=False)),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert keys[0] == _key(_net(), torch.randn(4, 8), torch.randn(4, 8))


class _Around(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@torch.library.custom_op("planner_test::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halved.register_fake(torch.empty_like)


@torch.compiler.allow_in_graph
@functools.wraps(F.softsign)
def _wrapper(x: torch.Tensor) -> torch.Tensor:
    """Says that it is PyTorch's."""
    return F.softsign(x) * 2


class _Calls(nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def test_what_cannot_be_compared_has_no_key() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    assert _key(_Calls(lambda x: halved(x) * 2), x) is None
    assert _key(_Calls(_wrapper), x) is None
    with _Around():
        graph = torch.fx.symbolic_trace(nn.Tanh())
        assert trace_key(graph, [x], {}) is None
    assert trace_key(graph, [x], {}) is not None
    assert trace_key(graph, [x.to_sparse()], {}) is None
    assert trace_key(graph, [object()], {}) is None


def test_the_same_tensor_twice_is_not_two_that_share_memory() -> None:
    graph, x = torch.fx.symbolic_trace(nn.Tanh()), torch.randn(4, 8)
    same, alias, other = [x, x], [x, x.view(4, 8)], [x, x.clone()]
    keys = {trace_key(graph, inputs, {}) for inputs in (same, alias, other)}
    assert len(keys) == 3


class _Indexed(nn.Module):
    """Its graph makes a tensor of numbers, or holds one with data."""

    def __init__(self, factors: list[float], *, held: bool) -> None:
        super().__init__()
        self.a, self.factors = nn.Linear(8, 8), factors
        self.tensor = torch.tensor(factors) if held else None

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        factors = torch.tensor(self.factors) if self.tensor is None else self.tensor
        return (self.a(x)[rows] * factors).tanh().sum()


@pytest.mark.parametrize("held", [False, True])
def test_graphs_that_make_tensors_of_numbers_are_traced_once(
    held: bool, nothing_traced: TracedBefore
) -> None:
    """The numbers are part of what the graph is looked up by; tensors that the model has are inputs."""
    x, rows = torch.randn(6, 8), torch.tensor([0, 2, 3])
    for numbers, traced in (([1.0, 2.0], 1), ([1.0, 3.0], 1 if held else 2)):
        for _ in range(2):
            torch.manual_seed(0)
            model = _Indexed(numbers * 4, held=held).train()
            plan = planner.plan(model, (x, rows), budget="min", solver="sqrt_n")
            report = planner.verify(model, (x, rows), plan=plan, repeats=0)
            assert report.ok, report.problems
        assert len(nothing_traced._traced) == traced
        assert nothing_traced.found > 0


@pytest.mark.parametrize("known", [False, True])
def test_graphs_that_data_decided_are_not_kept(known: bool, nothing_traced: TracedBefore) -> None:
    class Rows(nn.Module):
        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor]:
            y = x.sin()
            return ((y.tensor_split(ends)[0] if known else y[:2]).sum(),)

    mode = ConstantTrackingFakeMode(allow_non_fake_inputs=True)
    ends = fake_with_values(torch.tensor([2, 4]), mode)
    x = mode.from_tensor(torch.zeros(6)).requires_grad_()
    with values_count():
        aot.compile_joint(
            torch.fx.symbolic_trace(Rows()),
            [x, ends],
            partition=partitioned,
            forward_compiler=make_boxed_func,
            backward_compiler=make_boxed_func,
            layouts={},
            reuse=True,
        )
    assert len(nothing_traced._traced) == (not known)


def partitioned(joint: GraphModule, outputs: int) -> tuple[GraphModule, GraphModule]:
    halves = default_partition(joint, (), num_fwd_outputs=outputs, static_lifetime_input_indices=())
    return halves[0], halves[1]


def test_plans_of_the_same_code_in_two_files_name_their_own_lines(
    tmp_path: Path, nothing_traced: TracedBefore
) -> None:
    lines = []
    for name, above in (("first", ""), ("second", "# one line further down\n")):
        path = tmp_path / f"{name}.py"
        path.write_text(above + _NET)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        plan = planner.plan(module.Net().train(), (torch.randn(4, 8),), budget="min", solver="sqrt_n")
        assert plan.step is not None
        lines.append(plan.step.lines)
    assert lines == [["first.py:7"], ["second.py:8"]]
    assert nothing_traced.found == 0


_NET = """import torch.nn as nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
    def forward(self, x):
        return self.a(x).tanh().sum()
"""


def test_the_oldest_are_forgotten() -> None:
    kept = TracedBefore(most_nodes=5)
    for name in "abc":
        graph = torch.fx.symbolic_trace(nn.Tanh()).graph  # three nodes
        kept._keep(name, Traced(graph, {}, None, {}))
    assert list(kept._traced) == ["c"]
    assert traced_before._MOST_NODES > 10_000
    assert isinstance(TRACED_BEFORE, TracedBefore)
