"""Workspaces: measured figures against known scratch and against real runs, the cache, failures."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from planner._torch.execution.allocator_events import record_cpu_allocations
from planner.costs.workspace import NOT_RUN, OpMemory, WorkspaceMeter
from planner.training_step.call import Call
from planner.verification.measure import measure_peak

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def measured(func: Any, *args: Any, **kwargs: Any) -> OpMemory:
    meter = WorkspaceMeter("cpu", None)
    (memory,) = meter.measure([Call(func, args, kwargs)])
    assert not meter.failures
    return memory


class Recorder(TorchDispatchMode):
    """Collects the operators of a real run, with tensors that have no data."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

        result = func(*args, **(kwargs or {}))
        map_tensors = torch.utils._pytree.tree_map_only
        self.calls.append(Call(func, *map_tensors(torch.Tensor, bare, (args, kwargs or {}))))
        return result


def recorded(step: Callable[[], object]) -> list[Call]:
    recorder = Recorder()
    with recorder:
        step()
    return recorder.calls


def test_a_product_has_no_workspace() -> None:
    assert measured(aten.mm.default, meta(64, 32), meta(32, 16)) == OpMemory(0, (64 * 16 * 4,))


def test_a_mixed_sum_casts_its_operand_first() -> None:
    x, y = meta(64, 64, dtype=torch.bfloat16), meta(64, 64)
    assert measured(aten.add.Tensor, x, y) == OpMemory(64 * 64 * 4, (64 * 64 * 4,))


@pytest.mark.heavy
@pytest.mark.parametrize("backward", [False, True])
def test_a_convolution_agrees_with_a_real_one(backward: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 32, 40, 40), torch.randn(64, 32, 3, 3)
    y = torch.randn(4, 64, 40, 40)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def forward_step() -> object:
        return aten.convolution.default(x, w, None, *rest)

    def backward_step() -> object:
        return aten.convolution_backward.default(y, x, w, None, *rest, [True, True, False])

    step = backward_step if backward else forward_step
    step()
    real = measure_peak(step, "cpu")
    (call,) = recorded(step)
    memory = measured(call.func, *call.args)
    assert sum(memory.output_bytes) == real.final_bytes
    assert memory.workspace_bytes == real.peak_bytes - real.final_bytes
    if torch.backends.mkldnn.is_available():
        assert memory.workspace_bytes > 100_000


