"""How programs that Inductor emits for a plan lay tensors out."""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner.verification.measure import measure_peak
from tests.inductor.test_inductor_memory import without_recomputation


def test_convolutions_keep_the_layouts_of_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3))
    emitted, single = without_recomputation(model, torch.randn(2, 8, 8, 8))
    assert emitted <= single
    told, _ = without_recomputation(model, torch.randn(2, 8, 8, 8), layout_optimization=True)
    assert told > emitted


class Normalised(nn.Module):
    """Convolutions with batch normalisation, and a sum around two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3 if not i else 16, 16, 3, padding=1) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(x)).relu()
            x = x + y if i else y
        return x.square().mean()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("told", "budget"), [(True, "min"), (False, "1GiB")], ids=["Inductor's", "the model's"]
)
def test_with_the_same_layouts_buffers_are_those_of_torch_compile(budget: str, told: bool) -> None:
    torch.manual_seed(0)
    model, images = Normalised(), torch.randn(8, 3, 24, 24)
    unplanned: Any = torch.compile(copy.deepcopy(model), options={"layout_optimization": told})
    unplanned(images).backward()

    options: Any = {"backend": "inductor"}  # which keeps the model's unless it is told otherwise
    if told:
        options["backend_options"] = {"layout_optimization": True}
    plan = planner.plan(model, images, budget=budget, **options)
    plan.apply(model)
    model(images).backward()
    expected = dict(unplanned._orig_mod.named_buffers())
    assert all(torch.equal(buffer, expected[name]) for name, buffer in model.named_buffers())

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss: torch.Tensor = model(images)
        loss.backward()
        return loss

    model.zero_grad(set_to_none=True)
    assert measure_peak(step, "cpu").peak_bytes == plan.predicted.dynamic_peak_bytes
