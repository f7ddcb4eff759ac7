"""Runs a training loop with and without a plan, and compares everything that it leaves, bit for bit."""

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

import planner
from planner._torch.joint.aot import BoxedFunction
from planner.errors import PlanWarning
from planner.lowering.lowerings import Lowering, Role
from planner.replay.backward import Backward
from planner.replay.follow import FollowedStep
from planner.runtime import backend
from planner.user_plan import Plan
from planner.verification.measure import measure_peak

Loop = Callable[[Any], Any]


class Layers(nn.Module):
    """Residual layers that are worth recomputing; returns its loss."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
            for _ in range(count)
        )

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x).square().mean()


class AfterALayer(nn.Module):
    """Calls a function with the result of a layer."""

    def __init__(self, do: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.do = nn.Linear(64, 64), do

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.do(self.layer(x)).sum()


def layers(
    build: Callable[[], nn.Module] = Layers, seed: int = 0
) -> tuple[nn.Module, tuple[torch.Tensor], None]:
    """A model of such layers and a batch for it."""
    torch.manual_seed(seed)
    model = build().train()
    torch.manual_seed(1)
    return model, (torch.randn(64, 32),), None


class Runs:
    """How often planned graphs ran, and were captured, while :func:`counting_runs` is on."""

    forward = 0
    backward = 0
    captures = 0
    replayed = 0
    """The number of forwards that a replayed plan followed to their end."""


@contextmanager
def counting_runs() -> Iterator[Runs]:
    """Count the runs of planned graphs that are compiled from now on, and the steps that replay a plan."""
    runs, original = Runs(), backend.chosen_lowering
    finished, before = FollowedStep.finished, Backward.before_save

    def chosen(*backend_and_options: Any) -> Lowering:
        lower = original(*backend_and_options)

        def counted(module: GraphModule, role: Role) -> BoxedFunction:
            function = lower(module, role)
            runs.captures += role == "forward"

            def run(args: list[Any]) -> Any:
                setattr(runs, role, getattr(runs, role) + 1)
                return function(args)

            return run

        return counted

    def counting(step: FollowedStep) -> None:
        finished(step)
        runs.replayed += step.followed
        runs.forward += step.followed

    def counting_backwards(step: Backward, save: int) -> None:
        runs.backward += step.followed and not step.begun
        before(step, save)

    backend.chosen_lowering = chosen
    FollowedStep.finished = counting  # type: ignore[method-assign]
    Backward.before_save = counting_backwards  # type: ignore[method-assign]
    try:
        yield runs
    finally:
        backend.chosen_lowering = original
        FollowedStep.finished = finished  # type: ignore[method-assign]
        Backward.before_save = before  # type: ignore[method-assign]


@contextmanager
def no_plan_warnings() -> Iterator[None]:
    """Make each :class:`PlanWarning` an error, except those that only say that more memory may be taken."""
    memory = r".*(awaits its backward|with retain_graph=True holds|than planned \(strides|were there already)"
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        warnings.filterwarnings("ignore", memory, PlanWarning)
        yield


def left_by(model: Any, loop: Loop, seed: int = 5) -> dict[str, Any]:
    """Everything that a training loop leaves: its return value, state, gradients, random generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    returned = loop(model)
    modules = model if isinstance(model, Sequence) else [model]
    left: dict[str, Any] = {
        f"returned{pytree.keystr(path)}": leaf for path, leaf in pytree.tree_flatten_with_path(returned)[0]
    }
    for i, module in enumerate(modules):
        left.update({f"{i}.state.{n}": v.clone() for n, v in module.state_dict().items()})
        left.update({f"{i}.buffer.{n}": v.clone() for n, v in module.named_buffers()})
        left.update({f"{i}.gradient.{n}": p.grad for n, p in module.named_parameters()})
    left["torch generator"] = torch.get_rng_state()
    left["python generator"] = random.getstate()
    left["numpy generator"] = [str(x) for x in np.random.get_state()]
    return left


def assert_same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Every entry is equal, tensors bit for bit and in shape and dtype."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        found = ours[name]
        if not isinstance(value, torch.Tensor):
            assert found == value, name
            continue
        assert isinstance(found, torch.Tensor), f"{name} is {found}"
        assert (found.shape, found.dtype) == (value.shape, value.dtype), name
        assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(value)), name
        assert torch.equal(torch.isnan(found), torch.isnan(value)), name


def plan_of(model: nn.Module, args: Sequence[Any], kwargs: Any = None, **options: Any) -> Plan:
    """A plan that recomputes: the least memory that the fastest solver reaches."""
    return planner.plan(model, args, kwargs, **{"budget": "min", "solver": "sqrt_n", **options})


def exact_plan_of(model: nn.Module, args: Sequence[Any], **options: Any) -> Plan:
    """Such a plan, verified: steps leave the same as without it, and both peaks are predicted to the byte."""
    plan = plan_of(model, args, **options)
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
    assert report.baseline_measured_dynamic_peak_bytes == report.baseline_predicted_dynamic_peak_bytes
    return plan


def assert_trains_alike(
    model: nn.Module,
    args: Sequence[Any],
    loop: Loop,
    *,
    expected_runs: int | Callable[[Plan], int] | None,
    prepare: Loop | None = None,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> Plan:
    """Run ``loop`` on a planned module and on an unplanned copy; everything they leave must be equal.

    Args:
        expected_runs: How often planned backwards have to run, or a function that tells it from the plan; a
            lower count would mean an unplanned step. None for at least once, where one graph may serve
            several layers. A replayed plan runs no planned graphs.
        prepare: Called with both modules after the plan is applied.
        autocast: The plan is made under autocast to this type. The loop has to enter autocast by itself: a
            region that spans optimizer steps would train by outdated copies of the weights.

    Returns:
        The plan.
    """
    twin = copy.deepcopy(model)
    with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
        plan = plan_of(model, args, **options)
    assert plan.recomputed_operations
    plan.apply(model)
    if prepare is not None:
        prepare(model)
        prepare(twin)
    with counting_runs() as runs, no_plan_warnings():
        ours = left_by(model, loop)
    expected = expected_runs(plan) if callable(expected_runs) else expected_runs
    if plan.coverage != "replayed":
        assert runs.backward if expected is None else runs.backward == expected, (
            f"the planned backward ran {runs.backward} times"
        )
    assert_same(ours, left_by(twin, loop))
    return plan


def steps(args: Sequence[Any], count: int = 2, lr: float = 0.1) -> Loop:
    """A plain loop of SGD with momentum."""

    def loop(model: nn.Module) -> list[torch.Tensor]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr, momentum=0.9), []
        for _ in range(count):
            optimizer.zero_grad()
            losses.append(model(*args))
            losses[-1].backward()
            optimizer.step()
        return losses

    return loop


def step_of(model: nn.Module, args: Sequence[Any]) -> torch.Tensor:
    loss: torch.Tensor = model(*args)
    loss.backward()
    return loss


def trains_alike(build: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, Plan]:
    model, args, _ = layers(build)
    runs = options.pop("expected_runs", 2)
    return model, assert_trains_alike(model, args, steps(args), expected_runs=runs, **options)


def peak_of(model: nn.Module, args: Sequence[Any]) -> int:
    def step() -> torch.Tensor:
        loss: torch.Tensor = model(*args)
        loss.backward()
        return loss

    model.zero_grad(set_to_none=True)
    return measure_peak(step, "cpu").peak_bytes
