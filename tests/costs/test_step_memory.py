"""The whole training step: what is predicted of it is what three steps of real training take."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import planner
from planner.allocator.training_loop import step_allocations
from planner.costs.devices import find_device
from planner.costs.optimizer_step import (
    OF_ANOTHER_MODEL,
    OptimizerError,
    OptimizerStep,
    optimizer_step,
)
from planner.costs.step_memory import StepMemoryModel
from planner.module_parts import parameters_of
from planner.planfile.plan import Resident
from planner.user_plan import Plan
from planner.verification.measure import measure_peak
from tests.small import small_gpt, small_resnet
from tests.zoo import Built, build

MIB = 2**20


def training(built: Built, optimizer: torch.optim.Optimizer, steps: int, micro: int) -> Callable[[], None]:
    """Steps of so many micro-batches each, as a user writes them."""
    model, args, kwargs = built

    def train() -> None:
        for _ in range(steps):
            for _ in range(micro):
                out = model(*args, **kwargs)
                loss = out if isinstance(out, torch.Tensor) else out.loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return train


def measured_bytes(plan: Plan, built: Built, optimizer: torch.optim.Optimizer, micro: int = 2) -> int:
    """Peak of three steps with a plan in place, with what was there before them."""
    model, args, kwargs = built
    training((model, args, kwargs), torch.optim.SGD(model.parameters(), lr=0.0), 1, micro)()
    there = plan.resident.parameter_bytes + plan.resident.buffer_bytes + plan.resident.input_bytes
    return there + measure_peak(training(built, optimizer, 3, micro), "cpu").peak_bytes


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "budget"), [("bert", "60%")])
def test_three_steps_of_adamw_with_two_micro_batches(name: str, budget: str) -> None:
    built = build(name)
    model, args, kwargs = built
    optimizer = torch.optim.AdamW(model.parameters())
    plan = planner.plan(
        model, args, kwargs, budget=budget, optimizer=optimizer, accumulate=True, solver="chain"
    )
    plan.apply(model)
    assert plan.whole_step is not None
    measured = measured_bytes(plan, built, optimizer)
    assert measured == pytest.approx(plan.whole_step.allocated_bytes, rel=0.01)
    assert plan.target.budget_bytes is not None
    assert measured <= plan.target.budget_bytes


@pytest.mark.heavy
def test_where_the_optimizer_takes_most_its_step_is_the_peak() -> None:
    model, args, _ = small_gpt(batch=1)
    args = (args[0][:, :2], args[1][:, :2])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    plan = planner.plan(model, args, budget="400%", optimizer=optimizer, solver="none")
    plan.apply(model)
    whole = plan.whole_step
    assert whole is not None
    assert whole.optimizer_step_bytes > whole.forward_backward_bytes
    measured = measured_bytes(plan, (model, args, {}), optimizer, micro=1)
    assert measured == pytest.approx(whole.allocated_bytes, rel=0.01)


@pytest.mark.heavy
@pytest.mark.parametrize("build_small", [small_gpt, small_resnet])
def test_a_step_leaves_gradients_and_its_output(build_small: Callable[[], Built]) -> None:
    model, args, _ = build_small()
    plan = planner.plan(model, args, budget="400%", solver="none", accumulate=False)
    left = sum(p.nbytes for p in model.parameters()) + 4  # the loss
    for whole in (plan.whole_step, plan.baseline_whole_step):
        assert whole is not None
        assert whole.optimizer_step_bytes == plan.resident.total + left


@pytest.mark.heavy
def test_a_budget_below_the_optimizers_own_step_is_infeasible() -> None:
    model, args, _ = small_gpt(batch=1)
    args = (args[0][:, :2], args[1][:, :2])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    free = planner.plan(model, args, budget="400%", optimizer=optimizer, solver="none")
    assert free.whole_step is not None
    assert free.whole_step.optimizer_step_bytes > free.predicted.peak_bytes
    with pytest.raises(planner.InfeasibleBudget, match="optimizer's step") as caught:
        planner.plan(model, args, budget=free.predicted.peak_bytes, optimizer=optimizer, solver="none")
    assert caught.value.minimum_bytes == free.whole_step.optimizer_step_bytes


@pytest.mark.heavy
def test_accumulated_gradients_are_resident_and_added_to_in_place() -> None:
    model, args, _ = small_gpt()
    fresh = planner.plan(model, args, budget="400%", solver="none", accumulate=False)
    again = planner.plan(model, args, budget="400%", solver="none", accumulate=True)
    gradients = sum(p.nbytes for p in model.parameters())
    assert (fresh.resident.gradient_bytes, again.resident.gradient_bytes) == (0, gradients)
    model(*args).backward()
    for plan in (again, planner.plan(model, args, budget="400%", solver="none")):
        assert plan.resident.gradient_bytes == gradients
        # Unplanned, gradients are added one at a time as backward goes, and none is left over.
        eager = measure_peak(lambda: model(*args).backward(), "cpu")
        numbers = 8 * 4  # that autograd saves: a divisor in each layer's attention
        assert 0 <= eager.peak_bytes - plan.baseline.dynamic_peak_bytes <= numbers


PARAMETERS = ((300, 200), (7,), (1000,))
ELEMENTS = 300 * 200 + 7 + 1000


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(*s)) for s in PARAMETERS])


OPTIMIZERS: dict[str, tuple[Any, int, int]] = {
    # Floats an element: kept between steps, and held by a step of lists on top.
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), 0, 0),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1, 0),
    "weight decay": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, foreach=True), 0, 1),
    "adam": (torch.optim.Adam, 2, 1),
    "fused": (lambda p: torch.optim.AdamW(p, fused=True), 2, 0),
    "amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), 3, 1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_lists_on_a_gpu(name: str) -> None:
    make, kept, held = OPTIMIZERS[name]
    module = Module()
    gpu = replace(find_device("V100-32GB"), allocation_rounding_bytes=1)
    found = optimizer_step(make(module.parameters()), parameters_of(module), gpu)
    steps = 4 * len(PARAMETERS) if name == "fused" else 0  # counters that are on the device
    assert found.state_bytes == 4 * kept * ELEMENTS + steps
    assert found.transient_bytes == 4 * held * ELEMENTS


def test_one_parameter_at_a_time_holds_what_the_largest_needs() -> None:
    module = Module()
    found = optimizer_step(
        torch.optim.AdamW(module.parameters(), foreach=False), parameters_of(module), find_device("T4")
    )
    largest = -(-4 * 300 * 200 // 512) * 512
    assert largest <= found.transient_bytes <= 2 * largest + 1024


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["adam", "momentum", "amsgrad"])
def test_a_step_on_the_cpu_takes_what_is_predicted(name: str) -> None:
    module = Module()
    optimizer = OPTIMIZERS[name][0](module.parameters())
    predicted = optimizer_step(optimizer, parameters_of(module), find_device("cpu"))
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    first = measure_peak(optimizer.step, "cpu")
    second = measure_peak(optimizer.step, "cpu")
    assert first.final_bytes == predicted.state_bytes
    tiny = 64  # numbers that become tensors of one element
    assert max(first.peak_bytes - first.final_bytes, second.peak_bytes) == pytest.approx(
        predicted.transient_bytes, abs=tiny
    )


def test_settings_hooks_and_schedulers_of_an_instance_are_left_alone() -> None:
    module = Module()
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the user's hook ran"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = [p.detach().clone() for p in module.parameters()]
    found = optimizer_step(optimizer, parameters_of(module), find_device("cpu"))
    assert found.state_bytes >= 8 * ELEMENTS
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert all(p.grad is None for p in module.parameters())


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, whose parameters and state it has too."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.param_groups, self.state = base, base.param_groups, base.state

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class PassedOn(Wrapper):
    """As Accelerate's: it has nothing of its own."""

    param_groups = property(lambda self: self.base.param_groups, lambda self, value: self._set(value))
    state = property(lambda self: self.base.state, lambda self, value: setattr(self.base, "state", value))

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base

    def _set(self, value: Any) -> None:
        self.base.param_groups = value


