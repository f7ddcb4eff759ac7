"""Parameters without data: those that are made at once are what PyTorch makes of them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from planner._torch import fake
from planner._torch.without_data.plain import facts_of


def _with_gradient() -> nn.Parameter:
    parameter = nn.Parameter(torch.randn(3))
    parameter.grad = torch.ones(3)
    return parameter


PARAMETERS: dict[str, Callable[[], nn.Parameter]] = {
    "plain": lambda: nn.Parameter(torch.randn(3, 4)),
    "frozen": lambda: nn.Parameter(torch.randn(3, 4), requires_grad=False),
    "transposed": lambda: nn.Parameter(torch.randn(3, 4).t()),
    "with gaps": lambda: nn.Parameter(torch.randn(6, 8)[:, ::2]),
    "expanded": lambda: nn.Parameter(torch.randn(1).expand(4)),
    "the end of a storage": lambda: nn.Parameter(torch.randn(6)[2:]),
    "bfloat16": lambda: nn.Parameter(torch.randn(3).bfloat16()),
    "whole numbers": lambda: nn.Parameter(torch.arange(3), requires_grad=False),
    "conjugate": lambda: nn.Parameter(torch.randn(3, dtype=torch.complex64).conj()),
    "empty": lambda: nn.Parameter(torch.randn(0, 3)),
    "a scalar": lambda: nn.Parameter(torch.tensor(1.0)),
    "with a gradient": _with_gradient,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_without_data_is_the_one_that_pytorch_makes(name: str) -> None:
    parameter = PARAMETERS[name]()
    expected = FakeTensorMode().from_tensor(parameter)
    mode = FakeTensorMode()
    made = fake.fake_like(parameter, mode)
    assert facts_of(made) == facts_of(expected)
    assert made.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    assert isinstance(made, nn.Parameter)
    assert made.is_leaf
    assert (made.grad is None) == (expected.grad is None)
    assert mode.from_tensor(parameter) is made


def test_most_parameters_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("PyTorch's converter was asked")

    monkeypatch.setattr(FakeTensorMode, "from_tensor", refuse)
    for part in nn.TransformerEncoderLayer(8, 2).parameters():
        assert fake.is_fake(fake.fake_like(part, FakeTensorMode()))


def test_what_shares_memory_with_a_parameter_shares_it_without_data() -> None:
    base = torch.randn(4)
    mode, first, second = FakeTensorMode(), nn.Parameter(base), nn.Parameter(base)
    one, other = fake.fake_like(first, mode), fake.fake_like(second, mode)
    part = mode.from_tensor(first.data[1:])
    assert fake.storage_key(one) == fake.storage_key(other) == fake.storage_key(part)
    assert part.storage_offset() == 1
