"""The data of a plan's page: columns of numbers, with names given once."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.errors import PlanFileError, PlannerError
from planner.planfile.budget import format_bytes
from planner.planfile.plan import PlanRecord
from planner.planfile.simulated import SimulatedPlan
from planner.report.explanation import Explainer
from planner.report.explanation_text import moment_text, sentences, short_name
from planner.report.text import format_seconds
from planner.report.undroppable import peak_parts
from solvers.model.indices import RowId, base_op, listed

_GROUPS = 6
_SHOWN = 0.85
"""The share of the forward's bytes that modules with a colour of their own should reach."""
_BACKWARD = "results of the backward (gradients)"
_OTHERS = "other modules"


class FrontierError(PlannerError, ValueError):
    """The plans of a frontier are of different models."""


def page_data(plan: PlanRecord, frontier: Sequence[PlanRecord] = ()) -> dict[str, Any]:
    """The data of a plan's page.

    Args:
        plan: The plan.
        frontier: Plans of a sweep of the same model, to show what other budgets cost.

    Raises:
        PlanFileError: The plan does not say what its operations read, as those of earlier releases.
        FrontierError: A plan of the frontier is of another model.
    """
    for other in frontier:
        if other.model.state_digest != plan.model.state_digest:
            raise FrontierError(
                f"the frontier has a plan of another model ({other.model.class_name}; this one is of "
                f"{plan.model.class_name}, or has other parameters): give plans of one sweep"
            )
    explainer = Explainer(plan)
    sim = explainer.simulated
    names, modules, lines = _Names(), _Names(), _Names()
    graph = sim.graph
    records = [sim.record(row) for row in range(graph.base_length)]
    lives = sim.lives
    shown = ~graph.on_demand[lives.value] | lives.used
    base = graph.base_of[sim.schedule]
    runs = np.bincount(base[sim.reruns], minlength=graph.base_length)
    forward = graph.forward_length
    outlive = lives.used & (lives.start < forward) & (lives.end >= forward)
    kept = np.zeros(graph.base_length, dtype=np.int64)
    np.add.at(kept, graph.producer[lives.value[outlive]], graph.bytes[lives.value[outlive]])
    groups, group_of = _groups(sim)
    return {
        "model": plan.model.class_name,
        "facts": _facts(plan),
        "story": story(explainer),
        "words": [list(pair) for pair in sentences(explainer.module(""))],
        "notes": list(plan.notes),
        "peak": {"step": sim.timeline.peak_step, "bytes": sim.timeline.peak_bytes},
        "resident": plan.resident.total,
        "room": sim.room_bytes,
        "overhead": plan.overhead,
        "forward": forward,
        "unplanned": {
            "bytes": plan.baseline_timeline.bytes,
            "forward": plan.baseline_timeline.forward_length,
            "peak": plan.baseline.dynamic_peak_bytes,
        },
        "groups": groups,
        "ops": {
            "name": [names.of(short_name(record.name)) for record in records],
            "module": [modules.of(record.module) for record in records],
            "line": [lines.of(sim.line(row)) for row in range(graph.base_length)],
            "bytes": [record.bytes for record in records],
            "seconds": [float(f"{record.seconds:.4g}") for record in records],
            "kept": kept.tolist(),
            "runs": runs.tolist(),
            "group": group_of,
        },
        "names": names.all,
        "modules": modules.all,
        "lines": lines.all,
        "schedule": base.tolist(),
        "live": sim.timeline.step_bytes.tolist(),
        "values": {
            "op": graph.producer[lives.value[shown]].tolist(),
            "bytes": graph.bytes[lives.value[shown]].tolist(),
            "start": lives.start[shown].tolist(),
            "end": lives.end[shown].tolist(),
        },
        "link": _link(sim),
        "frontier": [_point(other) for other in frontier],
        "own_point": _point(plan),
    }


def _link(sim: SimulatedPlan) -> list[dict[str, Any]]:
    """The results that the link carries, in the order of the forward, each on its way to the host and back.

    A result goes to the host from the step that makes it, or takes it from another graph, to the step at
    which it has arrived. It comes back from the step that begins to fetch it to the first that reads it. It
    takes the given bytes of the device's memory until it has arrived, and again once the fetch begins.
    """
    if sim.plan.target.offload == "none":
        return []
    graph, rows = sim.graph, listed(RowId, sim.schedule)
    packed = [[frozenset(run.packed) for run in record.by_execution] for record in sim.plan.graphs]
    found: list[dict[str, Any]] = []
    for row, (of, execution, op) in enumerate(sim.step.places()[: graph.forward_length]):
        if of < 0 or op not in packed[of][execution]:
            continue
        again = graph.rerun(base_op(row))
        try:
            (kept,), (fetched,) = graph.ops[again].inputs, graph.ops[again].outputs
            complete = base_op(int(graph.producer[kept]))
            (sent,) = graph.ops[complete].inputs
        except ValueError:
            message = f"operation {op} is not fetched by what `step.replays` says; plan again"
            raise PlanFileError(f"plan: graphs[{of}].packed: {message}") from None
        found.append({"bytes": graph.values[sent].bytes, "to": [row, complete], "back": []})
        for step in (i for i, other in enumerate(rows) if other == again):
            readers = (i for i in range(step + 1, len(rows)) if fetched in graph.ops[rows[i]].inputs)
            found[-1]["back"].append([step, next(readers, step)])
    return found


