"""Gradients of micro-batches that are added up before ``fully_shard`` reduces them, and HSDP's buffers."""

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import planner
from planner._torch.distributed import _fully_sharded_parameters, autograd_sums_micro_batches
from planner._torch.execution.allocator_events import record_cpu_allocations
from planner.capture.capture import record_eagerly
from planner.costs.devices import find_device
from planner.costs.eager_timeline import eager_timeline
from planner.parallel import fully_shard as fully_shard_hooks
from planner.parallel import unreduced
from planner.parallel.rank import Rank
from planner.training_step.step import Step
from tests.gloo import pauses
from tests.ranks import run_ranks, say_each, what_a_rank_says

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

MICRO_BATCHES = 3
STEPS = 2
_HALF: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
TWO: dict[str, planner.FSDP2] = {
    "in single precision": planner.FSDP2(2, no_sync=True),
    "in half precision, kept gathered": planner.FSDP2(2, False, **_HALF, no_sync=True),
}
FOUR: dict[str, planner.FSDP2] = {
    "replicas, reduced in half precision": planner.FSDP2(2, reduce_dtype=torch.bfloat16, replicas=2),
}


class _Half(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[::2].contiguous()


class _Narrowing(nn.Module):
    """Large activations at first, large weights at last: in the backward whole gradients count for more."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (16, 32, 64, 128, 256)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o), nn.Tanh(), _Half())
            for i, o in pairwise(sizes)
        )
        self.head = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


def _built(name: str) -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    torch.manual_seed(0)
    if "single" in name:
        return _Narrowing(), lambda n: torch.randn(512, 16, generator=torch.Generator().manual_seed(n))
    blocks: Any = importlib.import_module("blocks")
    return blocks.build_model(), lambda n: blocks.batch(n, 0)


def _sharded(model: nn.Module, parallel: planner.FSDP2, mesh: DeviceMesh | None) -> nn.Module:
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": parallel.reshard_after_forward}
    options["mp_policy"] = MixedPrecisionPolicy(parallel.param_dtype, parallel.reduce_dtype)
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def _peaks(parts: Sequence[Callable[[], object]]) -> list[int]:
    """The most bytes during each part, over what was there before the first."""

    def run() -> None:
        for number, part in enumerate(parts):
            with torch.profiler.record_function(f"part {number}"):
                part()

    recording = record_cpu_allocations(run)
    peaks = []
    for number in range(len(parts)):
        start, end = recording.marks[f"part {number}"]
        there = sum(count for moment, count in recording.allocations if moment < start)
        most = there
        for _, count in recording.allocations_between(start, end):
            there += count
            most = max(most, there)
        peaks.append(most)
    return peaks


def _trained(
    model: nn.Module, batch: Callable[[int], torch.Tensor], parallel: planner.FSDP2, most: Sequence[int]
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The least peaks of micro-batches over what was there before the first, and the weights in the end.

    More steps are measured while one is over ``most`` on any rank: threads of gloo let go of buffers late.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    micro_batches = MICRO_BATCHES if parallel.no_sync else 1

    def step(micro: int, inputs: torch.Tensor) -> None:
        model.set_requires_gradient_sync(micro == micro_batches - 1)  # type: ignore[operator]
        model(inputs).backward()

    least: list[int] = []
    weights = {}
    for number in range(20):
        optimizer.zero_grad()
        inputs = [batch(100 * number + 10 * micro + dist.get_rank()) for micro in range(micro_batches)]
        parts = [partial(step, micro, given) for micro, given in enumerate(inputs)]
        if number == 0:
            for part in parts:
                part()
        else:
            peaks = _peaks(parts)
            least = list(map(min, least, peaks)) if least else peaks
        optimizer.step()
        if number == STEPS:
            named = model.state_dict().items()
            weights = {n: v.full_tensor() for n, v in named if isinstance(v, DTensor)}
        if number >= STEPS:
            late = torch.tensor(float(any(map(int.__gt__, least, most))))
            dist.all_reduce(late)
            if not late:
                break
    return least, weights


def _compared(cases: dict[str, planner.FSDP2], name: str) -> str:
    parallel, mesh = cases[name], None
    if parallel.replicas > 1:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, batch = _built(name)
    text: list[Any] = [None]
    if dist.get_rank() == 0:
        options: dict[str, Any] = {"solver": "sqrt_n", "encodings": "none", "regions": ["layers.*"]}
        plan = planner.plan(model, (batch(0),), budget="min@33%", parallel=parallel, **options)
        text = [plan.dumps()]
    dist.broadcast_object_list(text)
    plan, weights, off = planner.Plan.loads(text[0]), [], []
    whole = plan.resident.unreduced_bytes
    for footprint in (plan.predicted, plan.baseline):
        model, batch = _built(name)
        if footprint is plan.predicted:
            plan.apply(model)
        predicted = whole + footprint.dynamic_peak_bytes
        model = _sharded(model, parallel, mesh)
        peaks, left = _trained(model, batch, parallel, [predicted] * MICRO_BATCHES)
        weights.append(left)
        # The first micro-batch takes no more; of the others one takes what is predicted.
        off.append(max(peaks) - predicted)
    unequal = [n for n, value in weights[1].items() if not torch.equal(weights[0][n], value)]
    return f"{off} bytes off, {unequal or 'all'} equal"


def _rank(cases: dict[str, planner.FSDP2], folder: Path) -> None:
    with pauses(), warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        say_each(cases, partial(_compared, cases), folder)


@pytest.mark.heavy
@pytest.mark.parametrize("ranks", [2])
def test_the_most_of_all_micro_batches_is_predicted(ranks: int, tmp_path_factory: Any) -> None:
    cases = TWO if ranks == 2 else FOUR
    folder = run_ranks(partial(_rank, cases), tmp_path_factory, f"micro-batches of {ranks}", ranks)
    said = {name: [what_a_rank_says(folder, name, rank) for rank in range(ranks)] for name in cases}
    assert said == {name: ["[0, 0] bytes off, all equal"] * ranks for name in cases}


def _plan(parallel: planner.FSDP2, **options: Any) -> planner.Plan:
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    model = _Narrowing()
    return planner.plan(model, (x,), budget="min", solver="sqrt_n", parallel=parallel, **options)


@pytest.mark.heavy
def test_whole_gradients_are_there_until_the_optimizers_step() -> None:
    sizes = [p.numel() for p in _Narrowing().parameters()]
    once, added = (_plan(planner.FSDP2(2, no_sync=no_sync), optimizer="sgd") for no_sync in (False, True))
    assert added.resident.unreduced_bytes == 4 * sum(sizes)
    assert added.resident.total == once.resident.total + 4 * sum(sizes)
    assert added.whole_step is not None
    assert once.whole_step is not None
    assert added.whole_step.optimizer_step_bytes == once.whole_step.optimizer_step_bytes
    half = _plan(planner.FSDP2(2, True, torch.bfloat16, no_sync=True))
    assert half.resident.unreduced_bytes == (4 if autograd_sums_micro_batches() else 2) * sum(sizes)
    assert planner.Plan.loads(half.dumps()).target.parallel == half.target.parallel


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16, torch.float32])
def test_whole_gradients_are_in_the_dtype_that_is_predicted(
    param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> None:
    model = _Narrowing()
    parallel = planner.FSDP2(1, param_dtype=param_dtype, reduce_dtype=reduce_dtype, no_sync=True)
    predicted = Rank(parallel).unreduced_bytes(model.parameters())
    _sharded(model, parallel, None)
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    model(torch.randn(64, 16)).backward()
    kept = [one.unsharded_accumulated_grad for one in _fully_sharded_parameters(model)]
    last = [one._unsharded_param.grad for one in _fully_sharded_parameters(model)]
    whole = [a if b is None else b for a, b in zip(last, kept, strict=True)]
    assert sorted(gradient.nbytes for gradient in whole) == sorted(predicted)


@pytest.mark.parametrize("adds_up", [False, True])
def test_both_ways_to_cast_and_add_up_gradients_are_followed(
    monkeypatch: pytest.MonkeyPatch, adds_up: bool
) -> None:
    for module in (fully_shard_hooks, unreduced):
        monkeypatch.setattr(module, "autograd_sums_micro_batches", lambda: adds_up)

    def recorded(options: planner.FSDP2) -> tuple[int, list[tuple[str, str | None]]]:
        x = torch.ones(2, 64, requires_grad=True)
        step = Step((x,), {}, lambda output: output.sum())
        recording = record_eagerly(nn.Linear(64, 64), step, lambda copied: None, rank=Rank(options))
        said = []
        for event in recording.events:
            assert event.call is not None
            call = recording.calls[event.call]
            tensors = [t.dtype for t in call.args if isinstance(t, torch.Tensor)]
            name, into = call.func.__name__, recording.outputs[event.call]
            node = None if event.node is None else event.node[0]
            if event.backward and name == "_to_copy.default" and into.dtype == torch.bfloat16:
                said.append(("cast", node))
            if event.backward and name == "add_.Tensor" and tensors == [torch.float32, torch.bfloat16]:
                said.append(("added", node))
        return eager_timeline(recording, find_device("cpu"), None).peak_bytes, said

    peak, said = recorded(planner.FSDP2(2))
    assert not said
    if adds_up:
        monkeypatch.setattr(fully_shard_hooks, "autograd_sums_micro_batches", lambda: False)
        assert recorded(planner.FSDP2(2))[0] - peak == 64 * 4  # the last gradient is not held
        monkeypatch.setattr(fully_shard_hooks, "autograd_sums_micro_batches", lambda: True)
    assert len(recorded(planner.FSDP2(2, reduce_dtype=torch.bfloat16))[1]) == (2 if adds_up else 0)
    _, said = recorded(planner.FSDP2(2, **_HALF, no_sync=True))
    assert len(said) == 2
    by_autograd = [node for _, node in said if node is not None and "AccumulateGrad" in node]
    assert len(by_autograd) == (2 if adds_up else 0)


def test_what_replicas_reduce_is_kept_where_it_is_no_gradient() -> None:
    def peak(reduce_dtype: torch.dtype | None, replicas: int) -> int:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        options = planner.FSDP2(2, reduce_dtype=reduce_dtype, replicas=replicas)
        step = Step((torch.ones(2, 64),), {}, lambda output: output.sum())
        rank = Rank(options, tuple(map(str, range(8))))
        recording = record_eagerly(model, step, lambda copied: None, rank=rank)
        return eager_timeline(recording, find_device("cpu"), None).peak_bytes

    assert peak(None, 2) == peak(None, 1)
    kept = 6 * 65 * 64 * 2 // 2  # of bfloat16, and two ranks; the peak is in the seventh unit's backward
    assert peak(torch.bfloat16, 2) == peak(torch.bfloat16, 1) + kept
