"""A module that ``fully_shard`` shards otherwise than planned says so, by name."""

import functools
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import planner
from planner._torch.distributed import autograd_sums_micro_batches, sharded_units

pytestmark = pytest.mark.heavy

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PARALLEL = planner.FSDP2(1, reshard_after_forward=None)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 1))


@functools.cache
def _planned(parallel: planner.FSDP2) -> planner.Plan:
    """A plan of such a model, which it is no matter for how another one is sharded."""
    return planner.plan(_model(), (torch.randn(4, 8),), budget="min", solver="sqrt_n", parallel=parallel)


def _shard(model: nn.Module, **options: Any) -> None:
    for block in model.get_submodule("0").children():
        fully_shard(block, **options)
    fully_shard(model, **options)


def _said(
    shard: Callable[[nn.Module], object],
    parallel: planner.FSDP2 = PARALLEL,
    *,
    model: nn.Module | None = None,
    regions: list[str] | None = None,
) -> list[str]:
    x = torch.randn(4, 8)
    if model is None:
        model, plan = _model(), _planned(parallel)
    else:
        plan = planner.plan(model, (x,), budget="min", solver="sqrt_n", parallel=parallel, regions=regions)
    plan.apply(model)
    shard(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(x).sum().backward()
    return [str(w.message) for w in caught if "fully_shard was not used as planned" in str(w.message)]


def _without_reduction(model: nn.Module) -> None:
    _shard(model)
    model.set_requires_gradient_sync(False)  # type: ignore[operator]


def _without_reduction_of_all(model: nn.Module) -> None:
    _shard(model)
    model.set_requires_all_reduce(False)  # type: ignore[operator]


def _gathered_after_the_backward(model: nn.Module) -> None:
    _shard(model)
    model.set_reshard_after_backward(False)  # type: ignore[operator]


def _with_prefetches(model: nn.Module) -> None:
    _shard(model)
    first, second, _ = model.get_submodule("0").children()
    second.set_modules_to_backward_prefetch([first])  # type: ignore[operator]


def _with_an_output_cast(model: nn.Module) -> None:
    for block in model.get_submodule("0").children():
        fully_shard(block)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))


def _without_the_last_biases(model: nn.Module) -> None:
    last = {p for name, p in model.named_parameters() if name in ("0.2.2.bias", "1.bias")}
    _shard(model, ignored_params=last)


def _in_a_group(model: nn.Module) -> None:
    first, second, third = model.get_submodule("0").children()
    fully_shard([second, third])
    for part in (first, model):
        fully_shard(part)


def _with_a_group_that_stays(model: nn.Module) -> None:
    first, second, third = model.get_submodule("0").children()
    fully_shard([second, third], reshard_after_forward=False)
    for part in (first, model):
        fully_shard(part)


def _inside(model: nn.Module) -> None:
    fully_shard(model.get_submodule("0.1.0"))
    _shard(model)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("shard", "says"),
    [
        (fully_shard, "0.0 was planned as a unit, and is none"),
        (_inside, "0.1.0 is a unit of its own, and was not planned as one"),
        (lambda m: _shard(m, reshard_after_forward=False), "planned as True, and units have False"),
        (lambda m: _shard(m, mp_policy=HALF), "param_dtype was planned as torch.float32"),
        (_without_reduction, "gradients are not reduced, and whole ones are kept: that is no_sync=True"),
        (_without_reduction_of_all, "not reduced among all replicas"),
        (_gathered_after_the_backward, "not freed after the backward"),
        (_with_prefetches, "set_modules_to_backward_prefetch"),
        (_with_an_output_cast, "output_dtype=torch.bfloat16 casts what is returned"),
        (_without_the_last_biases, "0.2.2.bias and 1 more are not sharded"),
        (_in_a_group, "0.1 and 0.2 are one unit, and were not planned as one"),
    ],
)
def test_what_is_sharded_otherwise_is_named_once(shard: Callable[[nn.Module], object], says: str) -> None:
    (text,) = _said(shard)
    assert says in text


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("sharded", [True, False])
def test_a_unit_without_parameters_is_none_that_counts(sharded: bool) -> None:
    def shard(model: nn.Module) -> None:
        fully_shard(model.get_submodule("0"))
        if sharded:
            fully_shard(model.get_submodule("1"))
        fully_shard(model)

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.GELU(), nn.Dropout(0.1)), nn.Linear(8, 1))
    assert _said(shard, model=model, regions=["0", "1"]) == []


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("options", "parallel"),
    [
        ({}, PARALLEL),
        ({"reshard_after_forward": False}, planner.FSDP2(1, False)),
        ({"mp_policy": HALF}, planner.FSDP2(1, None, torch.bfloat16, torch.float32)),
        ({}, planner.FSDP2(1, None, reduce_dtype=torch.float32)),
        (
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
            planner.FSDP2(
                1, None, torch.bfloat16, torch.float32 if autograd_sums_micro_batches() else torch.bfloat16
            ),
        ),
    ],
)
def test_nothing_is_said_of_what_is_sharded_as_planned(
    options: dict[str, Any], parallel: planner.FSDP2
) -> None:
    assert _said(lambda model: _shard(model, **options), parallel) == []


@pytest.mark.usefixtures("process_group")
def test_a_group_that_stays_gathered_is_planned_and_compared() -> None:
    parallel = planner.FSDP2(1, None, kept_gathered=("0.1+0.2",))
    assert _said(_with_a_group_that_stays, parallel) == []
    (text,) = _said(_shard, parallel)
    assert "0.1 and 0.2 were planned as one unit, and are not" in text
    assert "reshard_after_forward was planned as False, and units have True" in text
    with pytest.raises(planner.PlannerError, match=r"kept_gathered names '0\.3', which is no region"):
        _said(_shard, planner.FSDP2(1, None, kept_gathered=("0.2+0.3",)))


@pytest.mark.usefixtures("process_group")
def test_nothing_is_said_where_micro_batches_were_planned_to_be_added_up() -> None:
    parallel = planner.FSDP2(1, None, no_sync=True)
    assert _said(_without_reduction, parallel) == []
    (text,) = _said(_shard, parallel)
    assert "no_sync=True was planned, and gradients are reduced after the first backward" in text


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("no_sync", [False, True])
def test_gradients_that_a_later_step_does_not_reduce_are_said_once(no_sync: bool) -> None:
    model, x = _model(), torch.randn(4, 8)
    parallel = planner.FSDP2(1, None, no_sync=no_sync)
    planner.plan(model, (x,), budget="min", solver="sqrt_n", parallel=parallel).apply(model)
    _shard(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for reduces in (not no_sync, False, True, False, True):
            model.set_requires_gradient_sync(reduces)  # type: ignore[operator]
            model(x).sum().backward()
            if reduces:
                model.zero_grad()
    said = [str(w.message) for w in caught if issubclass(w.category, planner.PlanWarning)]
    assert len(said) == (0 if no_sync else 1), said
    assert all("gradients were not reduced in the backward before" in text for text in said)


@pytest.mark.usefixtures("process_group")
def test_parameters_that_a_policy_takes_out_are_seen() -> None:
    """From torch 2.15 on a policy may say that some parameters keep their type."""
    may = "param_dtype_override_fn" in {field.name for field in fields(MixedPrecisionPolicy)}
    options: Any = {"param_dtype_override_fn": lambda p: p.dtype if p.dim() == 1 else None} if may else {}
    model = _model()
    _shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, **options))
    assert [unit.overrides for unit in sharded_units(model)] == [may] * 4