def story(explainer: Explainer) -> list[str]:
    """What a plan does, in sentences for somebody who sees one for the first time."""
    sim, plan = explainer.simulated, explainer.simulated.plan
    parts, moment = peak_parts(sim), explainer.binding
    before, after = plan.baseline.dynamic_peak_bytes, parts.total_bytes
    reruns = len(set(sim.graph.base_of[sim.schedule[sim.reruns]].tolist()))
    place, there = plan.target.offload, 0 if plan.whole_step is None else plan.whole_step.host_bytes
    fetched = sum(len(run.packed) for g in plan.graphs for run in g.by_execution) if there else 0
    sentences = [
        f"Parameters, inputs, optimizer state and whatever else is there throughout take "
        f"{format_bytes(plan.resident.total)}. Beside these, a training step as PyTorch runs it holds up to "
        f"{format_bytes(before)}; with this plan {format_bytes(after)}.",
        f"For that the backward runs {reruns - fetched} of {sim.graph.forward_length} operations of the "
        "forward again, "
        f"which takes {format_seconds(max(sim.timeline.seconds - plan.no_recompute.seconds, 0.0))} "
        f"({plan.overhead:+.1%}).",
        f"Memory is highest at {moment_text(moment)}.",
        f"No plan can drop {format_bytes(parts.undroppable_bytes)} of the {format_bytes(after)} there: "
        f"{format_bytes(parts.operand_bytes)} are what this operation itself reads and makes, "
        f"{format_bytes(parts.backward_bytes)} other gradients and results of the backward that are needed "
        f"later, {format_bytes(parts.held_bytes)} other results that are held from outside, as the model's "
        f"outputs are, or cannot be recomputed. The other {format_bytes(parts.kept_bytes)} are kept because "
        "that is faster and the budget allows it.",
    ]
    if fetched:
        sentences.insert(
            1, f"The backward fetches {fetched} results, {format_bytes(there)}, from the {place}."
        )
    largest = _largest(sim)
    if largest:
        sentences.append(f"Largest there: {', '.join(largest)}.")
    return sentences


def _largest(sim: SimulatedPlan, most: int = 3) -> list[str]:
    lives, step = sim.lives, sim.timeline.peak_step
    alive = np.flatnonzero((lives.start <= step) & (step <= lives.end))
    size: Counter[tuple[str, str]] = Counter()
    for value in lives.value[alive].tolist():
        record = sim.record(int(sim.graph.producer[value]))
        size[short_name(record.name), record.module or "(the model)"] += sim.graph.values[value].bytes
    return [f"{name} of {module}, {format_bytes(total)}" for (name, module), total in size.most_common(most)]


def _facts(plan: PlanRecord) -> list[list[str]]:
    target, solver, before, after = plan.target, plan.solver, plan.baseline, plan.predicted
    least = target.budget_bytes is None
    budget = "the least that can be reached" if least else format_bytes(target.budget_bytes or 0)
    gap = "" if solver.gap is None else f"; at most {solver.gap:.2%} slower than possible"
    return [
        ["budget", f"{budget} ({target.budget_text}) on {target.device}"],
        ["peak", f"{format_bytes(after.peak_bytes)} (unplanned {format_bytes(before.peak_bytes)})"],
        ["of the step alone", f"{format_bytes(after.dynamic_peak_bytes)} "
         f"(unplanned {format_bytes(before.dynamic_peak_bytes)})"],
        ["time", f"{format_seconds(after.seconds)}, {plan.overhead:+.1%} ({target.costs})"],
        ["solver", f"{solver.name}, {solver.status}{gap}"],
    ]  # fmt: skip


def _groups(sim: SimulatedPlan) -> tuple[list[str], list[int]]:
    """Groups that the timeline stacks bytes by: the largest kinds of modules, alike layers as one kind.

    Kinds are as fine as possible while the largest still cover most bytes.

    Returns:
        The names of the groups, and the group of each operation.
    """
    graph, lives = sim.graph, sim.lives
    modules = [
        re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", sim.record(row).module).split(".")
        for row in range(graph.forward_length)
    ]
    # Bytes times the steps that they are alive: a kind's area in the picture.
    area = np.zeros(graph.base_length, dtype=np.int64)
    producers = graph.producer[lives.value]
    np.add.at(area, producers, graph.bytes[lives.value] * (lives.end - lives.start + 1))
    largest: list[str] = []
    kinds: list[str] = []
    most = -1
    for depth in range(max(map(len, modules), default=0), 0, -1):
        tried = [".".join(module[:depth]) or "(the model)" for module in modules]
        weight: Counter[str] = Counter()
        for kind, size in zip(tried, area.tolist(), strict=False):
            weight[kind] += size
        found = weight.most_common(_GROUPS)
        shown = sum(size for _, size in found)
        if not kinds or (len(found) > 1 and shown > most):
            largest, kinds, most = [kind for kind, _ in found], tried, shown
        if shown >= _SHOWN * weight.total():
            break
    names = [_BACKWARD, *largest]
    if len(set(kinds)) > len(largest):
        names.append(_OTHERS)
    index = {name: i for i, name in enumerate(names)}
    backward = [0] * (graph.base_length - graph.forward_length)
    return names, [index.get(kind, len(names) - 1) for kind in kinds] + backward


def _point(plan: PlanRecord) -> dict[str, Any]:
    overhead = plan.overhead if math.isfinite(plan.overhead) else 0.0
    return {"peak": plan.predicted.peak_bytes, "overhead": overhead, "budget": plan.target.budget_text}


class _Names:
    """Texts by number."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}

    def of(self, name: str) -> int:
        return self._number.setdefault(name, len(self._number))

    @property
    def all(self) -> list[str]:
        return list(self._number)
