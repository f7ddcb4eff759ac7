"""What is asked of a model for a headline: the largest batch, one plan, the least memory.

Answers are plain data, as they go into the JSON file of a row. Nothing is run: all of it is predicted.
"""

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn as nn

import planner
from planner.batch.interpolate import SizedSteps
from planner.batch.points import MaxBatch
from planner.batch.search import QUICK_SECONDS, BatchSearch
from planner.costs.devices import find_device
from planner.planfile.budget import Budget
from planner.planfile.schema import WholeStep
from planner.planning.encodings import total_bytes
from planner.planning.make_plan import make_plan
from planner.planning.options import PlanOptions
from planner.planning.prepare import prepare
from planner.planning.prepared import Prepared
from planner.planning.solve import reserving_no_more
from planner.training_step.step import Step
from solvers import portfolio
from solvers.model.graph import Graph
from solvers.model.schedule import alive_at, simulate
from solvers.model.solution import Solution

DEVICE = find_device("V100-32GB")
BUDGET = Budget(DEVICE.memory_bytes, DEVICE.name)
OVERHEADS = (0.15, 0.29)

patience = 1.0
"""By what all time limits are multiplied: they are wall time, of which a busy machine gives only a part."""

Result = dict[str, Any]


def prepared(
    model: nn.Module,
    args: Any,
    optimizer: Any = None,
    *,
    device: Any = DEVICE,
    like: Prepared | None = None,
) -> Prepared:
    """A captured step, and if there is one, that of another size."""
    kwargs = args if isinstance(args, dict) else {}
    step = Step(() if isinstance(args, dict) else tuple(args), kwargs)
    return prepare(model, step, PlanOptions(optimizer=optimizer, device=device), like=like)


def search(model: nn.Module, make_args: Callable[[int], Any], optimizer: Any) -> BatchSearch:
    """A search for the largest batch on the whole of the device."""
    steps = SizedSteps(lambda size, like: prepared(model, make_args(size), optimizer, like=like))
    return BatchSearch(
        steps,
        BUDGET,
        time_limit=60 * patience,
        quick_seconds=QUICK_SECONDS * patience,
        progress=lambda text, fraction: print(f"  {text}", file=sys.stderr) if "batch" in text else None,
    )


def as_result(found: MaxBatch) -> Result:
    """What a search found, without the plan itself."""
    whole = found.plan.whole_step
    assert whole is not None
    return {**found.to_dict(), "whole_step": as_data(whole)}


def as_data(whole: WholeStep) -> Result:
    """What a whole step takes of its device, with the sums."""
    return {
        **whole.model_dump(),
        "reserved_bytes": whole.reserved_bytes,
        "unarranged_reserved_bytes": whole.unarranged_reserved_bytes,
        "expandable_reserved_bytes": whole.expandable_reserved_bytes,
        "total_bytes": whole.total_bytes,
    }


def holders(step: Prepared) -> Result:
    """Bytes a sample by operation, of what is alive when the step that recomputes nothing peaks."""
    graph = step.problem.graph
    schedule = graph.base_schedule
    timeline = simulate(graph, schedule)
    by_name: dict[str, int] = {}
    masks = 0
    for value in alive_at(graph, schedule, timeline.peak_step).tolist():
        op = graph.ops[int(graph.producer[value])]
        name = op.name.split(" ")[0]
        by_name[name] = by_name.get(name, 0) + graph.values[value].bytes
        if name == "aten.native_dropout.default" and op.outputs.index(value) == 1:
            masks += graph.values[value].bytes
    largest = sorted(by_name.items(), key=lambda item: -item[1])[:8]
    return {"peak_bytes": timeline.peak_bytes, "by_operation": dict(largest), "dropout_mask_bytes": masks}


def at_the_peak(graph: Graph, schedule: np.ndarray, count: int = 3) -> Result:
    """The operation at which a schedule peaks, and the largest of what is alive then."""
    step = simulate(graph, schedule).peak_step
    alive = sorted(alive_at(graph, schedule, step).tolist(), key=lambda v: -graph.values[v].bytes)[:count]

    def made_by(op: int) -> str:
        return graph.ops[op].name.split(" ")[0].removeprefix("aten.").removesuffix(".default")

    return {
        "operation": made_by(int(schedule[step])),
        "alive": [[made_by(int(graph.producer[value])), graph.values[value].bytes] for value in alive],
    }


def batches(
    model: nn.Module,
    make_args: Callable[[int], Any],
    optimizer: Any,
    published: Result,
    overheads: tuple[float, ...] = OVERHEADS,
) -> Result:
    """The largest batches without a plan and at several overheads."""
    looking = search(model, make_args, optimizer)
    answers = {f"{share:.2f}": as_result(looking.run(max_overhead=share)) for share in overheads}
    largest = max(looking.steps.captured)
    nearest = min(looking.steps.captured, key=lambda size: abs(size - published["unplanned"]))
    return {
        "kind": "batches",
        "published": published,
        "answers": answers,
        "largest_captured": largest,
        "holders": {"batch": nearest, **holders(looking.steps.prepared[nearest])},
    }


