"""Two plans side by side: what they promise, and which modules they treat differently."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from rich.console import Group, RenderableType
from rich.text import Text

from planner.errors import printable
from planner.planfile.budget import format_bytes
from planner.planfile.plan import PlanRecord
from planner.report.columns import Cell, fitted_table
from planner.report.text import format_seconds

_MOST = 40


@dataclass(frozen=True)
class Treatment:
    """What a plan does with the operations that a module runs itself."""

    kept_bytes: int = 0
    rerun_ops: int = 0
    rerun_seconds: float = 0.0


@dataclass(frozen=True)
class DifferentModule:
    """A module, or the same one of several layers, that two plans treat differently."""

    module: str
    count: int
    """How many modules this is: bytes are of each, seconds on average."""
    first: Treatment
    second: Treatment


def different_modules(first: PlanRecord, second: PlanRecord) -> list[DifferentModule]:
    """The modules that two plans treat differently, those first whose kept bytes differ most."""
    plans = _treatments(first), _treatments(second)
    alike: dict[object, list[str]] = {}
    for module in dict.fromkeys([*plans[0], *plans[1]]):
        # Times are left out: measured ones differ between layers that are treated alike.
        one, other = ((t.kept_bytes, t.rerun_ops) for t in (of.get(module, Treatment()) for of in plans))
        if one != other:
            pattern = re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", module)
            alike.setdefault((pattern, one, other), []).append(module)
    found = []
    for modules in alike.values():
        name = re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", modules[0]) if len(modules) > 1 else modules[0]
        pair = (_mean([of.get(module, Treatment()) for module in modules]) for of in plans)
        found.append(DifferentModule(name, len(modules), *pair))
    return sorted(found, key=lambda d: -abs(d.first.kept_bytes - d.second.kept_bytes) * d.count)


def render_difference(
    first: PlanRecord, second: PlanRecord, names: tuple[str, str], *, width: int = 100
) -> Group:
    """Lay out two plans side by side, for `rich.print`.

    Args:
        first: A plan.
        second: Another.
        names: The names to call them by.
        width: Characters that a line may take.
    """
    short = [printable(name) for name in names]
    rows: list[tuple[Cell, ...]] = []
    for label, a, b in _facts(first, second):
        rows.append((label, a, b) if a == b else (Text(label, style="bold"), a, b))
    parts: list[RenderableType] = [fitted_table(("", *short), rows, width=width, folded=True)]
    if first.model.state_digest != second.model.state_digest:
        parts.insert(0, Text("the plans are of different models", style="bold red"))
    different = different_modules(first, second)
    parts.append(Text())
    if not different:
        parts.append(Text("they keep and recompute the same of every module"))
        return Group(*parts)
    headers = ("treated differently", "kept", "kept ", "re-run", "re-run ", "time added", "time added ")
    cells: list[tuple[Cell, ...]] = []
    for row in different[:_MOST]:
        name = printable(row.module or "(the model)") + (f" x{row.count}" if row.count > 1 else "")
        pairs = (row.first, row.second)
        cells.append(
            (
                Text(name),
                *(format_bytes(t.kept_bytes) if t.kept_bytes else "-" for t in pairs),
                *(str(t.rerun_ops or "-") for t in pairs),
                *(format_seconds(t.rerun_seconds) if t.rerun_ops else "-" for t in pairs),
            )
        )
    if len(different) > _MOST:
        cells.append((Text(f"... and {len(different) - _MOST} more"), *[""] * 6))
    parts.append(fitted_table(headers, cells, width=width, least=("time added ", "time added")))
    return Group(*parts)


def difference(first: PlanRecord, second: PlanRecord) -> dict[str, object]:
    """The difference of two plans as plain data."""
    return {
        "same_model": first.model.state_digest == second.model.state_digest,
        "peak_bytes": [first.predicted.peak_bytes, second.predicted.peak_bytes],
        "seconds": [first.predicted.seconds, second.predicted.seconds],
        "overhead": [first.overhead, second.overhead],
        "modules": [
            {
                "module": row.module,
                "count": row.count,
                "kept_bytes": [row.first.kept_bytes, row.second.kept_bytes],
                "rerun_ops": [row.first.rerun_ops, row.second.rerun_ops],
                "rerun_seconds": [row.first.rerun_seconds, row.second.rerun_seconds],
            }
            for row in different_modules(first, second)
        ],
    }


def _facts(first: PlanRecord, second: PlanRecord) -> list[tuple[str, str, str]]:
    def both(name: str, of: Callable[[PlanRecord], str]) -> tuple[str, str, str]:
        return name, of(first), of(second)

    return [
        both("model", lambda p: printable(p.model.class_name)),
        both("budget", lambda p: printable(p.target.budget_text)),
        both("peak", lambda p: format_bytes(p.predicted.peak_bytes)),
        both("  of the step", lambda p: format_bytes(p.predicted.dynamic_peak_bytes)),
        both("  resident", lambda p: format_bytes(p.resident.total)),
        both("unplanned peak", lambda p: format_bytes(p.baseline.peak_bytes)),
        both("time", lambda p: format_seconds(p.predicted.seconds)),
        both("extra time", lambda p: f"{p.overhead:+.1%}"),
        both("re-run operations", lambda p: str(p.recomputed_operations)),
        both("solver", lambda p: f"{p.solver.name}, {p.solver.status}"),
        both("device", lambda p: printable(p.target.device)),
        both("made with", lambda p: ", ".join(f"{k} {v}" for k, v in p.created_with.items())),
    ]


def _mean(alike: list[Treatment]) -> Treatment:
    return replace(alike[0], rerun_seconds=fmean(treatment.rerun_seconds for treatment in alike))


def _treatments(plan: PlanRecord) -> dict[str, Treatment]:
    kept_bytes: Counter[str] = Counter()
    reruns: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for graph in (execution for each in plan.graphs for execution in each.by_execution):
        forward, packed = graph.ops[: graph.forward_length], set(graph.packed)
        for index, op in enumerate(forward):
            seconds.setdefault(op.module, 0.0)
            if index in packed and plan.target.offload == "none":
                kept_bytes[op.module] += (op.bytes + 7) // 8
        for index in graph.kept:
            kept_bytes[graph.ops[index].module] += graph.ops[index].bytes
        # What is packed is unpacked or fetched, not run again.
        again = [index for index in graph.backward if index < len(forward) and index not in packed]
        for index in set(again):
            reruns[graph.ops[index].module] += 1
        for index in again:
            seconds[graph.ops[index].module] += graph.ops[index].seconds
    return {m: Treatment(kept_bytes[m], reruns[m], taken) for m, taken in seconds.items()}
