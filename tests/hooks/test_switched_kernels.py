"""Switches of PyTorch's kernels that change between steps, and inside of one."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import planner
from planner.errors import FreedError
from tests.side_by_side import Layers, assert_same, counting_runs, layers, left_by, no_plan_warnings, plan_of

Context = contextlib.AbstractContextManager[Any]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(32, 96), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.lift(x).view(4, 16, 4, 24).transpose(1, 2).chunk(3, -1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2)).square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x.view(4, 16, 32))[0].square().mean()


def _math() -> Context:
    return sdpa_kernel(SDPBackend.MATH)


def _math_first() -> Context:
    kinds = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    return sdpa_kernel([*kinds, SDPBackend.CUDNN_ATTENTION], set_priority=True)


def _without_mkldnn() -> Context:
    return torch.backends.mkldnn.flags(enabled=False)  # type: ignore[no-any-return, no-untyped-call]


@contextlib.contextmanager
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("build", "switch", "said"),
    [
        (Attention, _math, "flash_sdp_enabled"),
        (Attention, _math_first, "order of attention's kernels"),
        (Recurrent, _without_mkldnn, "mkldnn.enabled"),
    ],
)
def test_a_step_under_other_switches_runs_as_it_is(
    build: Callable[[], nn.Module], switch: Callable[[], Context], said: str
) -> None:
    model, (x,), _ = layers(build)
    twin = copy.deepcopy(model)

    def loop(model: nn.Module) -> list[Any]:
        losses = []
        for context in (contextlib.nullcontext, switch, contextlib.nullcontext):
            with context():
                losses.append(model(x))
            losses[-1].backward()
        return losses

    plan_of(model, (x,), accumulate=True).apply(model)
    with counting_runs() as runs, pytest.warns(planner.PlanWarning, match=f"{said}.*without the plan"):
        ours = left_by(model, loop)
    assert runs.forward == 2
    assert_same(ours, left_by(twin, loop))


@pytest.mark.heavy
def test_precisions_that_are_set_one_by_one() -> None:
    """PyTorch then refuses to tell what ``torch.set_float32_matmul_precision`` has set."""
    model, (x,), _ = layers(Layers)
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        plan_of(model, (x,)).apply(model)
        with no_plan_warnings():
            model(x).backward()
    finally:
        products.fp32_precision = before


@pytest.mark.heavy
def test_other_switches_in_the_backward_are_said() -> None:
    model, (x,), _ = layers(Layers)
    plan_of(model, (x,)).apply(model)
    loss = model(x)
    with _without_mkldnn(), pytest.warns(planner.PlanWarning, match=r"mkldnn\.enabled was changed between"):
        loss.backward()
    loss = model(x)
    with _deterministic(), pytest.raises(planner.PlanMismatch, match="Call it before the forward"):
        loss.backward()
    loss.backward()  # nothing was freed
    with pytest.raises(FreedError, match="a second time"):
        loss.backward()
