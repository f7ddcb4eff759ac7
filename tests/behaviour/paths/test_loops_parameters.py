"""Training loops in which some parameters train, or are tied, computed or changed by hooks.

What they leave is equal bit for bit.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from planner.errors import PlanWarning
from planner.verification.measure import measure_peak
from tests.side_by_side import (
    Layers,
    assert_same,
    assert_trains_alike,
    counting_runs,
    layers,
    left_by,
    no_plan_warnings,
    plan_of,
    step_of,
    steps,
)
from tests.small import small_gpt


class LoRA(nn.Module):
    """A frozen linear layer and a trainable correction of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(F.dropout(x, 0.1, self.training)))


@pytest.mark.heavy
def test_lora_in_a_frozen_transformer() -> None:
    model, args, _ = small_gpt()
    model.requires_grad_(False)
    for block in model.blocks:  # type: ignore[union-attr]
        block.query_key_value = LoRA(block.query_key_value)
    plan = assert_trains_alike(model, args, steps(args), expected_runs=2)
    model.zero_grad(set_to_none=True)
    assert measure_peak(lambda: step_of(model, args), "cpu").peak_bytes == plan.predicted.dynamic_peak_bytes


@pytest.mark.heavy
def test_layers_that_are_frozen_and_thawed_after_apply_follow_the_plan() -> None:
    model, args, _ = layers()
    peaks = []

    def loop(model: nn.Module) -> list[Any]:
        left = []
        for frozen in ([], [0, 1], [1, 2], []):
            for i, layer in enumerate(model.layers):
                layer.requires_grad_(i not in frozen)
            for _ in range(2):
                model.zero_grad()
                left.append(model(*args))
                left[-1].backward()
            left.append([p.grad for p in model.parameters()])
            model.zero_grad()
            with torch.random.fork_rng():
                peaks.append(measure_peak(lambda: step_of(model, args), "cpu").peak_bytes)
        return left

    plan = assert_trains_alike(model, args, loop, expected_runs=12)
    planned = peaks[: len(peaks) // 2]
    assert planned[0] == planned[-1] == plan.predicted.dynamic_peak_bytes
    assert max(planned) == planned[0]


@pytest.mark.heavy
def test_thawing_what_the_plan_saw_frozen_is_said_and_right() -> None:
    model, args, _ = layers()
    model.layers[0].requires_grad_(False)  # type: ignore[index, union-attr]
    twin = copy.deepcopy(model)
    plan = plan_of(model, args)
    plan.apply(model)
    for network in (model, twin):
        network.requires_grad_(True)
    with pytest.warns(PlanWarning, match=f"re-runs the {len(plan.graphs[0].recomputed)} that are there"):
        ours = left_by(model, steps(args))
    assert_same(ours, left_by(twin, steps(args)))


@pytest.mark.heavy
def test_nothing_left_to_train() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[Any]:
        model.requires_grad_(False)
        without = model(*args)
        model.requires_grad_(True)
        loss = model(*args)
        loss.backward()
        return [without, without.requires_grad, loss]

    assert_trains_alike(model, args, loop, expected_runs=1)


@pytest.mark.heavy
def test_tied_weights() -> None:
    class Tied(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(30, 32)
            self.layers[3][0].weight = self.layers[1][0].weight

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.run(self.words(words)) @ self.words.weight.T, words)

    torch.manual_seed(0)
    model, args = Tied(), (torch.randint(0, 30, (64,)),)
    assert_trains_alike(model, args, steps(args), expected_runs=2)


@pytest.mark.heavy
def test_parametrizations_and_their_buffers() -> None:
    norms = torch.nn.utils.parametrizations

    class Normed(Layers):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                norms.weight_norm(layer[0])
                norms.spectral_norm(layer[3])

    model, args, _ = layers(Normed)
    assert_trains_alike(model, args, steps(args, 3), expected_runs=3)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weight_norm_and_spectral_norm_by_hooks() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Layers()
        for layer in model.layers:
            torch.nn.utils.weight_norm(layer[0])
            torch.nn.utils.spectral_norm(layer[3])
        return model

    model, twin, args = build(), build(), layers()[1]  # such models cannot be copied
    plan_of(model, args).apply(model)
    with counting_runs() as runs, no_plan_warnings():
        ours = left_by(model, steps(args, 3))
    assert runs.backward == 3
    assert_same(ours, left_by(twin, steps(args, 3)))


@pytest.mark.heavy
def test_an_optimizer_that_steps_inside_backward() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[torch.Tensor]:
        optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        losses = [step_of(model, args) for _ in range(3)]
        for hook in hooks:
            hook.remove()
        assert all(p.grad is None for p in model.parameters())
        return losses

    assert_trains_alike(model, args, loop, expected_runs=3)


@pytest.mark.heavy
def test_hooks_on_parameters_change_gradients() -> None:
    def hook(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))

    model, args, _ = layers()
    assert_trains_alike(model, args, steps(args), expected_runs=2, prepare=hook)
    assert max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None) <= 1e-4
