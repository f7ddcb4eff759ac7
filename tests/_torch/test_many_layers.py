"""How much Dynamo does for each of many layers."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.builder import VariableBuilder

import planner
from planner._torch.tracing.breaks.many_layers import _are_marked
from planner.capture.capture import capture
from planner.training_step.regions import find_regions
from planner.training_step.step import Step


class Layers(nn.Module):
    """Loops over part of a list of layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(layers + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        return x.square().mean()


def counts(layers: int) -> tuple[int, int]:
    """How many instructions are followed, and tensors marked, where there are so many layers."""
    model, called = Layers(layers), Counter[str]()

    def counted(owner: type, name: str) -> Callable[..., Any]:
        call = getattr(owner, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            called[name] += 1
            return call(*args, **kwargs)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((InstructionTranslatorBase, "step"), (VariableBuilder, "mark_static_input")):
            patch.setattr(owner, name, counted(owner, name))
        capture(model, Step((torch.randn(2, 4),)), regions=find_regions(model, "auto"))
    return called["step"], called["mark_static_input"]


def test_dynamo_does_little_for_one_layer_more() -> None:
    fewer, more = counts(20), counts(40)
    assert more[0] == fewer[0]
    assert more[1] - fewer[1] <= 20 * 2 * 3  # parameters, and modules that they are found in


def test_part_of_a_list_that_is_kept_is_a_list_of_modules() -> None:
    class Kept(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            part = self.layers[1:3]
            assert isinstance(part, nn.ModuleList)
            for layer in part[::-1]:
                x = layer(x)
            return x.square().mean()

    model, x = Kept(4), torch.randn(2, 4)
    model(x).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    plan = planner.plan(model, (x,), budget="100%", regions="auto")
    plan.apply(model)
    model(x).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad is None and gradient is None) or torch.equal(parameter.grad, gradient)


def test_all_parameters_and_buffers_have_to_be_marked() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    references = [weakref.ref(part) for part in module]
    assert not _are_marked(references)
    for tensor in (*module.parameters(), *module.buffers()):
        torch._dynamo.mark_static_address(tensor, guard=False)
    assert _are_marked(references)

    kept, module[0].weight = module[0].weight, nn.Parameter(torch.zeros(2, 2))
    assert not _are_marked(references)
    module[0].weight = kept
    assert _are_marked(references)

    torch._dynamo.mark_static_address(module[1].running_mean, guard=True)
    assert not _are_marked(references)
    torch._dynamo.mark_static_address(module[1].running_mean, guard=False)
    assert _are_marked(references)

    del module[1]
    assert not _are_marked(references)
