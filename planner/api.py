"""The public functions: plan, auto_checkpoint."""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils import _pytree as pytree

import solvers
from planner.budget import format_bytes, parse_budget
from planner.capture import CapturedStep, capture
from planner.devices import Device, find_device
from planner.errors import InfeasibleBudget, PlannerError
from planner.fingerprint import state_digest
from planner.install import apply, class_name
from planner.optimizer import Optimizer, optimizer_state_bytes
from planner.plan_file import (
    Footprint,
    GraphRecord,
    Holder,
    ModelRecord,
    OpRecord,
    Plan,
    Resident,
    SolverRecord,
    Target,
    TensorRecord,
    Timeline,
)
from planner.problem import Problem, build_problem
from planner.step import Loss, Step, tensors_in, unique_storages
from planner.workspace import WorkspaceMeter
from solvers.registry import SOLVERS, Solve
from solvers.schedule import alive_at, lifetimes, simulate
from solvers.solution import Solution

Progress = Callable[[str, float], None]


class SolverError(PlannerError, ValueError):
    """There is no solver of that name."""


def plan(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | str,
    solver: str = "auto",
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    device: str | torch.device | Device | None = None,
    time_limit: float = 60,
    progress: Progress | None = None,
) -> Plan:
    """Plan a training step within a memory budget. Nothing of the module's is changed or run.

    Args:
        model: Any module, in the mode (train or eval) in which it will be trained.
        args, kwargs: Example inputs; the plan is for their shapes.
        budget: Most bytes for the step's peak: an int, "8GiB", "60%" of the unplanned peak, or "min".
        solver: A name in ``solvers.SOLVERS``, or "auto" for the best that fits.
        loss: Makes the scalar loss of the module's output, where the module does not return it
            (itself, or as ``output.loss``). Without either, the step differentiates all outputs.
        optimizer: An instance, class or name; its state counts as resident.
        device: Where the step will run: None for where the model is, or the name of a device.
        time_limit: Wall seconds for the solver.
        progress: Called with a text and a fraction from 0 to 1.

    Returns:
        The plan; ``plan.apply(model)`` installs it, ``plan.save(path)`` writes it.

    Raises:
        BudgetError: If the budget cannot be read.
        CaptureError: If the step cannot be captured.
        InfeasibleBudget: If no schedule fits; ``.minimum_bytes`` is the least budget that would.
    """
    report = progress or (lambda text, fraction: None)
    solve = find_solver(solver)
    parse_budget(budget, 2**60)  # bad text is an error before the long work, not after
    step = Step(tuple(args), dict(kwargs or {}), loss)
    target = find_device(device, _device_of(model, step))
    started = time.perf_counter()
    captured = capture(model, step, lambda text, fraction: report(text, 0.6 * fraction))
    resident = _resident(captured, optimizer, model)
    report("measuring what kernels allocate inside", 0.6)
    meter = _meter(target, model, step)
    problem = build_problem(captured, target, meter)
    capture_seconds = time.perf_counter() - started

    total = parse_budget(budget, resident.total + problem.eager.peak_bytes)
    room = None if total.bytes is None else max(total.bytes - resident.total, 0)
    report(f"solving ({solver})", 0.7)
    solution = solve(
        problem.graph, room, time_limit=time_limit, progress=lambda text, f: report(text, 0.7 + 0.28 * f)
    )
    if not solution.feasible:
        assert total.bytes is not None
        least = resident.total + solution.peak_bytes
        raise InfeasibleBudget(
            f"budget {total.text} is {format_bytes(total.bytes)}, but the least that {solution.solver} reaches is "
            f"{format_bytes(least)} ({least:,} bytes), of which {format_bytes(resident.total)} are parameters, "
            "buffers, inputs and optimizer state",
            minimum_bytes=least,
            budget_bytes=total.bytes,
        )
    made = _make_plan(
        model, step, captured, problem, solution, resident, target, total, meter, capture_seconds
    )
    report("planned", 1.0)
    return made


def auto_checkpoint(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | str,
    **options: Any,
) -> torch.nn.Module:
    """Plan and install in one call: ``plan(model, args, kwargs, budget=budget, ...).apply(model)``.

    Returns:
        The same module, training within the budget.
    """
    return apply(plan(model, args, kwargs, budget=budget, **options), model)


def find_solver(name: str) -> Solve:
    """The solver of a name; "auto" is the best there is.

    Raises:
        SolverError: If there is none; the message lists them.
    """
    if name == "auto" and "auto" not in SOLVERS:
        return SOLVERS["sqrt_n"]
    if name not in SOLVERS:
        raise SolverError(
            f"there is no solver {name!r}; expected one of {', '.join(sorted({*SOLVERS, 'auto'}))}"
        )
    return SOLVERS[name]


# ---- putting the plan together ------------------------------------------------------------------------


