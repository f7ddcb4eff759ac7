"""What users care about: trained weights are the same, bit for bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import planner
from tests.small import Built, small_gpt, small_resnet


def _train(
    model: torch.nn.Module, args: tuple[Any, ...], optimizer: Callable[..., Any], steps: int = 2
) -> None:
    torch.manual_seed(7)
    chosen = optimizer(model.parameters())
    for _ in range(steps):
        chosen.zero_grad()
        model(*args).backward()
        chosen.step()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}


@pytest.mark.heavy
@pytest.mark.parametrize(("builder", "optimizer"), [(small_gpt, "adamw"), (small_resnet, "sgd")])
def test_two_steps_give_the_same_weights_and_buffers(builder: Callable[[], Built], optimizer: str) -> None:
    model, args, kwargs = builder()
    twin = copy.deepcopy(model)
    planner.auto_checkpoint(model, args, kwargs, budget="min", solver="sqrt_n")
    _train(model, args, OPTIMIZERS[optimizer])
    after = torch.get_rng_state()
    _train(twin, args, OPTIMIZERS[optimizer])
    assert torch.equal(torch.get_rng_state(), after)
    assert list(model.state_dict()) == list(twin.state_dict())
    for (name, ours), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.heavy
def test_batch_norm_statistics_are_updated_once() -> None:
    model, args, kwargs = small_resnet()
    plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
    assert any("batch_norm" in plan.graphs[0].ops[i].name for i in plan.graphs[0].recomputed)
    plan.apply(model)
    model(*args).backward()
    counted = [b for n, b in model.named_buffers() if n.endswith("num_batches_tracked")]
    assert counted
    assert all(int(c) == 1 for c in counted)


@pytest.mark.heavy
def test_gradients_accumulate() -> None:
    model, args, kwargs = small_gpt()
    twin = copy.deepcopy(model)
    planner.auto_checkpoint(model, args, kwargs, budget="min", solver="sqrt_n")
    for network in (model, twin):
        torch.manual_seed(3)
        network(*args).backward()
        network(*args).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("optimizer", "copies"), [(torch.optim.SGD, 0), ("AdamW", 2)])
@pytest.mark.heavy
def test_optimizer_state_counts_as_resident(optimizer: Any, copies: int) -> None:
    model, args, kwargs = small_gpt()
    plan = planner.plan(model, args, kwargs, budget="500%", optimizer=optimizer, solver="none")
    parameters = sum(p.nbytes for p in model.parameters())
    extra = plan.resident.optimizer_bytes - copies * parameters
    assert 0 <= extra <= 8 * len(list(model.parameters()))  # step counters
    assert plan.predicted.resident_bytes == plan.resident.total
    # The profiler's marks around an optimizer's step are no operations whose workspace is not known.
    assert not [note for note in plan.notes if "could not be measured" in note]


@pytest.mark.heavy
def test_an_optimizer_instance_is_only_read() -> None:
    model, args, kwargs = small_gpt()
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = planner.plan(model, args, kwargs, budget="500%", optimizer=momentum, solver="none")
    assert plan.resident.optimizer_bytes == sum(p.nbytes for p in model.parameters())
    assert not momentum.state


@pytest.mark.heavy
@pytest.mark.parametrize("wrong", ["AdamWW", 3, torch.nn.Linear])
def test_what_is_no_optimizer_is_refused(wrong: Any) -> None:
    model, args, kwargs = small_gpt()
    with pytest.raises(planner.PlannerError, match="optimizer"):
        planner.plan(model, args, kwargs, budget="80%", optimizer=wrong)


@pytest.mark.heavy
def test_an_infeasible_budget_tells_the_least() -> None:
    model, args, kwargs = small_gpt()
    with pytest.raises(planner.InfeasibleBudget) as caught:
        planner.plan(model, args, kwargs, budget="5%", solver="sqrt_n")
    least = caught.value.minimum_bytes
    assert least > caught.value.budget_bytes
    plan = planner.plan(model, args, kwargs, budget=least, solver="sqrt_n")
    assert plan.predicted.peak_bytes <= least
    assert planner.verify(model, args, kwargs, plan=plan, repeats=0).ok


def test_an_unknown_solver_lists_the_known() -> None:
    model, args, kwargs = small_gpt()
    with pytest.raises(planner.PlannerError, match="sqrt_n"):
        planner.plan(model, args, kwargs, budget="80%", solver="magic")
