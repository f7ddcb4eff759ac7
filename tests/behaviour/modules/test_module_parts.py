"""Parts, parameters and buffers of modules are those that PyTorch lists, in its order."""

from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner._torch.fake import is_fake
from planner.module_parts import buffers_of, named_parts, parameters_of, parts_of
from planner.training_step.copies import fake_copy
from planner.training_step.step import Step
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
    named = [(name, id(part)) for name, part in named_parts(module).items()]
    assert named == [(name, id(part)) for name, part in module.named_modules()]


def test_the_copy_that_is_captured_has_no_data_in_other_attributes_either() -> None:
    module = nn.utils.weight_norm(nn.Linear(4, 4))  # its weight is no parameter, and is made by a hook
    module.table = torch.randn(4)
    copied = fake_copy(module, Step((torch.randn(2, 4),))).module
    assert is_fake(copied.weight)
    assert is_fake(copied.table)


class Headed(nn.Module):
    """Layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).square().mean()


class OfTheHead(Headed):
    """The same, that gives an optimizer the parameters of the head alone."""

    def parameters(self, recurse: bool = True) -> Any:
        return self.head.parameters(recurse)


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": True}, *({"parallel": by} for by in ("ddp:2", "fsdp2:2"))], ids=str
)
def test_all_parameters_count_whatever_a_class_gives_its_optimizer(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 32)
    plans = [planner.plan(model, (x,), budget="min", **options) for model in (Headed(), OfTheHead())]
    assert plans[0].predicted.peak_bytes == plans[1].predicted.peak_bytes
    if not options:
        report = planner.verify(OfTheHead(), (x,), plan=plans[1], repeats=0)
        assert report.ok, report.problems
        assert report.measured_dynamic_peak_bytes == plans[1].predicted.dynamic_peak_bytes
