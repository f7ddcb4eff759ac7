"""Memory that the programs of plans free, and allocate again: held in between where that costs nothing."""

import re
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

from planner._torch import fake
from planner._torch.inductor import fusion
from planner._torch.inductor.fusion_names import Fusion
from planner._torch.inductor.memory import HeldByLine
from planner.lowering.inductor import InductorLowering
from planner.planning.inductor import FUSIONS
from planner.training_step.recorder import StepRecorder

Function = Callable[..., list[torch.Tensor]]
aten: Any = torch.ops.aten


@pytest.fixture(autouse=True)
def lowers_again() -> Iterator[None]:
    """Take no program from Inductor's cache."""
    with config.patch(fx_graph_cache=False):
        yield


def lowered(function: Function, *shapes: tuple[int, ...], how: Fusion = "in-order") -> tuple[str, int]:
    """The body of the program of a backward, and the bytes that it holds at most, with its inputs."""
    mode = fake.fake_mode_with_sizes()
    with mode:
        inputs = [torch.empty(*shape) for shape in shapes]
    program, run, arguments = InductorLowering({}, how).emitted(make_fx(function)(*inputs), "backward")
    recorder = StepRecorder(mode := arguments[0].fake_mode, ())
    with fake.without_modes(), mode, recorder:
        recorder.graph_ran((), arguments)
        results = run(arguments)
        recording = recorder.recording
    del results
    change = [0] * (len(recording.events) + 1)
    for step, event in enumerate(recording.events):
        for storage in map(recording.storages.__getitem__, event.allocates):
            change[step] += storage.bytes
            if storage.died_after is not None:
                change[storage.died_after + 1] -= storage.bytes
    return program.source.partition("def call(")[2], max(accumulate(change[:-1]))


def late(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Two large products, a small one between them; and the most is held where the results are made."""
    total = (x @ weight).sum(0)
    small = x.t() @ x
    other = (x @ weight.exp()).sum(0)
    return [small, total, other, aten.tanh(x @ weight), aten.cos(x @ weight), aten.sin(x @ weight)]


def early(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Two large products, what is larger by far between them."""
    total = (x @ weight).sum(0)
    large = (x @ x.t().repeat(1, 16)).sum(0)
    other = (x @ weight.exp()).sum(0)
    return [total, large, other]


def test_a_buffer_waits_for_its_next_use_where_more_is_held_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = (256, 32), (32, 512)
    body, most = lowered(late, *shapes)
    monkeypatch.setattr(HeldByLine, "peak_between", lambda *_: float("inf"))
    at_once, least = lowered(late, *shapes)
    large = re.compile(r"empty_strided_cpu\(\(256, 512\)")
    assert len(large.findall(body)) < len(large.findall(at_once))
    assert most == least


def test_a_buffer_is_freed_where_the_most_is_held_until_its_next_use() -> None:
    body, _ = lowered(early, (256, 32), (32, 512))
    assert len(re.findall(r"empty_strided_cpu\(\(256, 512\)", body)) == 2


def convolved(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """A convolution between two large products, and the most is held where the results are made."""
    total = (x @ weight).sum(0)
    small = aten.convolution(x.t()[None], x[:, :, None], None, [1], [0], [1], False, [0], 1)
    other = (x @ weight.exp()).sum(0)
    return [small, total, other, aten.tanh(x @ weight), aten.cos(x @ weight), aten.sin(x @ weight)]


def test_no_buffer_waits_while_an_operator_runs_whose_scratch_is_not_known() -> None:
    large = re.compile(r"empty_strided_cpu\(\(256, 512\)")
    found = [len(large.findall(lowered(function, (256, 32), (32, 512))[0])) for function in (late, convolved)]
    assert found[1] == found[0] + 1


def attention(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    """An operator that returns three tensors, which reads what nothing reads after it."""
    q, k, v = q.exp(), k.exp(), k.sin()
    out, statistics = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return list(
        aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g.cos(), q, k, v, out, statistics, 0.0, False
        )
    )


def pooled(x: torch.Tensor) -> list[torch.Tensor]:
    out, where = aten.max_pool2d_with_indices(x.exp(), [4, 4], [1, 1])
    return [F.relu(out).sum(), where.sum()]


@pytest.mark.parametrize("how", FUSIONS)
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (late, ((256, 32), (32, 512))),
        (early, ((256, 32), (32, 512))),
        (attention, ((2, 4, 64, 32),) * 3),
        (pooled, ((2, 8, 16, 16),)),
    ],
)
def test_what_is_held_by_lines_is_what_the_program_holds(
    monkeypatch: pytest.MonkeyPatch, function: Function, shapes: tuple[tuple[int, ...], ...], how: Fusion
) -> None:
    by_lines: list[HeldByLine] = []

    class Seen(HeldByLine):
        def __init__(self) -> None:
            super().__init__()
            by_lines.append(self)

    monkeypatch.setattr(fusion, "HeldByLine", Seen)
    _, most = lowered(function, *shapes, how=how)
    assert by_lines[-1].overall_peak_memory == most
