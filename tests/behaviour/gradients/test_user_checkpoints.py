"""Checkpoints that models have inside when they are planned."""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import planner
from planner.runtime.install import installed_plan
from tests.side_by_side import (
    Layers,
    assert_same,
    assert_trains_alike,
    layers,
    left_by,
    no_plan_warnings,
    peak_of,
    plan_of,
    steps,
    trains_alike,
)


class Checkpointed(Layers):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


class CheckpointedReentrant(Checkpointed):
    reentrant = True


@pytest.mark.heavy
@pytest.mark.parametrize(
    "build", [Checkpointed, pytest.param(CheckpointedReentrant, marks=pytest.mark.heavy)]
)
def test_checkpoints_of_the_user_are_seen_through(build: type[Layers]) -> None:
    model, plan = trains_alike(build)
    (note,) = [n for n in plan.notes if "checkpoint" in n]
    assert "captured like any code" in note
    assert peak_of(model, layers()[1]) == plan.predicted.dynamic_peak_bytes
    # The plan may also keep what the user recomputes.
    free = plan_of(layers(build)[0], layers()[1], budget="500%", solver="none")
    assert not free.graphs[0].recomputed
    assert free.predicted.seconds < plan.predicted.seconds


@pytest.mark.heavy
@pytest.mark.parametrize("build", [Checkpointed, CheckpointedReentrant])
def test_the_unplanned_step_with_checkpoints_of_the_user_is_predicted(build: type[Layers]) -> None:
    model, args, _ = layers(build)
    plan = plan_of(model, args)
    # The states of the generator that each checkpoint saves count as well, and nothing outlives its use.
    assert peak_of(model, args) == plan.baseline.dynamic_peak_bytes


@pytest.mark.heavy
def test_checkpointed_sequences_that_cannot_be_seen_through_stay() -> None:
    class Sequence(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(list(self.layers), 2, x, use_reentrant=False).square().mean()

    model, args, _ = layers(Sequence)
    twin = copy.deepcopy(model)
    plan = plan_of(model, args)
    plan.apply(model)
    assert_same(left_by(model, steps(args)), left_by(twin, steps(args)))
    assert peak_of(model, args) <= 1.05 * plan.predicted.dynamic_peak_bytes


@pytest.mark.graphs
@pytest.mark.heavy
def test_gradient_checkpointing_of_hugging_face_is_seen_through() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 60, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).train()
    model.gradient_checkpointing_enable()
    words = torch.randint(0, 60, (8, 32))
    kwargs = {"input_ids": words, "labels": words, "use_cache": False}

    def loop(model: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**kwargs).loss
        loss.backward()
        return loss

    plan = assert_trains_alike(model, (), loop, expected_runs=lambda plan: len(plan.graphs), kwargs=kwargs)
    assert any("2 calls of torch.utils.checkpoint" in note for note in plan.notes)


@pytest.mark.heavy
def test_a_planned_module_inside_a_checkpoint_of_the_user() -> None:
    model, args, _ = layers()
    before = nn.Linear(32, 32)

    def loop(model: nn.Module) -> list[Any]:
        before.zero_grad()
        loss = checkpoint(model, before(*args), use_reentrant=False)
        loss.backward()
        return [loss, before.weight.grad]

    x = args[0].requires_grad_()
    assert_trains_alike(model, (x,), loop, expected_runs=1)


@pytest.mark.heavy
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_module_that_is_planned_inside_a_checkpoint_of_the_user(use_reentrant: bool) -> None:
    model, (x,), _ = layers()
    twin = copy.deepcopy(model)

    def loop(model: nn.Module) -> list[Any]:
        losses = []
        for _ in range(2):
            losses.append(checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant))
            losses[-1].backward()
        return losses

    planner.auto_checkpoint(model, budget="min", solver="sqrt_n", accumulate=True)
    with no_plan_warnings():
        ours = left_by(model, loop)
    assert installed_plan(model) is not None
    assert_same(ours, left_by(twin, loop))


class DrawsOthers(Layers):
    """Its second layer draws other numbers in the backward than in the forward, without a plan."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i == 1:
                x = x + checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = x + layer(x)
        return x.square().mean()


@pytest.mark.heavy
def test_a_checkpoint_that_draws_other_numbers_in_the_backward_runs_as_it_is() -> None:
    _, plan = trains_alike(DrawsOthers, expected_runs=None)
    assert plan.coverage != "one-graph"
    model, args, _ = layers(DrawsOthers)
    for layer in model.layers:  # type: ignore[union-attr]
        layer[2].p = 0.0  # type: ignore[index]
    assert plan_of(model, args).coverage == "one-graph"  # nothing is drawn
