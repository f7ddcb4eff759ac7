"""Two plans side by side: what they promise, and which modules they treat differently."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

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
    """How many modules this is: bytes and seconds are of each."""
    first: Treatment
    second: Treatment


def different_modules(first: PlanRecord, second: PlanRecord) -> list[DifferentModule]:
    """The modules that two plans treat differently, those first whose kept bytes differ most."""
    before, after = _treatments(first), _treatments(second)
    alike: Counter[tuple[str, Treatment, Treatment]] = Counter()
    names: dict[tuple[str, Treatment, Treatment], str] = {}
    for module in dict.fromkeys([*before, *after]):
        pair = before.get(module, Treatment()), after.get(module, Treatment())
        if (pair[0].kept_bytes, pair[0].rerun_ops) == (pair[1].kept_bytes, pair[1].rerun_ops):
            continue
        key = (re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", module), *pair)
        alike[key] += 1
        names.setdefault(key, module)
    found = [
        DifferentModule(key[0] if count > 1 else names[key], count, key[1], key[2])
        for key, count in alike.items()
    ]
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


def _treatments(plan: PlanRecord) -> dict[str, Treatment]:
    kept_bytes: Counter[str] = Counter()
    reruns: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for graph in (execution for each in plan.graphs for execution in each.by_execution):
        for op in graph.ops[: graph.forward_length]:
            seconds.setdefault(op.module, 0.0)
        for index in graph.kept:
            kept_bytes[graph.ops[index].module] += graph.ops[index].bytes
        for index in graph.recomputed:
            reruns[graph.ops[index].module] += 1
        for index in graph.backward:
            if index < graph.forward_length:
                seconds[graph.ops[index].module] += graph.ops[index].seconds
    return {m: Treatment(kept_bytes[m], reruns[m], taken) for m, taken in seconds.items()}