def _make_plan(
    model: torch.nn.Module, step: Step, captured: CapturedStep, problem: Problem, solution: Solution,
    resident: Resident, target: Device, budget: Any, meter: WorkspaceMeter | None, capture_seconds: float,
) -> Plan:  # fmt: skip
    graph = problem.graph
    timeline = simulate(graph, solution.schedule)
    nothing = simulate(graph, graph.base_schedule)
    planned = [g for g in captured.graphs if g.joint is not None]
    rung: Literal["one-graph", "several-graphs"] = "one-graph" if len(planned) == 1 else "several-graphs"
    forward_steps = graph.forward_length
    eager_forward = sum(not e.backward for e in captured.eager.events)

    def footprint(peak: int, seconds: float) -> Footprint:
        return Footprint(
            peak_bytes=resident.total + peak, dynamic_peak_bytes=peak, resident_bytes=resident.total, seconds=seconds
        )  # fmt: skip

    notes = list(captured.notes)
    if meter is not None and meter.failures:
        notes.append(f"workspace of {len(meter.failures)} operations could not be measured and counts as 0")
    return Plan(
        created_with={
            "planner": solvers.__dict__.get("__version__", "0.1.0"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        rung=rung,
        model=ModelRecord(
            class_name=class_name(model),
            training=model.training,
            inputs=_input_records(step),
            parameter_count=sum(p.numel() for p in model.parameters()),
            state_digest=state_digest(model),
            autocast=_autocast(),
            torch_version=torch.__version__,
        ),
        target=Target(
            budget_bytes=budget.bytes,
            budget_text=budget.text,
            device=target.name,
            costs="roofline",
            workspace="measured" if meter is not None else "none",
        ),
        solver=SolverRecord(
            name=solution.solver,
            status=str(solution.status),
            gap=solution.gap,
            bound_seconds=solution.bound_seconds,
            solve_seconds=solution.solve_seconds,
            capture_seconds=capture_seconds,
        ),
        resident=resident,
        predicted=footprint(timeline.peak_bytes, timeline.seconds),
        baseline=footprint(problem.eager.peak_bytes, problem.eager.seconds),
        no_recompute=footprint(nothing.peak_bytes, nothing.seconds),
        graphs=_graph_records(captured, problem, solution),
        timeline=Timeline.downsample(timeline.step_bytes, forward_steps),
        baseline_timeline=Timeline.downsample(problem.eager.step_bytes, eager_forward),
        peak_holders=_holders(problem, solution, timeline.peak_step),
        notes=notes,
    )


def _graph_records(captured: CapturedStep, problem: Problem, solution: Solution) -> list[GraphRecord]:
    sequences = problem.backward_sequences(captured, solution.schedule)
    cost: dict[tuple[int, int], float] = {}
    size: dict[tuple[int, int], int] = {}
    for row, source in enumerate(problem.sources):
        if source.graph >= 0:
            key = (source.graph, source.op)
            cost[key] = problem.graph.ops[row].seconds
            outputs = problem.graph.ops[row].outputs
            size[key] = sum(
                problem.graph.values[v].bytes for v in outputs if not problem.graph.values[v].on_demand
            )
    kept = _kept(problem, solution)
    records = []
    for index, (captured_graph, backward) in enumerate(zip(captured.graphs, sequences, strict=True)):
        joint = captured_graph.joint
        if joint is None:
            continue
        ops = [
            OpRecord(
                name=op.name,
                module=op.module,
                bytes=size.get((index, op.index), 0),
                phase="backward" if op.backward else "forward",
                seconds=cost.get((index, op.index), 0.0),
            )
            for op in joint.ops
        ]
        records.append(
            GraphRecord(
                fingerprint=joint.fingerprint,
                structure=captured_graph.structure,
                unused_outputs=list(captured_graph.unused_outputs),
                ops=ops,
                backward=backward,
                kept=kept.get(index, []),
            )
        )
    return records


def _kept(problem: Problem, solution: Solution) -> dict[int, list[int]]:
    """For each captured graph the forward operations whose results live on into the backward."""
    graph = problem.graph
    lives = lifetimes(graph, solution.schedule)
    first = np.append(True, lives.value[1:] != lives.value[:-1])
    outlive = first & (lives.start < graph.forward_length) & (lives.end >= graph.forward_length)
    kept: dict[int, set[int]] = {}
    for value in lives.value[outlive].tolist():
        source = problem.sources[int(graph.producer[value])]
        if source.graph >= 0:
            kept.setdefault(source.graph, set()).add(source.op)
    return {index: sorted(ops) for index, ops in kept.items()}


def _holders(problem: Problem, solution: Solution, step: int) -> list[Holder]:
    graph = problem.graph
    by_module: dict[str, int] = {}
    for value in alive_at(graph, solution.schedule, step).tolist():
        module = graph.ops[int(graph.producer[value])].module
        by_module[module] = by_module.get(module, 0) + graph.values[value].bytes
    return [Holder(module=m, bytes=b) for m, b in sorted(by_module.items(), key=lambda item: -item[1])]


def _resident(captured: CapturedStep, optimizer: Optimizer | None, model: torch.nn.Module) -> Resident:
    def size(tensors: Sequence[torch.Tensor]) -> int:
        return sum(int(t.untyped_storage().nbytes()) for t in unique_storages(tensors))

    return Resident(
        parameter_bytes=size(captured.parameters),
        buffer_bytes=size(captured.buffers),
        input_bytes=size(captured.inputs),
        gradient_bytes=0,
        optimizer_bytes=optimizer_state_bytes(optimizer, model),
    )


def _input_records(step: Step) -> list[TensorRecord]:
    leaves, _ = pytree.tree_flatten_with_path((step.args, dict(step.kwargs)))
    records = []
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            where = ("args" if path[0] == pytree.SequenceKey(0) else "kwargs") + pytree.keystr(path[1:])
            records.append(
                TensorRecord(
                    path=where,
                    shape=list(leaf.shape),
                    dtype=str(leaf.dtype).removeprefix("torch."),
                    device=str(leaf.device),
                    requires_grad=leaf.requires_grad,
                )
            )
    return records


def _autocast() -> list[str]:
    return [
        f"{kind}:{str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}"
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]


def _device_of(model: torch.nn.Module, step: Step) -> torch.device:
    for tensor in [*model.parameters(), *model.buffers(), *tensors_in((step.args, dict(step.kwargs)))]:
        return tensor.device
    return torch.device("cpu")


def _meter(target: Device, model: torch.nn.Module, step: Step) -> WorkspaceMeter | None:
    here = _device_of(model, step)
    if here.type in ("cpu", "cuda") and target.name == find_device(None, here).name:
        return WorkspaceMeter(here)
    return None
