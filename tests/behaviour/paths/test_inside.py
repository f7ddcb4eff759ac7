"""What models already have inside when they are planned: it keeps working, and is said where it matters."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner.errors import PlanWarning
from tests import side_by_side
from tests.side_by_side import (
    assert_same,
    assert_trains_alike,
    counting_runs,
    layers,
    left_by,
    no_plan_warnings,
    peak_of,
    plan_of,
    steps,
    trains_alike,
)


class Layers(side_by_side.Layers):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__(2)


# ---- hooks ------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_forward_hooks_on_submodules_change_what_is_computed() -> None:
    def hooked() -> nn.Module:
        model = Layers()
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda _module, args: (args[0] + 0.1,))
            layer.register_forward_hook(lambda _module, _args, output: output * 1.5)
        return model

    trains_alike(hooked)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["after", "before"])
def test_backward_hooks_on_submodules_change_gradients(kind: str) -> None:
    def hooked() -> nn.Module:
        model = Layers()
        for layer in model.layers[1:]:
            if kind == "after":
                layer.register_full_backward_hook(lambda _module, gradients, _: (gradients[0] * 2,))
            else:
                layer.register_full_backward_pre_hook(lambda _module, gradients: (gradients[0] * 2,))
        return model

    model, args, _ = layers(hooked)
    plan = assert_trains_alike(model, args, steps(args), expected_runs=None)
    assert peak_of(model, args) <= 1.1 * plan.predicted.dynamic_peak_bytes


@pytest.mark.heavy
def test_hooks_on_tensors_inside_the_forward_change_gradients() -> None:
    class Hooked(Layers):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
                x.register_hook(lambda gradient: gradient * 2)
            return x

    trains_alike(Hooked)


@pytest.mark.heavy
def test_planning_leaves_alone_what_hooks_write_to() -> None:
    model, args, _ = layers(Layers)
    seen: list[torch.Tensor] = []
    for layer in model.layers:  # type: ignore[union-attr]
        layer.register_forward_hook(lambda _module, _args, output: seen.append(output.detach().mean()))
    plan = plan_of(model, args)
    assert not seen
    twin = copy.deepcopy(model)
    plan.apply(model)
    ours = left_by(model, steps(args))
    logged = list(seen)
    assert len(logged) == 4
    seen.clear()
    assert_same(ours, left_by(twin, steps(args)))
    assert [float(x) for x in logged] == [float(x) for x in seen]


# ---- changes in place -------------------------------------------------------------------------------


@pytest.mark.heavy
def test_operations_in_place() -> None:
    class InPlace(Layers):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                y = layer(x)
                y.mul_(0.5).add_(x)
                y[:, :4] = 0
                x = F.relu(y, inplace=True)
            return x

    trains_alike(InPlace)


@pytest.mark.heavy
def test_an_input_that_the_forward_changes() -> None:
    class Changing(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(0.9)
            return super().forward(x)

    model, args, _ = layers(Changing)

    def loop(model: nn.Module) -> list[torch.Tensor]:
        x = args[0].clone()
        losses = []
        for _ in range(2):
            losses.append(model(x))
            losses[-1].backward()
        return [*losses, x]

    before = args[0].clone()
    assert_trains_alike(model, args, loop, expected_runs=2)
    assert torch.equal(args[0], before)


@pytest.mark.heavy
def test_a_buffer_that_the_forward_changes() -> None:
    class Averaging(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(32))

        def run(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x) * (self.average + 1)  # which a second run would find changed
                with torch.no_grad():
                    self.average.lerp_(x.mean(0), 0.1)
                x = x + self.average.clone()
            return x

    model, _ = trains_alike(Averaging)
    assert model.average.any()  # type: ignore[operator, union-attr]


# ---- Python state and Python randomness -------------------------------------------------------------


class Dropped(Layers):
    """Leaves out layers by chance."""

    def draw(self) -> bool:
        raise NotImplementedError

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.draw():
                x = x + layer(x)
        return x + sum(layer[0].bias.sum() for layer in self.layers)


class DroppedByPython(Dropped):
    def draw(self) -> bool:
        return random.random() < 0.5


class DroppedByNumPy(Dropped):
    def draw(self) -> bool:
        return bool(np.random.rand() < 0.5)


class DroppedByTorch(Dropped):
    def draw(self) -> bool:
        return bool(torch.rand(()) < 0.5)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
@pytest.mark.parametrize("build", [DroppedByPython, DroppedByNumPy, DroppedByTorch])
def test_layers_that_are_left_out_by_chance(build: type[Dropped]) -> None:
    model, args, _ = layers(build)
    twin = copy.deepcopy(model)
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    plan = plan_of(model, args)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), np.random.get_state()[2]) == generators[1:]
    plan.apply(model)
    ours, theirs = left_by(model, steps(args, 6, lr=0.01)), left_by(twin, steps(args, 6, lr=0.01))
    assert_same(ours, theirs)
    drawn = {sum(g is None for n, g in theirs.items() if ".gradient." in n)}
    assert drawn


@pytest.mark.heavy
def test_numbers_that_the_forward_draws_are_drawn_anew() -> None:
    class Scaled(Layers):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x) * random.uniform(0.5, 1.0)
            return x

    trains_alike(Scaled)


@pytest.mark.heavy
@pytest.mark.parametrize("used", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_a_counter_in_the_forward(used: bool) -> None:
    class Counting(Layers):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            loss = super().forward(x)
            return loss / self.calls if used else loss

    model, args, _ = layers(Counting)
    model.calls = 3  # type: ignore[assignment]
    twin = copy.deepcopy(model)
    plan = plan_of(model, args)
    assert model.calls == 3
    plan.apply(model)
    with counting_runs() as runs, no_plan_warnings():
        ours = left_by(model, steps(args, 6))
    assert_same(ours, left_by(twin, steps(args, 6)))
    assert model.calls == twin.calls == 9
    assert runs.backward == 6
    assert runs.captures <= 2


@pytest.mark.heavy
def test_a_history_that_the_forward_keeps() -> None:
    class Remembering(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = super().forward(x)
            self.history.append(loss.detach())
            return loss

    model, args, _ = layers(Remembering)
    twin = copy.deepcopy(model)
    plan_of(model, args).apply(model)
    assert not model.history
    assert_same(left_by(model, steps(args)), left_by(twin, steps(args)))
    assert [float(x) for x in model.history] == [float(x) for x in twin.history]  # type: ignore[union-attr]


@pytest.mark.heavy
def test_a_cache_that_the_first_forward_fills() -> None:
    class Caching(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[int, torch.Tensor] = {}

        def run(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) not in self.cache:
                self.cache[len(x)] = torch.linspace(0, 1, len(x)).unsqueeze(1)
            for layer in self.layers:
                x = x + layer(x) * self.cache[len(x)]
            return x

    model, args, _ = layers(Caching)
    twin = copy.deepcopy(model)
    plan = plan_of(model, args)
    assert not model.cache
    plan.apply(model)
    with pytest.warns(PlanWarning, match="as first forwards do .* the next is captured again"):
        ours = left_by(model, steps(args))
    assert_same(ours, left_by(twin, steps(args)))
    # From the second step on it is what was planned.
    assert peak_of(model, args) == plan.predicted.dynamic_peak_bytes


@pytest.mark.heavy
def test_a_value_that_the_forward_prints_and_one_that_it_branches_on() -> None:
    class Branching(Layers):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                x = x + layer(x)
                if i == 0:
                    self.seen = float(x.mean())
            return 2 * x if x.square().mean().item() < 100 else x

    model, args, _ = layers(Branching)
    assert_trains_alike(model, args, steps(args), expected_runs=lambda plan: 2 * len(plan.graphs))


@pytest.mark.heavy
def test_function_transforms_run_the_original() -> None:
    model, args, _ = layers(Layers)
    model.eval()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    twin = copy.deepcopy(model)
    plan_of(model, args).apply(model)

    def loop(model: nn.Module) -> dict[str, torch.Tensor]:
        parameters = {n: p.detach() for n, p in model.named_parameters()}
        found: dict[str, torch.Tensor] = torch.func.grad(
            lambda p: torch.func.functional_call(model, p, args)
        )(parameters)
        return found

    assert_same(left_by(model, loop), left_by(twin, loop))
    planner.remove(model)
