"""Autocast as CUDA does it, captured on the CPU."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner._torch.cuda import autocast
from planner._torch.cuda.autocast import autocast_of_cuda, operators_cast_on
from planner._torch.cuda.kernels import dispatched_in_python
from planner.errors import CaptureError, PlanWarning
from planner.user_plan import Plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="autocast is CUDA's own here")

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def test_every_operator_that_cuda_casts_is_known() -> None:
    lists = [
        getattr(autocast, name)
        for name in ("ALIKE", "TO_HALF", "TO_SINGLE", "RESULT_SINGLE", "NORMS", "TO_WIDEST", "REFUSED")
    ]
    known = frozenset[str]().union(*lists)
    assert sum(map(len, lists)) == len(known)
    # Builds with CUDA have a kernel of cuDNN's besides, which no step on the CPU calls.
    assert known == operators_cast_on("CUDA") - {"_cudnn_rnn"}
    assert operators_cast_on("CPU") >= autocast.ALIKE


def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.rand(*shape or (4, 4), dtype=dtype)


# What PyTorch's documentation of CUDA's autocast says of each.
CASES: dict[str, tuple[Callable[[], torch.Tensor], torch.dtype]] = {
    "linear": (lambda: F.linear(of(SINGLE), of(SINGLE), of(SINGLE, 4)), HALF),
    "matmul": (lambda: of(SINGLE) @ of(SINGLE), HALF),
    "matmul of doubles": (lambda: of(DOUBLE) @ of(DOUBLE), DOUBLE),
    "bmm": (lambda: torch.bmm(of(SINGLE, 2, 3, 4), of(HALF, 2, 4, 3)), HALF),
    "baddbmm": (lambda: torch.baddbmm(of(SINGLE, 2, 3, 3), of(SINGLE, 2, 3, 4), of(SINGLE, 2, 4, 3)), HALF),
    "mv": (lambda: torch.mv(of(SINGLE), of(SINGLE, 4)), HALF),
    "einsum": (lambda: torch.einsum("ij,jk->ik", of(SINGLE), of(SINGLE)), HALF),
    "convolution": (lambda: F.conv2d(of(SINGLE, 1, 2, 4, 4), of(SINGLE, 3, 2, 3, 3), padding="same"), HALF),
    "attention": (lambda: F.scaled_dot_product_attention(*of(SINGLE, 3, 1, 2, 4, 8)), HALF),
    "softmax": (lambda: of(HALF).softmax(-1), SINGLE),
    "log_softmax": (lambda: F.log_softmax(of(HALF), 1), SINGLE),
    "softmax to half": (lambda: torch.softmax(of(HALF), -1, HALF), HALF),
    "layer_norm": (lambda: F.layer_norm(of(HALF), (4,), of(SINGLE, 4), of(SINGLE, 4)), SINGLE),
    "rms_norm": (lambda: F.rms_norm(of(HALF), (4,), of(SINGLE, 4)), SINGLE),
    "group_norm": (lambda: F.group_norm(of(HALF), 2), SINGLE),
    "sum": (lambda: of(HALF).sum(), SINGLE),
    "sum of a dimension": (lambda: of(HALF).sum(1, keepdim=True), SINGLE),
    "sum of integers": (lambda: torch.arange(4).sum(), torch.int64),
    "cumsum": (lambda: of(HALF).cumsum(1), SINGLE),
    "prod": (lambda: of(HALF).prod(), SINGLE),
    "norm": (lambda: torch.ops.aten.norm.Scalar(of(HALF), 2), SINGLE),
    "norm of a dimension": (lambda: torch.ops.aten.norm.ScalarOpt_dim(of(HALF), 2, [1]), SINGLE),
    "vector norm": (lambda: torch.linalg.vector_norm(of(HALF)), SINGLE),
    "pow": (lambda: of(HALF) ** 2.5, SINGLE),
    "rsqrt": (lambda: of(HALF).rsqrt(), SINGLE),
    "mse_loss": (lambda: F.mse_loss(of(HALF), of(HALF)), SINGLE),
    "cross_entropy": (lambda: F.cross_entropy(of(HALF), torch.zeros(4, dtype=torch.long)), SINGLE),
    "cross_entropy, smoothed": (lambda: F.cross_entropy(of(HALF), of(HALF), label_smoothing=0.1), SINGLE),
    "interpolate": (lambda: F.interpolate(of(HALF, 1, 1, 4, 4), scale_factor=2, mode="bilinear"), SINGLE),
    "addcmul": (lambda: torch.addcmul(of(HALF), of(SINGLE), of(HALF)), SINGLE),
    "addcmul of halves": (lambda: torch.addcmul(of(HALF), of(HALF), of(HALF)), HALF),
    "cat": (lambda: torch.cat([of(HALF), of(SINGLE)]), SINGLE),
    "relu": (lambda: of(HALF).relu(), HALF),
    "gelu": (lambda: F.gelu(of(HALF)), HALF),
    "mean": (lambda: of(HALF).mean(), HALF),
    "fft": (lambda: torch.fft.fft(of(SINGLE)).real, SINGLE),
    "padding": (lambda: F.pad(of(HALF, 1, 1, 4, 4), (1, 1, 1, 1), mode="reflect"), HALF),
}


@pytest.mark.parametrize("name", CASES)
def test_operations_run_in_the_precision_that_cuda_runs_them_in(name: str) -> None:
    operation, expected = CASES[name]
    with autocast_of_cuda(), dispatched_in_python(), torch.autocast("cuda", HALF):
        assert operation().dtype is expected


def test_an_operation_that_cuda_refuses_is_refused() -> None:
    refused = pytest.raises(CaptureError, match="binary_cross_entropy is refused")
    with autocast_of_cuda(), dispatched_in_python(), torch.autocast("cuda", HALF), refused:
        F.binary_cross_entropy(of(SINGLE), of(SINGLE))


def test_regions_are_entered_and_left_as_on_cuda() -> None:
    with autocast_of_cuda() as surrounding:
        assert surrounding == []
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled("cuda")
            assert (of(SINGLE) @ of(SINGLE)).dtype is torch.float16
            with torch.autocast("cuda", enabled=False):
                assert not torch.is_autocast_enabled("cuda")
                assert (of(SINGLE) @ of(SINGLE)).dtype is SINGLE
            with torch.autocast(of(SINGLE).device.type, HALF):  # which is "cuda" there
                assert (of(SINGLE) @ of(SINGLE)).dtype is HALF
            assert (of(SINGLE) @ of(SINGLE)).dtype is torch.float16
        assert not torch.is_autocast_enabled("cuda")
        assert not torch.is_autocast_enabled("cpu")


def test_nothing_of_it_stays_and_other_threads_see_nothing_of_it() -> None:
    methods = [torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__]
    seen: list[torch.dtype] = []

    def elsewhere() -> None:
        with torch.autocast("cpu", HALF):
            seen.append(of(HALF).softmax(-1).dtype)
            seen.append((of(SINGLE) @ of(SINGLE)).dtype)

    with autocast_of_cuda():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    elsewhere()
    assert seen == [HALF, HALF] * 2
    assert methods == [torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__]
    with pytest.warns(UserWarning, match="CUDA is not available"), torch.autocast("cuda", HALF):
        assert (of(SINGLE) @ of(SINGLE)).dtype is SINGLE


class Block(nn.Module):
    """A layer and its loss, in a region of autocast or with the same casts by hand."""

    def __init__(self, region: Callable[[], Any] | None = None, by_hand: torch.dtype | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 96)
        self.region, self.by_hand = region, by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_hand is not None:
            return self._with_casts(x, self.by_hand)
        if self.region is None:
            return self._plain(x)
        with self.region():
            return self._plain(x)

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.norm(self.first(x)))
        y = y + self.second(y)
        scores = torch.bmm(y, y.transpose(1, 2)).softmax(-1)
        return F.gelu(torch.bmm(scores, y)).sum()

    def _with_casts(self, x: torch.Tensor, half: torch.dtype) -> torch.Tensor:
        held = [p.to(half) for p in (*self.first.parameters(), *self.second.parameters())]
        y = F.linear(x.to(half), held[0], held[1])
        y = self.norm(y.float()).to(half)
        y = F.linear(y, held[2], held[3])
        y = y + F.linear(y, held[2], held[3])
        scores = torch.bmm(y, y.transpose(1, 2)).float().softmax(-1)
        return F.gelu(torch.bmm(scores.to(half), y)).sum(dtype=torch.float32)


def planned(model: nn.Module) -> Plan:
    return planner.plan(model, (torch.rand(4, 32, 64),), budget="100GiB", device="A100-80GB", solver="none")


def operations(plan: Plan) -> list[tuple[str, int]]:
    return sorted((op.name, op.bytes) for graph in plan.graphs for op in graph.ops)


@pytest.mark.heavy
def test_a_step_is_planned_as_with_the_casts_that_cuda_makes() -> None:
    inside = planned(Block(lambda: torch.autocast("cuda", HALF)))
    by_hand = planned(Block(by_hand=HALF))
    assert operations(inside) == operations(by_hand)
    assert inside.no_recompute.dynamic_peak_bytes == by_hand.no_recompute.dynamic_peak_bytes
    assert inside.baseline.dynamic_peak_bytes == by_hand.baseline.dynamic_peak_bytes
    assert planned(Block()).baseline.dynamic_peak_bytes != inside.baseline.dynamic_peak_bytes


@pytest.mark.graphs
@pytest.mark.parametrize("below", [False, True])
def test_a_graph_may_break_inside_of_a_region(below: bool) -> None:
    def forward(block: Block, x: torch.Tensor) -> torch.Tensor:
        y = block.second(block.norm(block.first(x)))
        torch._dynamo.graph_break()
        scores = torch.bmm(y, y.transpose(1, 2)).cumsum(-1)
        return F.gelu(torch.bmm(scores, y)).sum()

    class Part(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, x)

    class Broken(Block):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", HALF):
                return self.part(x) if below else forward(self, x)

    plan = planned(Broken())
    assert len(plan.graphs) == 2
    found = dict(operations(plan))
    assert found["aten.cumsum.default"] == 4 * 32 * 32 * 4
    assert found["aten.gelu.default"] == 4 * 32 * 96 * 2


@pytest.mark.heavy
def test_a_region_around_the_planning_is_taken_to_be_on() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CUDA is not available")
        region = torch.autocast("cuda", HALF)
    with pytest.warns(PlanWarning, match=r"planned as autocast to torch\.bfloat16"), region:
        around = planned(Block())
    assert around.model.autocast == ["cuda:bfloat16"]
    assert operations(around) == operations(planned(Block(lambda: torch.autocast("cuda", HALF))))
    torch.set_autocast_enabled("cuda", True)  # which leaves no doubt
    try:
        assert planned(Block()).model.autocast == ["cuda:float16"]
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_a_region_that_was_made_before_is_taken_to_be_on() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        region = torch.autocast("cuda", HALF)
    with pytest.warns(PlanWarning, match=r"made before.*planned as autocast to torch\.bfloat16"):
        before = planned(Block(lambda: region))
    assert operations(before) == operations(planned(Block(lambda: torch.autocast("cuda", HALF))))
    assert not region._enabled
