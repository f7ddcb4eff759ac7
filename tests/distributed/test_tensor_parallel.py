"""Two processes that share a model by tensor parallelism: captured, predicted, collectives kept."""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import planner
from planner import PlanMismatch
from planner.parallel.strategies import ParallelError
from planner.runtime.ddp import decisions_digest
from tests.gloo import let_gloo_end, measured
from tests.ranks import run_ranks, what_a_rank_says
from tests.side_by_side import counting_runs

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

CASES: dict[str, dict[str, Any]] = {"layers": {}}
STEPS = 3


def _example() -> dict[str, Any]:
    return vars(importlib.import_module("tensor_parallel"))


def _built(example: dict[str, Any], **options: Any) -> Any:
    return example["build_model"](init_device_mesh("cpu", (dist.get_world_size(),)), **options)


def _rank(texts: dict[str, str], folder: Path) -> None:
    library = let_gloo_end()
    example = _example()

    def say(name: str, what: Callable[[], str]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", planner.PlanWarning)
            (folder / f"{name}.{dist.get_rank()}").write_text(what())

    for name, options in CASES.items():
        say(name, partial(_trained, example, options, planner.Plan.loads(texts[name])))
    del library
    say("example", partial(_as_the_example_does, example))
    say("other plans", partial(_other_plans, example, texts["layers"]))


def _trained(example: dict[str, Any], options: dict[str, Any], plan: planner.Plan) -> str:
    """A rank by a plan that was made where no rank was."""
    words, weights, peaks = example["batch"](0), [], []
    for footprint in (plan.predicted, plan.baseline):
        model = _built(example, **options)
        with counting_runs() as runs:
            if footprint is plan.predicted:
                plan.apply(model)
            peaks.append(measured(model, words, footprint.dynamic_peak_bytes))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            before = runs.backward
            for step in range(STEPS):
                optimizer.zero_grad()
                model(example["batch"](step)).backward()
                optimizer.step()
        if footprint is plan.predicted:
            followed = runs.backward - before == STEPS
        weights.append({n: value.full_tensor() for n, value in _distributed(model).items()})
    unequal = [n for n, value in weights[1].items() if not torch.equal(weights[0][n], value)]
    if not followed or unequal:
        return f"followed: {followed}, unequal: {unequal}"
    planned, unplanned = peaks
    if abs(unplanned / plan.baseline.dynamic_peak_bytes - 1) > 0.01:
        return f"unplanned {unplanned} bytes, predicted {plan.baseline.dynamic_peak_bytes}"
    return f"{planned - plan.predicted.dynamic_peak_bytes} bytes off, all equal"


def _distributed(model: torch.nn.Module) -> dict[str, Any]:
    state = model.state_dict()
    return {n: value for n, value in state.items() if isinstance(value, DTensor)}


def _as_the_example_does(example: dict[str, Any]) -> str:
    ours, theirs = example["train"]("70%", 1), example["train"](None, 1)
    return f"{[n for n, value in theirs.items() if not torch.equal(ours[n], value)] or 'all'} equal"


def _other_plans(example: dict[str, Any], text: str) -> str:
    model = _built(example)
    planner.Plan.loads(text).apply(model, on_new_shape="replan" if dist.get_rank() else "reapply")
    try:
        model(example["batch"](0))
    except PlanMismatch as error:
        return str(error)
    return "fine"


@pytest.fixture(scope="module", params=[2])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A group of ranks that are not there."""
    dist.init_process_group("fake", rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return _example()


@pytest.fixture(scope="module")
def plans(ranks: int, example: dict[str, Any]) -> dict[str, planner.Plan]:
    """Made by one process for all ranks."""
    args = (example["batch"](0),)
    return {n: planner.plan(_built(example, **o), args, budget="70%") for n, o in CASES.items()}


@pytest.fixture(scope="module")
def plan(plans: dict[str, planner.Plan]) -> planner.Plan:
    return plans["layers"]


@pytest.fixture(scope="module")
def outcomes(plans: dict[str, planner.Plan], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank says of each case; all in one pair of processes."""
    texts = {name: plan.dumps() for name, plan in plans.items()}
    return run_ranks(partial(_rank, texts), tmp_path_factory, "tensor parallel")


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_measure_what_was_predicted_and_get_what_they_get_without(
    name: str, outcomes: Path
) -> None:
    for rank in range(2):
        assert what_a_rank_says(outcomes, name, rank) == "0 bytes off, all equal"


@pytest.mark.heavy
def test_the_example(outcomes: Path) -> None:
    for rank in range(2):
        assert what_a_rank_says(outcomes, "example", rank) == "all equal"


@pytest.mark.heavy
def test_ranks_with_other_plans_are_an_error_at_the_first_step(outcomes: Path) -> None:
    for rank in range(2):
        said = what_a_rank_says(outcomes, "other plans", rank)
        assert said.startswith(f"rank {rank} trains by another plan than rank {1 - rank}")


def _run_again(plan: planner.Plan) -> set[str]:
    return {graph.ops[op].name for graph in plan.graphs for op in graph.recomputed}


@pytest.mark.heavy
def test_collectives_run_again_only_if_that_is_asked_for(
    ranks: int, example: dict[str, Any], plan: planner.Plan
) -> None:
    step = planner.prepare(_built(example), (example["batch"](0),))
    name = "_c10d_functional.all_reduce"
    assert not [op for op in _run_again(step.plan("min")) if "c10d" in op]
    asked = step.plan("min", recompute=[name])
    assert f"{name}.default" in _run_again(asked)
    assert decisions_digest(asked) != decisions_digest(plan)


@pytest.mark.heavy
def test_the_plan_says_among_how_many_ranks_the_model_is(
    ranks: int, example: dict[str, Any], plan: planner.Plan
) -> None:
    assert plan.target.parallel is not None
    assert (plan.target.parallel.kind, plan.target.parallel.world_size) == ("tensor", ranks)
    assert not [note for note in plan.notes if "Python enters" not in note]  # a short step
    whole = example["Transformer"]()
    plan.apply(whole)
    for _ in range(2):  # nor does the second call go on without it
        with pytest.raises(PlanMismatch, match=f"distributed among {ranks} ranks .* this one is among 1"):
            whole(example["batch"](0))


def test_what_cannot_be_planned_of_a_distributed_model_is_an_error(
    ranks: int, example: dict[str, Any]
) -> None:
    model, args = _built(example), (example["batch"](0),)
    with pytest.raises(ParallelError, match="distributed already"):
        planner.plan(model, args, budget="70%", parallel="ddp:2")
    with pytest.raises(ParallelError, match="reshard_after_forward=2"):
        planner.plan(model, args, budget="70%", parallel="fsdp2:4,reshard_after_forward=2")
    with pytest.raises(ParallelError, match="backend='eager'"):
        planner.plan(model, args, budget="70%", backend="inductor")
