"""Parts, parameters and buffers of modules are those that PyTorch lists, in its order."""

import pytest
import torch
import torch.nn as nn

from planner.module_parts import buffers_of, parameters_of, parts_of
from tests.zoo import GPT


class Shared(nn.Module):
    """Parts, parameters and buffers that are there twice, one that is not there, and parts inside of each
    other in a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.two = nn.Linear(2, 2, bias=False)
        self.none: nn.Module | None
        self.register_module("none", None)
        self.again, self.two.weight = self.one[0], self.one[0].weight
        self.register_buffer("same", self.one[1].running_mean)
        self.register_buffer("no", None)
        self.two.add_module("around", self)


def scripted() -> nn.Module:
    module: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    return module


MODULES = {
    "gpt": GPT,
    "shared": Shared,
    "one": lambda: nn.Linear(1, 1),
    "nothing": nn.Identity,
    "replaced": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "scripted": scripted,
}


@pytest.mark.parametrize("name", MODULES)
def test_they_are_those_that_pytorch_lists(name: str) -> None:
    module = MODULES[name]()
    for found, expected in (
        (parts_of(module), module.modules()),
        (parameters_of(module), module.parameters()),
        (buffers_of(module), module.buffers()),
    ):
        assert [*map(id, found)] == [*map(id, expected)]
