"""Dropout in two steps gives eager's bits; masks come back from their bits as they were."""

import contextlib
import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import planner
from planner import PlanWarning
from planner._torch.execution import bernoulli_draws, mask_operators, noise_operators
from planner._torch.execution.mask_operators import (
    DRAW_MASK,
    MASKED_PRODUCT,
    PACK_BITS,
    UNPACK_BITS,
    draw_mask,
)
from planner.verification.measure import measure_peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["rows", "transposed", "strided", "expanded"])
def test_dropout_in_two_steps_is_eagers(dtype: torch.dtype, layout: str) -> None:
    for percent in range(3, 100, 6):
        torch.manual_seed(percent)
        value, gradient = torch.randn(2, 13, 22, dtype=dtype).unbind()
        if layout == "transposed":
            value = value.t().contiguous().t()
        elif layout == "strided":
            value, gradient = value[:, ::2], gradient[:, ::2]
        elif layout == "expanded":
            value = value[:1].expand(13, 22)
        value.requires_grad_()
        before = torch.get_rng_state()
        eager = F.dropout(value, percent / 100)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        keep = 1.0 - percent / 100
        mask = DRAW_MASK(value.detach(), keep)
        assert torch.equal(after, torch.get_rng_state())
        made = MASKED_PRODUCT(value.detach(), mask, keep)
        assert torch.equal(made, eager)
        assert made.stride() == eager.stride()
        (expected,) = torch.autograd.grad(eager, value, gradient)
        found = MASKED_PRODUCT(gradient, mask, keep)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_product_takes_no_more_than_others(dtype: torch.dtype) -> None:
    value, mask = torch.randn(9, dtype=dtype), torch.ones(9, dtype=torch.bool)
    mask_operators._kept.cache_clear()
    peaks = [measure_peak(lambda: MASKED_PRODUCT(value, mask, 0.7), "cpu").peak_bytes for _ in range(3)]
    assert len(set(peaks)) == 1


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("keep", [0.0, 0.1, 1 / 3, 0.9, 1 - 2**-53, 1.0])
def test_large_masks_are_those_of_bernoulli(keep: float, transposed: bool) -> None:
    value = torch.empty(3, (1 << 16) + 5).t() if transposed else torch.empty(3, (1 << 16) + 5)
    made = []
    for draw in (lambda: DRAW_MASK(value, keep), lambda: torch.empty_like(value).bernoulli_(keep).bool()):
        torch.manual_seed(7)
        torch.rand(3)
        made.append((draw(), torch.get_rng_state()))
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])


def test_large_masks_are_drawn_whatever_device_is_the_default() -> None:
    value = torch.empty(1 << 18)
    torch.manual_seed(7)
    expected = value.bernoulli_(0.9).bool()
    bernoulli_draws.are_bernoullis.cache_clear()
    torch.manual_seed(7)
    with torch.device("meta"):
        mask = draw_mask(value, 0.9)  # as emitted code calls it
        assert bernoulli_draws.are_bernoullis()
    assert torch.equal(mask, expected)


def test_draws_that_are_not_bernoullis_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bernoulli_draws.are_bernoullis()
    monkeypatch.setattr(bernoulli_draws, "_BITS", 24)  # as if a float was made of them
    bernoulli_draws.are_bernoullis.cache_clear()
    value = torch.empty(1 << 18)
    torch.manual_seed(7)
    mask = DRAW_MASK(value, 0.9)
    assert not bernoulli_draws.are_bernoullis()
    torch.manual_seed(7)
    assert torch.equal(mask, value.bernoulli_(0.9).bool())
    bernoulli_draws.are_bernoullis.cache_clear()