def training_steps() -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 24, 24)
    tokens = torch.randint(0, 50, (2, 12))
    conv = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3, groups=16),
        torch.nn.GroupNorm(4, 16),
        torch.nn.ConvTranspose2d(16, 8, 4, 2, 1),
        torch.nn.MaxPool2d(2),
    )
    embedding = torch.nn.Embedding(50, 32)
    encoder = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    head = torch.nn.Linear(32, 50)
    lstm = torch.nn.LSTM(32, 16, batch_first=True)

    def language_model() -> torch.Tensor:
        return F.cross_entropy(head(encoder(embedding(tokens))).flatten(0, 1), tokens.flatten())

    def attention() -> torch.Tensor:
        x = embedding(tokens).unflatten(-1, (4, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).sum()

    def half() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return head(encoder(embedding(tokens))).float().square().mean()

    return {
        "convolutions": lambda: conv(image).square().mean().backward(),
        "language model": lambda: language_model().backward(),
        "attention": lambda: attention().backward(),
        "autocast": lambda: half().backward(),
        "lstm": lambda: lstm(embedding(tokens))[0].sum().backward(),
        "indexing": lambda: (
            embedding(tokens)[:, [0, 3, 3]].sort(-1)[0].cumsum(1).logsumexp(-1).sum().backward()
        ),
    }


class Marker(TorchDispatchMode):
    """Marks every operator of a real run in the profile."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.profiler.record_function(f"operator {self.count}"):
            result = func(*args, **(kwargs or {}))
        self.count += 1
        return result


def per_operator(step: Callable[[], object]) -> list[tuple[int, int]]:
    """Workspace and output bytes of every operator of a real run."""
    marker = Marker()

    def marked() -> None:
        with marker:
            step()

    recording = record_cpu_allocations(marked)
    figures = []
    for number in range(marker.count):
        held = [0]
        for _, count in recording.allocations_between(*recording.marks[f"operator {number}"]):
            held.append(held[-1] + count)
        figures.append((max(held) - held[-1], held[-1]))
    return figures


@pytest.mark.parametrize("name", list(training_steps()))
def test_every_operator_of_a_step_agrees_with_a_real_run(name: str) -> None:
    step = training_steps()[name]
    step()
    calls = recorded(step)
    meter = WorkspaceMeter("cpu", None)
    predicted = [(m.workspace_bytes, sum(m.output_bytes)) for m in meter.measure(calls)]
    assert not meter.failures
    differing = [
        (str(call.func), *figures)
        for call, *figures in zip(calls, predicted, per_operator(step), strict=True)
        if figures[0] != figures[1]
    ]
    assert differing == []


def test_outputs_in_order() -> None:
    memory = measured(aten.native_layer_norm.default, meta(8, 32), [32], meta(32), meta(32), 1e-5)
    assert memory.output_bytes == (8 * 32 * 4, 8 * 4, 8 * 4)
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True])
    call = (meta(1, 4, 6, 6), meta(1, 3, 6, 6), meta(4, 3, 1, 1), [4], *rest)
    assert measured(aten.convolution_backward.default, *call).output_bytes == (0, 48, 16)


@pytest.mark.parametrize("mask", [[True, False, True], [False, False, True]])
def test_results_that_nobody_asks_for_are_scratch(mask: list[bool]) -> None:
    """A convolution's backward makes the weights' gradient for that of its biases."""
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
    images, weights = meta(4, 48, 8, 8), meta(48, 48, 3, 3)
    memory = measured(aten.convolution_backward.default, images, images, weights, [48], *rest)
    assert memory.output_bytes == (4 * 48 * 8 * 8 * 4 * mask[0], 0, 48 * 4)
    assert memory.workspace_bytes >= 48 * 48 * 3 * 3 * 4


def test_outputs_that_are_inputs_count_nothing() -> None:
    assert measured(aten.add_.Tensor, meta(10), meta(10)) == OpMemory(0, (0,))
    assert measured(aten.reshape.default, meta(10, 10), [100]) == OpMemory(0, (0,))
    assert measured(aten.reshape.default, meta(10, 10).t(), [100]) == OpMemory(0, (400,))


def test_strides_matter() -> None:
    wide = meta(4, 4).expand(3, 4, 4)
    assert measured(aten.clone.default, wide).output_bytes == (192,)
    meter = WorkspaceMeter("cpu", None)
    calls = [Call(aten.clone.default, (x,)) for x in (meta(4, 8), meta(8, 4).t())]
    meter.measure(calls)
    assert len(meter._known) == 2


def test_views_are_not_run() -> None:
    meter = WorkspaceMeter("cpu", None)
    assert meter.measure([Call(aten.view.default, (meta(4, 4), [16]))]) == [OpMemory(0, ())]
    assert not meter.failures


def test_each_distinct_operator_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run = WorkspaceMeter._run_on_cpu

    def counted(self: WorkspaceMeter, chunk: Any) -> Any:
        ran.extend(chunk)
        return run(self, chunk)

    monkeypatch.setattr(WorkspaceMeter, "_run_on_cpu", counted)
    meter = WorkspaceMeter("cpu", None)
    call = Call(aten.mul.Tensor, (meta(5), meta(5)))
    assert len(meter.measure([call, call, call])) == 3
    meter.measure([call])
    assert len(ran) == 1


def test_progress_is_reported() -> None:
    reported: list[tuple[int, int]] = []
    calls = [Call(aten.neg.default, (meta(n),)) for n in range(1, 101)]
    WorkspaceMeter("cpu", None).measure(calls, lambda done, total: reported.append((done, total)))
    assert reported[-1] == (100, 100)
    assert len(reported) > 1


def test_nothing_of_the_caller_s_changes() -> None:
    state = torch.get_rng_state()
    meter = WorkspaceMeter("cpu", None)
    with FakeTensorMode() as mode, torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.empty(16, 16)
        calls = [
            Call(aten.native_dropout.default, (x, 0.5, True)),
            Call(aten.mm.default, (x, x)),
            Call(aten.randn.default, ([4],)),
        ]
        found = meter.measure(calls)
        assert isinstance(torch.empty(1), type(x))
        assert mode is not None
    assert [m.output_bytes for m in found] == [(1024, 256), (1024,), (16,)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_an_open_profiler_session_is_left_alone() -> None:
    meter, calls = WorkspaceMeter("cpu", None), [Call(aten.neg.default, (meta(3),))]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as session:
        assert meter.measure(calls) == [NOT_RUN]
        torch.ones(3).exp()
    assert any(event.name == "aten::exp" for event in session.events())
    assert len(meter.unmeasured) == 1
    assert meter.measure(calls)[0].output_bytes == (12,)


# ---- failures -----------------------------------------------------------------------------------


def test_an_operator_that_fails_counts_nothing_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "planner.costs.workspace")
    meter = WorkspaceMeter("cpu", None)
    bad = Call(aten.mm.default, (meta(3, 4), meta(5, 6)))
    good = Call(aten.mm.default, (meta(3, 4), meta(4, 6)))
    assert meter.measure([bad, good, bad]) == [OpMemory(0, ()), OpMemory(0, (72,)), OpMemory(0, ())]
    ((key, reason),) = meter.failures.items()
    assert key.startswith("aten.mm.default(float32[3,4]")
    assert "cannot be multiplied" in reason
    assert "cannot be multiplied" in caplog.text


def test_operators_from_elsewhere_are_not_run() -> None:
    ran: list[int] = []
    with torch.library._scoped_library("planner_test", "DEF") as library:
        library.define("effect(Tensor x) -> Tensor")
        library.impl("effect", lambda x: ran.append(1) or x.clone(), "CompositeExplicitAutograd")
        meter = WorkspaceMeter("cpu", None)
        meter.measure([Call(torch.ops.planner_test.effect.default, (meta(3),))])
    assert not ran
    assert "from outside PyTorch" in next(iter(meter.failures.values()))


def test_an_operator_too_large_for_this_machine_is_not_run() -> None:
    meter = WorkspaceMeter("cpu", None)
    meter.measure([Call(aten.neg.default, (meta(1 << 50),))])
    assert "are free" in next(iter(meter.failures.values()))


@pytest.mark.parametrize(("at", "inner"), [(0, ()), (0, (5,)), (1, ()), (1, (5, 2))])
def test_masks_select_as_many_elements_as_are_written(at: int, inner: tuple[int, ...]) -> None:
    outer, mask = (3,) * at, meta(40, 8, dtype=torch.bool)
    whole, values = meta(*outer, 40, 8, *inner), meta(*outer, 60, *inner)
    memory = measured(aten.index_put_.default, whole, [*[None] * at, mask], values, True)
    assert memory.workspace_bytes >= 60 * 2 * 8  # where they are


def test_masks_are_tried_both_ways() -> None:
    x, mask = meta(10), meta(10, dtype=torch.bool)
    assert measured(aten.masked_select.default, x, mask).output_bytes == (40,)
    # Ten elements and two do not go together; none and none do, where all are false.
    two_masks = [mask, meta(2, dtype=torch.bool)]
    assert measured(aten.index.Tensor, meta(10, 2), two_masks).output_bytes == (0,)


def test_made_up_data_stop_no_kernel() -> None:
    """A GPU cannot be used any more after a kernel that found data to be wrong."""
    made = WorkspaceMeter("cpu", None).made_up.of
    for mask in (meta(10, dtype=torch.bool), meta(10, 1, dtype=torch.bool), meta(1, dtype=torch.bool)):
        for operator in (aten.masked_scatter.default, aten.masked_scatter_.default):
            (x, chosen, source), _, _ = made(Call(operator, (meta(10, 10), mask, meta(2))), masks=True)
            assert chosen.expand_as(x).sum() <= len(source)
    for condition in (meta(1, dtype=torch.bool), meta(1, dtype=torch.int64), meta(1)):
        (value,), _, _ = made(Call(aten._assert_async.default, (condition,)), masks=False)
        assert value.item()


# ---- cache --------------------------------------------------------------------------------------


def test_operators_run_on_their_device_whatever_the_default_one_is() -> None:
    call = Call(aten.neg.default, (torch.empty(3, 5, device="meta"),))
    with torch.device("meta"), WorkspaceMeter("cpu", None).arguments(call) as (args, _):
        assert args[0].device.type == "cpu"
        assert bool((args[0] >= 0.5).all())