class Counting(torch.optim.SGD):
    """Keeps lists of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.log: dict[str, list[int]] = {"steps": []}

    def step(self, closure: Any = None) -> Any:
        self.log["steps"].append(1)
        return super().step(closure)


@pytest.mark.parametrize("kind", [PassedOn, Wrapper])
def test_the_optimizer_inside_of_a_wrapper_is_left_alone(kind: type[Wrapper]) -> None:
    module = Module()
    inner = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    if kind is PassedOn:
        alone = optimizer_step(inner, parameters_of(module), find_device("cpu"))
        found = optimizer_step(kind(inner), parameters_of(module), find_device("cpu"))
        assert (found.state_bytes, found.seconds) == (alone.state_bytes, alone.seconds)
    else:
        with pytest.raises(OptimizerError, match=r"Wrapper holds Adam.* Pass the optimizer inside of it"):
            optimizer_step(kind(inner), parameters_of(module), find_device("cpu"))
    assert not inner.state
    assert all(a is b for a, b in zip(inner.param_groups[0]["params"], module.parameters(), strict=True))


def test_lists_of_an_optimizer_are_left_alone() -> None:
    module = Module()
    optimizer = Counting(module.parameters())
    optimizer_step(optimizer, parameters_of(module), find_device("cpu"))
    assert optimizer.log == {"steps": []}


def test_an_optimizer_that_asks_for_norms() -> None:
    module = Module()
    found = optimizer_step(
        torch.optim.Adafactor(module.parameters()), parameters_of(module), find_device("T4")
    )
    assert 0 < found.state_bytes < 8 * ELEMENTS


def test_an_optimizer_that_needs_more_than_a_call_is_refused() -> None:
    with pytest.raises(
        OptimizerError, match=r"LBFGS cannot take a step.* With optimizer=None, also in a trainer's callback"
    ):
        optimizer_step("LBFGS", parameters_of(Module()), find_device("cpu"))


def test_the_sum_on_a_gpu_and_the_room_it_leaves() -> None:
    gpu = find_device("H100")
    resident = Resident(
        parameter_bytes=100 * MIB, buffer_bytes=0, input_bytes=0, gradient_bytes=0, optimizer_bytes=200 * MIB
    )
    # Its first step makes two of 100 MiB, and each step holds 50 MiB for a while.
    making = step_allocations(
        start=[0, 1, 2], end=[3, 3, 2], sizes=[100 * MIB, 100 * MIB, 50 * MIB], workspace=[0] * 3
    )
    steady = step_allocations(start=[0], end=[0], sizes=[50 * MIB], workspace=[0])
    footprint = StepMemoryModel(
        gpu, resident, OptimizerStep(200 * MIB, 50 * MIB, 0.0, making, steady), (100 * MIB,)
    )
    # 400 MiB that forward leaves to backward, then gradients of 100 MiB, after which the 400 are freed.
    step = step_allocations(start=[0, 1], end=[1, 2], sizes=[400 * MIB, 100 * MIB], workspace=[0, 0])
    whole = footprint.whole_step(dynamic_peak_bytes=500 * MIB, final_bytes=100 * MIB, allocations=step)
    assert whole.forward_backward_bytes == 800 * MIB
    assert whole.optimizer_step_bytes == 450 * MIB
    assert whole.allocated_bytes == 800 * MIB
    # The state takes the larger part of the block of 400 MiB, so that the second forward needs another.
    assert whole.reserved_bytes == (100 + 64 + 400 + 100 + 400) * MIB
    assert whole.fragmentation_bytes == 200 * MIB
    # One segment that grows has the 200 MiB that are left of it, and grows by the other 200.
    assert whole.expandable_reserved_bytes == 880 * MIB
    assert whole.total_bytes == whole.reserved_bytes + gpu.context_bytes
    bare = footprint.whole_step(500 * MIB, 100 * MIB)
    for budget in (bare.total_bytes, bare.total_bytes + 12_345, bare.total_bytes - 1):
        room = footprint.room_bytes(budget)
        assert footprint.whole_step(room, 100 * MIB).total_bytes <= budget
        assert footprint.whole_step(room + 1, 100 * MIB).total_bytes > budget


@pytest.mark.heavy
def test_casts_of_weights_are_held_as_long_as_the_users_step_holds_them() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    x = torch.randn(64, 256)

    def mean_square(output: torch.Tensor) -> torch.Tensor:
        return output.float().square().mean()

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
            loss = mean_square(output)
        loss.backward()
        return output

    with torch.autocast("cpu", torch.bfloat16):
        plan = planner.plan(model, (x,), budget="200%", loss=mean_square, solver="none")
    step()
    model.zero_grad(set_to_none=True)
    assert plan.baseline.dynamic_peak_bytes == measure_peak(step, "cpu").peak_bytes


def test_an_optimizer_of_another_model_is_said_to_be_one() -> None:
    def warned(model: torch.nn.Module, optimizer: Any) -> tuple[Plan, int]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = planner.plan(model, (torch.randn(2, 4),), budget="400%", optimizer=optimizer)
        return plan, sum(OF_ANOTHER_MODEL in str(w.message) for w in caught)

    model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 5)
    plan, count = warned(model, torch.optim.SGD(other.parameters()))
    assert count == 1
    assert OF_ANOTHER_MODEL in plan.notes
    both = [*model.parameters(), *other.parameters()]
    copied = copy.deepcopy(model)
    for held in (model.parameters(), both, [model.weight], copied.parameters(), [copied.bias]):
        assert warned(model, torch.optim.SGD(held))[1] == 0
    assert warned(model, "SGD")[1] == 0