class _Faster(torch.utils._python_dispatch.TorchDispatchMode):
    """Calls what a followed forward calls."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return bernoulli_draws.FASTER.get(func, func)(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1 << 16, 1 << 17, (1 << 17) + 1, 200_003, (1 << 19) + 5])
@pytest.mark.parametrize("keep", [0.0, 0.9, 1.0])
def test_noise_is_drawn_as_eager_draws_it(dtype: torch.dtype, count: int, keep: float) -> None:
    made = []
    for mode in (contextlib.nullcontext(), _Faster()):
        torch.manual_seed(7)
        torch.rand(3)
        noise = torch.full((count,), math.nan, dtype=dtype)
        with mode:
            noise.bernoulli_(keep)
        made.append((noise, noise._version, torch.get_rng_state()))
    (noise, version, state), (ours, our_version, our_state) = made
    assert torch.equal(ours, noise)
    assert our_version == version
    assert torch.equal(our_state, state)


def test_drawing_noise_allocates_nothing() -> None:
    noise = torch.empty(1 << 18)
    with _Faster():
        noise.bernoulli_(0.9)  # whatever is made once is there
        assert measure_peak(lambda: noise.bernoulli_(0.9), "cpu").peak_bytes == 0


def test_a_replayed_forward_draws_large_noise_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if not bernoulli_draws.are_bernoullis():
        pytest.skip("this PyTorch draws otherwise")
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.1)), torch.randn(1024, 64)

    def loss(result: torch.Tensor) -> torch.Tensor:
        return result.square().sum()

    plan = planner.plan(model, x, loss=loss, budget="min", backend="replay", costs="roofline")
    plan.apply(model)
    drawn = list[int]()
    chunk = bernoulli_draws._draw_chunk

    def counted(numbers: torch.Tensor, *others: Any) -> None:
        drawn.append(len(numbers))
        chunk(numbers, *others)

    monkeypatch.setattr(bernoulli_draws, "_draw_chunk", counted)
    loss(model(x)).backward()
    assert sum(drawn) > 1 << 17


def test_noise_of_another_kind_is_drawn_by_pytorch() -> None:
    def draws() -> Iterator[torch.Tensor]:
        torch.manual_seed(7)
        yield torch.empty(512, 1024).t().bernoulli_(0.9)
        yield torch.empty(1 << 18).bernoulli_(0.9, generator=torch.Generator().manual_seed(3))
        yield torch.empty((1 << 18) + 1)[1:].bernoulli_(0.9)
        yield torch.empty(1 << 18, dtype=torch.bool).bernoulli_(0.9)
        yield torch.empty(1 << 18, dtype=torch.int32).bernoulli_(0.9)

    expected = list(draws())
    with _Faster():
        for ours, theirs in zip(draws(), expected, strict=True):
            assert torch.equal(ours, theirs)
        with pytest.raises(RuntimeError, match="p to be in"):
            torch.empty(1 << 18).bernoulli_(1.5)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (8,), (3, 5, 7), ((1 << 18) + 3,), (2, 1 << 18)])
def test_masks_come_back_from_their_bits(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.3
    packed = PACK_BITS(mask)
    assert packed.untyped_storage().nbytes() == (mask.numel() + 7) // 8
    found = UNPACK_BITS(packed, shape)
    assert found.dtype is torch.bool
    assert found.shape == mask.shape
    assert torch.equal(found.view(torch.uint8), mask.view(torch.uint8))


def test_a_mask_that_does_not_lie_row_by_row_is_kept_whole() -> None:
    mask = (torch.rand(6, 10) < 0.5).t()
    with pytest.warns(PlanWarning, match="kept whole"):
        packed = PACK_BITS(mask)
    found = UNPACK_BITS(packed, mask.shape)
    assert torch.equal(found, mask)
    assert found.stride() == mask.stride()


def test_noise_of_a_probability_that_each_step_changes_takes_no_memory_for_good() -> None:
    packed = noise_operators.pack(torch.ones(8), 1.0)
    for i in range(100):
        noise = noise_operators.unpack(packed, 8, torch.float32, 1.0 + i / 100)
        assert torch.equal(noise, torch.full((8,), 1.0 + i / 100))
    tables = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.shape == (256, 8)]
    assert len(tables) <= 64
