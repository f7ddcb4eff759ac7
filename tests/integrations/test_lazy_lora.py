"""LoRA by PEFT, injected before or after a model is set to plan at its first training call."""

import copy

import pytest
import torch
import torch.nn as nn
from peft import LoraConfig, get_peft_model

import planner
from planner.runtime.install import installed_plan
from tests.side_by_side import Layers, assert_same, left_by, no_plan_warnings


def _train(model: nn.Module) -> None:
    for size in (64, 32):
        model(torch.ones(size, 32)).backward()


@pytest.mark.heavy
@pytest.mark.parametrize("planned_first", [False, True])
def test_lora(planned_first: bool) -> None:
    torch.manual_seed(0)
    base = Layers(2)
    config = LoraConfig(target_modules=r"layers\.\d+\.[03]", r=2)
    torch.manual_seed(1)
    twin = get_peft_model(copy.deepcopy(base), config)
    if planned_first:
        planner.auto_checkpoint(base, budget="min", solver="sqrt_n", accumulate=True)
    torch.manual_seed(1)
    model = get_peft_model(base, config)
    if not planned_first:
        planner.auto_checkpoint(model, budget="min", solver="sqrt_n", accumulate=True)
    with no_plan_warnings():
        ours = left_by(model, _train)
    assert_same(ours, left_by(twin, _train))
    assert installed_plan(base if planned_first else model) is not None
