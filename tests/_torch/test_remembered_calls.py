"""Calls on tensors without data that are remembered return what they would if they were not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from planner._torch.without_data.data_free import _MARK
from planner._torch.without_data.fake_values import ConstantTrackingFakeMode
from planner._torch.without_data.remembered_calls import RemembersCalls

aten = torch.ops.aten

CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum of two": lambda x, y: x + y,
    "number": lambda x, y: x * 2.5,
    "integer": lambda x, y: x + 1,
    "view": lambda x, y: x.view(6, 4),
    "shared and no view": lambda x, y: aten._unsafe_view(x, [6, 4]),
    "transposed": lambda x, y: x.t(),
    "part of a view": lambda x, y: x.t()[1:3],
    "in place": lambda x, y: x.mul_(y),
    "several results": lambda x, y: torch.var_mean(x, 0),
    "list of results": lambda x, y: x.chunk(2),
    "list of operands": lambda x, y: torch.cat([x, y], 1),
    "matrix product": lambda x, y: x @ y.t(),
    "other type": lambda x, y: x.to(torch.bfloat16),
    "mask": lambda x, y: x > y,
    "new": lambda x, y: torch.empty(3, 2),
    "like another": lambda x, y: torch.empty_like(x, dtype=torch.int32),
    "conjugate": lambda x, y: torch.complex(x, y).conj(),
    "imaginary part": lambda x, y: torch.complex(x, y).conj().imag,
    "random": lambda x, y: torch.nn.functional.dropout(x, 0.5),
    "layer norm": lambda x, y: aten.native_layer_norm(x, [6], None, None, 1e-5),
    "size": lambda x, y: x.size(),
}


def told(value: Any) -> Any:
    """All that can be asked of a result."""
    if not isinstance(value, torch.Tensor):
        return [told(v) for v in value] if isinstance(value, list | tuple) else (type(value), value)
    assert isinstance(value, FakeTensor)
    return {
        "layout": (value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes()),
        "kind": (value.dtype, value.device, value.requires_grad, value.is_conj(), value.is_neg()),
        "keys": torch._C._dispatch_keys(value).raw_repr(),
        # But of which mode it is, and whether that noted that it depends on no data.
        "attributes": {k: v for k, v in vars(value).items() if k not in ("fake_mode", _MARK)},
        "view": value._is_view(),
    }


def operands(mode: FakeTensorMode, differentiable: bool) -> list[torch.Tensor]:
    with mode:
        x, y = (torch.empty(4, 6, requires_grad=differentiable) for _ in range(2))
        return [x.clone() if differentiable else x, y]  # leaves may not be changed


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_remembered_call_returns_what_it_returned(
    monkeypatch: pytest.MonkeyPatch, name: str, differentiable: bool
) -> None:
    monkeypatch.setattr(FakeTensorMode, "cache", {})
    mode, plain = ConstantTrackingFakeMode(), FakeTensorMode()
    x, y = operands(plain, differentiable)
    with plain:
        expected = told(CALLS[name](x, y))
    for _ in range(3):  # the first time nothing is remembered
        x, y = operands(mode, differentiable)
        with mode:
            result = CALLS[name](x, y)
        assert told(result) == expected
        if name == "in place":
            assert result is x
        if name in ("view", "shared and no view", "transposed", "part of a view"):
            assert result.untyped_storage()._cdata == x.untyped_storage()._cdata
        elif isinstance(result, torch.Tensor) and name not in ("in place", "imaginary part", "conjugate"):
            assert result.untyped_storage()._cdata != x.untyped_storage()._cdata


def test_remembered_calls_are_found_by_short_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTensorMode, "cache", {})
    mode = ConstantTrackingFakeMode()
    x, y = operands(mode, False)
    with mode:
        x @ y.t()

        def long_way(*_: object) -> None:
            raise AssertionError("looked up the long way")

        monkeypatch.setattr(RemembersCalls, "_cache_key", long_way)
        assert (x @ y.t()).shape == (4, 4)


DIFFERENT: dict[str, Callable[[], torch.Tensor]] = {
    "size": lambda: torch.empty(4, 5),
    "strides": lambda: torch.empty(6, 4).t(),
    "type": lambda: torch.empty(4, 6, dtype=torch.float64),
    "device": lambda: torch.empty(4, 6, device="meta"),
    "conjugate": lambda: torch.empty(4, 6, dtype=torch.complex64).conj(),
    "complex": lambda: torch.empty(4, 6, dtype=torch.complex64),
    "offset": lambda: torch.empty(30)[6:].view(4, 6),
    "more behind": lambda: torch.empty(30)[:24].view(4, 6),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_operands_are_not_taken_for_remembered_ones(name: str) -> None:
    mode, plain = ConstantTrackingFakeMode(), FakeTensorMode()
    with mode:
        torch.empty(4, 6).neg()
        ours = [DIFFERENT[name]().neg(), DIFFERENT[name]().t(), DIFFERENT[name]() * 2]
    with plain:
        theirs = [DIFFERENT[name]().neg(), DIFFERENT[name]().t(), DIFFERENT[name]() * 2]
    assert told(ours) == told(theirs)


def test_numbers_of_other_types_are_other_calls() -> None:
    with ConstantTrackingFakeMode():
        x = torch.empty(3, dtype=torch.int64)
        for _ in range(2):
            assert [(x * n).dtype for n in (1, True, 1.0)] == [torch.int64, torch.int64, torch.float32]


def test_defaults_and_inference_are_part_of_a_call() -> None:
    with ConstantTrackingFakeMode():
        x = torch.empty(3, dtype=torch.int64)
        for kind in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(kind)
            try:
                assert (x * 1.5).dtype is kind
            finally:
                torch.set_default_dtype(torch.float32)
        with torch.inference_mode():
            assert torch.empty(3).neg().is_inference()
        assert not torch.empty(3).neg().is_inference()
