"""Training loops that call several models or one several times, or change them; with and without a plan.

What they leave is equal bit for bit.
"""

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner.errors import PlanWarning
from planner.runtime.install import installed_plan
from tests.side_by_side import (
    assert_same,
    assert_trains_alike,
    counting_runs,
    layers,
    left_by,
    no_plan_warnings,
    plan_of,
    step_of,
)


@pytest.mark.heavy
def test_forwards_without_gradients_and_in_eval_mode_in_between() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[torch.Tensor]:
        first = model(*args)
        with torch.no_grad():
            silent = model(*args)
        model.eval()
        evaluated = model(*args)
        model.train()
        second = model(*args)
        with warnings.catch_warnings():  # what was computed in evaluation mode is trained without the plan
            warnings.filterwarnings("ignore", "the plan is for training mode", PlanWarning)
            (first + second + evaluated).backward()
        return [first, silent, evaluated, second]

    assert_trains_alike(model, args, loop, expected_runs=2)


@pytest.mark.heavy
def test_one_module_called_twice_in_a_step() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = model(*args) * model(args[0] + 1)
        loss.backward()
        return loss

    assert_trains_alike(model, args, loop, expected_runs=2)


@pytest.mark.heavy
def test_one_plan_on_two_instances() -> None:
    (model, args, _), (other, _, _) = layers(), layers(seed=3)
    twins = [copy.deepcopy(model), copy.deepcopy(other)]
    plan = plan_of(model, args)
    plan.apply(model)
    plan.apply(other)

    def loop(models: Sequence[nn.Module]) -> torch.Tensor:
        loss: torch.Tensor = models[0](*args) * models[1](*args)
        loss.backward()
        planned = models[0](*args)
        planned.backward()
        return loss + planned

    with counting_runs() as runs, no_plan_warnings():
        ours = left_by([model, other], loop)
    assert runs.backward == 3
    assert_same(ours, left_by(twins, loop))
    planner.remove(model)
    assert installed_plan(other) is plan


@pytest.mark.heavy
def test_a_generator_and_a_discriminator() -> None:
    def network(wide_in: int, wide_out: int) -> nn.Module:
        body = [nn.Linear(wide_in, 64), nn.LeakyReLU(0.2, inplace=True), nn.BatchNorm1d(64)]
        more = [nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, wide_out)]
        return nn.Sequential(*body, *more)

    torch.manual_seed(0)
    models, real = [network(8, 16), network(16, 1)], torch.randn(64, 16)
    twins = copy.deepcopy(models)
    planner.auto_checkpoint(models[0], (torch.randn(64, 8),), budget="min", solver="sqrt_n")
    planner.auto_checkpoint(models[1], (real.clone().requires_grad_(),), budget="min", solver="sqrt_n")
    judge = F.binary_cross_entropy_with_logits

    def loop(models: Sequence[nn.Module]) -> list[torch.Tensor]:
        generator, discriminator = models
        optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in models]
        yes, no, losses = torch.ones(64, 1), torch.zeros(64, 1), []
        for _ in range(2):
            fake = generator(torch.randn(64, 8))
            optimizers[1].zero_grad()
            losses.append(judge(discriminator(real), yes) + judge(discriminator(fake.detach()), no))
            losses[-1].backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            losses.append(judge(discriminator(fake), yes))
            losses[-1].backward()
            optimizers[0].step()
        return losses

    with counting_runs() as runs, no_plan_warnings():
        ours = left_by(models, loop)
    assert runs.backward == 2 * (2 + 2)
    assert_same(ours, left_by(twins, loop))


@pytest.mark.heavy
def test_an_average_of_weights_kept_in_a_copy() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[torch.Tensor]:
        average = copy.deepcopy(model).eval().requires_grad_(False)
        optimizer, left = torch.optim.SGD(model.parameters(), 0.1), []
        for _ in range(2):
            optimizer.zero_grad()
            left.append(step_of(model, args))
            optimizer.step()
            with torch.no_grad():
                for smooth, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    smooth.lerp_(parameter, 0.1)
            left.append(average(*args))
        return left

    assert_trains_alike(model, args, loop, expected_runs=2)


@pytest.mark.heavy
def test_generating_between_training_steps() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 60, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).train()
    words = torch.randint(0, 60, (8, 32))
    kwargs = {"input_ids": words, "labels": words, "use_cache": False}

    def loop(model: Any) -> list[Any]:
        left = []
        for _ in range(2):
            left.append(model(**kwargs).loss)
            left[-1].backward()
            for mode, sampled in ((True, True), (False, False)):
                model.train(mode)
                prompt = words[:2, :4]
                left.append(model.generate(prompt, max_new_tokens=4, do_sample=sampled, pad_token_id=0))
            model.train()
        return left

    plan = plan_of(copy.deepcopy(model), (), kwargs=kwargs)
    assert_trains_alike(model, (), loop, expected_runs=2 * len(plan.graphs), kwargs=kwargs)


@pytest.mark.heavy
def test_new_weights_and_a_trip_to_another_device() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[torch.Tensor]:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        left = [step_of(model, args)]
        torch.optim.SGD(model.parameters(), 0.1).step()
        model.load_state_dict(state)
        left.append(step_of(model, args))
        model.load_state_dict({name: 2 * value for name, value in state.items()}, assign=True)
        left.append(step_of(model, args))
        model.zero_grad()
        model.to("meta").to_empty(device="cpu").float()
        model.load_state_dict(state)
        left.append(step_of(model, args))
        return left

    assert_trains_alike(model, args, loop, expected_runs=4)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_after_apply_is_said_and_right(dtype: torch.dtype) -> None:
    model, args, _ = layers()
    twin = copy.deepcopy(model)
    plan = plan_of(model, args)
    plan.apply(model)

    def loop(model: nn.Module) -> torch.Tensor:
        return step_of(model.to(dtype), (args[0].to(dtype),))

    larger = pytest.warns(PlanWarning, match="larger than|operations produce")
    with counting_runs() as runs, larger if dtype is torch.float64 else no_plan_warnings():
        ours = left_by(model, loop)
    assert runs.backward == 1
    assert_same(ours, left_by(twin, loop))