def fitting_length(
    model: nn.Module,
    make_args: Callable[[int], Any],
    batch: int,
    length: int,
    optimizer: Any,
    published: Result,
) -> Result:
    """What `batch` sequences of `length` tokens take, and the length at which they would just fit."""
    steps = SizedSteps(lambda tokens, like: prepared(model, make_args(tokens), optimizer, like=like))
    full = steps.capture(length)
    steps.capture(length // 2)
    for _ in range(3):  # attention's bytes grow with the square: each capture is nearer
        low, high = 1, 2 * length
        while high - low > 1:
            middle = (low + high) // 2
            fits = steps.at(middle).unplanned_bytes <= BUDGET.bytes
            low, high = (middle, high) if fits else (low, middle)
        if low in steps.captured:
            break
        steps.capture(low)
    fitting = max(n for n, sized in steps.captured.items() if sized.unplanned_bytes <= BUDGET.bytes)
    per_sample = {
        tokens: int(sized.eager_bytes.max() - full.eager_final_bytes) // batch
        for tokens, sized in sorted(steps.captured.items())
    }
    return {
        "kind": "length",
        "published": published,
        "batch": batch,
        "length": length,
        "unplanned_bytes": full.unplanned_bytes,
        "fitting_length": fitting,
        "fitting_bytes": steps.captured[fitting].unplanned_bytes,
        "resident_bytes": full.footprint.resident.total,
        "gradient_bytes": full.eager_final_bytes,
        "activation_bytes_a_sample": per_sample,
    }


def planned(
    model: nn.Module, args: Any, optimizer: Any, budget: Budget, published: Result, draw: str | None = None
) -> Result:
    """One plan for one budget."""
    step = prepared(model, args, optimizer)
    room = step.footprint.room_bytes(budget.bytes or 0)
    graph = step.problem.graph

    def solve(room: int, seconds: float) -> Solution:
        return portfolio.solve(graph, room, time_limit=seconds)

    solution = reserving_no_more(
        step, solve(room, 30 * patience), budget, solve, total_bytes(step), time_limit=60 * patience
    )
    whole = step.whole_step(solution.schedule)
    base = step.baseline_whole_step
    result: Result = {
        "kind": "plan",
        "published": published,
        "budget_bytes": budget.bytes,
        "fits": solution.feasible,
        "unplanned": as_data(base),
        "planned": as_data(whole),
        "unplanned_dynamic_bytes": step.problem.eager.peak_bytes,
        "planned_dynamic_bytes": solution.peak_bytes,
        "overhead": solution.seconds / step.problem.eager.seconds - 1,
    }
    if draw is not None and solution.feasible:
        result["figure"] = f"headlines/{draw}.svg"
        result["plan"] = make_plan(step, solution, budget)
    return result


def least_within(
    model: nn.Module, args: Any, most_overhead: float, published: Result, optimizer: Any = None
) -> Result:
    """The least dynamic peak at a bounded overhead, by bisection on the budget."""
    step = prepared(model, args, optimizer)
    graph, eager = step.problem.graph, step.problem.eager
    lowest = portfolio.solve(graph, None, time_limit=30 * patience)
    allowed = (1 + most_overhead) * eager.seconds
    best = None
    if lowest.seconds <= allowed:
        best = lowest
    low, high = lowest.peak_bytes, eager.peak_bytes
    for _ in range(10):
        if best is lowest or high - low <= 0.005 * high:
            break
        middle = (low + high) // 2
        known = [] if best is None else [best.schedule]
        solution = portfolio.solve(graph, middle, time_limit=15 * patience, known=known)
        if solution.feasible and solution.seconds <= allowed:
            best, high = solution, solution.peak_bytes
        else:
            low = middle
    assert best is not None
    return least(step, best, published)


def at_factor(model: nn.Module, args: Any, factor: float, published: Result) -> Result:
    """The least overhead found for a given share of the unplanned peak."""
    step = prepared(model, args)
    room = int(step.problem.eager.peak_bytes / factor)
    return least(step, portfolio.solve(step.problem.graph, room, time_limit=240 * patience), published)


def least(step: Prepared, best: Solution, published: Result) -> Result:
    """What a solution takes beside the unplanned step."""
    eager, graph = step.problem.eager, step.problem.graph
    forward = sum(graph.ops[op].seconds for op in graph.base_schedule[: graph.forward_length].tolist())
    return {
        "kind": "least",
        "published": published,
        "unplanned_dynamic_bytes": eager.peak_bytes,
        "planned_dynamic_bytes": best.peak_bytes,
        "gradient_and_output_bytes": step.problem.final_bytes,
        "resident_bytes": step.resident.total,
        "factor": eager.peak_bytes / best.peak_bytes,
        "reduction": 1 - best.peak_bytes / eager.peak_bytes,
        "reduction_with_resident": 1
        - (best.peak_bytes + step.resident.total) / (eager.peak_bytes + step.resident.total),
        "overhead": best.seconds / eager.seconds - 1,
        "forward_share": forward / graph.base_seconds,
        "overhead_over_no_recompute": best.seconds / graph.base_seconds - 1,
        "bound_over_no_recompute": None
        if best.bound_seconds is None
        else best.bound_seconds / graph.base_seconds - 1,
    }


def planning(
    model: nn.Module, args: dict[str, torch.Tensor], device: str, budget: str, optimizer: Any
) -> Result:
    """What it takes to plan for a GPU on this machine."""
    started = time.process_time()
    plan = planner.plan(model, (), args, budget=budget, device=device, optimizer=optimizer)
    seconds = time.process_time() - started
    assert plan.whole_step is not None
    assert plan.baseline_whole_step is not None
    return {
        "kind": "planning",
        "for": device,
        "plan_seconds": round(seconds, 1),
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "total_bytes": plan.whole_step.total_bytes,
        "unplanned_bytes": plan.baseline_whole_step.total_bytes,
        "overhead": plan.overhead,
    }
