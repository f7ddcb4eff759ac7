"""Training loops with autocast, scaled or accumulated gradients, with and without a plan.

What they leave is equal bit for bit.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn

from planner.errors import PlanWarning
from planner.verification.measure import measure_peak
from tests.side_by_side import (
    Layers,
    assert_same,
    assert_trains_alike,
    layers,
    left_by,
    plan_of,
    steps,
)
from tests.small import small_resnet


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_gradient_scaler(dtype: torch.dtype) -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        # So large that the first step overflows in half precision and is skipped.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
        left: list[Any] = []
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = model(*args)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            left.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
            left += [loss, scaler.get_scale()]
        return left

    assert_trains_alike(model, args, loop, expected_runs=4, autocast=dtype)


@pytest.mark.heavy
def test_autocast_inside_the_model() -> None:
    class Inside(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    model, args, _ = layers(Inside)
    assert_trains_alike(model, args, steps(args), expected_runs=2)


class Shared(Layers):
    """Weights that are used several times: by autocast, which casts once a region, and by explicit casts."""

    def __init__(self) -> None:
        super().__init__(3)
        self.layers[2][0].weight = self.layers[0][0].weight
        self.extra = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run(self.extra(torch.tanh(self.extra(x))))
        for _ in range(2):
            x = x.bfloat16() @ self.extra.weight.to(torch.bfloat16)
        return x.square().mean()


class SharedInside(Shared):
    """The same in two regions of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                x = self.extra(torch.tanh(self.extra(x)))
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class PartlyInSingle(Layers):
    """Of which a part is in single precision, whatever region of autocast is around."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        with torch.autocast("cpu", enabled=False):
            x = x + self.layers[1](x.float())
        return x.square().mean()


def test_backward_is_not_under_autocast_though_the_forward_is() -> None:
    model, args, _ = layers(PartlyInSingle)

    def step(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = model(*args)
        loss.backward()
        return loss

    assert_trains_alike(model, args, lambda m: [step(m)], expected_runs=1, autocast=torch.bfloat16)


@pytest.mark.parametrize("build", [PartlyInSingle, Layers])
def test_a_backward_under_autocast_warns_where_that_would_cast(build: type[Layers]) -> None:
    model, args, _ = layers(build)

    def step(model: nn.Module) -> dict[str, Any]:
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            model(*args).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    eager = step(copy.deepcopy(model))
    with torch.autocast("cpu", torch.bfloat16):
        plan = plan_of(model, args)
    plan.apply(model)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        planned = step(model)
    assert any("inside a region of autocast" in str(w.message) for w in warned) is (build is PartlyInSingle)
    if build is Layers:
        assert_same(planned, eager)


class BreaksBelow(nn.Module):
    """A graph breaks in a part, so that the region around it is not in any graph."""

    class Part(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            torch._dynamo.graph_break()
            return self.layers[1](x).square().mean()

    def __init__(self) -> None:
        super().__init__()
        self.part = self.Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = self.part(x)
        return loss


@pytest.mark.heavy
def test_a_region_of_autocast_that_is_in_no_graph_is_around_those_that_it_is_around() -> None:
    model, args, _ = layers(BreaksBelow)
    plan = assert_trains_alike(model, args, steps(args), expected_runs=4)
    assert "aten._to_copy.default" in {op.name for graph in plan.graphs for op in graph.ops}


@pytest.mark.heavy
def test_weights_that_are_used_twice_under_autocast() -> None:
    model, args, _ = layers(Shared)

    def step(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = model(*args)
        loss.backward()
        return loss

    plan = assert_trains_alike(
        model, args, lambda m: [step(m), step(m)], expected_runs=2, autocast=torch.bfloat16
    )
    model.zero_grad()
    assert measure_peak(lambda: step(model), "cpu").peak_bytes == plan.predicted.dynamic_peak_bytes
    casts = [op for op in plan.graphs[0].ops if op.name == "aten._to_copy.default" and op.phase == "forward"]
    # A weight and a bias of the shared layer, and two explicit casts of its weight.
    assert sum(op.module == "extra" for op in casts) == 3  # and its input


@pytest.mark.heavy
def test_weights_that_are_used_twice_in_regions_of_the_model() -> None:
    model, args, _ = layers(SharedInside)
    assert_trains_alike(model, args, steps(args), expected_runs=2)


@pytest.mark.heavy
def test_autocast_that_the_plan_does_not_know_is_said_and_right() -> None:
    model, args, _ = layers()
    twin = copy.deepcopy(model)
    plan_of(model, args).apply(model)

    def loop(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = model(*args)
        loss.backward()
        return loss

    with pytest.warns(PlanWarning, match="off then, cpu:bfloat16 now"):
        ours = left_by(model, loop)
    assert_same(ours, left_by(twin, loop))


@pytest.mark.heavy
def test_accumulation_with_clipping_and_both_kinds_of_zero_grad() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[Any]:
        optimizer, left = torch.optim.AdamW(model.parameters(), 1e-2), []
        for set_to_none in (True, False, False):
            optimizer.zero_grad(set_to_none=set_to_none)
            for part in args[0].chunk(2):
                loss = model(part) / 2
                loss.backward()
                left.append(loss)
            left.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
        return left

    assert_trains_alike(model, (args[0][:32],), loop, expected_runs=6)


@pytest.mark.heavy
def test_accumulation_in_a_convolutional_net_updates_statistics_as_often_as_eager() -> None:
    model, args, _ = small_resnet()

    def loop(model: nn.Module) -> list[Any]:
        left = []
        for shift in range(3):
            loss = model(args[0] + shift, args[1]) / 3
            loss.backward()
            left.append(loss)
        return left

    assert_trains_alike(model, args, loop, expected_runs=3)
