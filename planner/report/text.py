"""A plan for a terminal: summary, timeline, and by module the operations that are kept and re-run."""

import io
import itertools
import math
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from planner.errors import printable
from planner.planfile.budget import format_bytes
from planner.planfile.plan import PlanRecord, Timeline
from planner.report.columns import Cell, fitted_table
from planner.report.modules import ModuleRow, folded_holders, folded_names, module_rows

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_MOST_ROWS = 80
_HTML = (
    '<pre style="white-space: pre; overflow-x: auto; line-height: 1.2; font-family: monospace">{code}</pre>'
)
_COVERAGES = {
    "one-graph": "as one graph",
    "several-graphs": "as several graphs",
    "partly-captured": "in part: graphs, and operations between them that run as written",
    "replayed": "as it runs, operator by operator",
}


def render(plan: PlanRecord, *, width: int = 100, chart: bool = True) -> Group:
    """Lay out a plan in full, for `rich.print`.

    Args:
        plan: The plan.
        width: Characters that a line may take.
        chart: Whether to draw the timeline in characters.
    """
    parts: list[RenderableType] = [summary(plan, width=width), Text()]
    if chart:
        parts += [timeline_chart(plan, width=width), Text()]
    parts += [module_table(plan, width=width), Text(), holder_table(plan, width=width)]
    return Group(*parts, *notes(plan))


def render_summary(plan: PlanRecord) -> Group:
    """Lay out a plan without the chart and the table of its peak."""
    return Group(summary(plan), Text(), module_table(plan), *notes(plan))


def notes(plan: PlanRecord) -> list[RenderableType]:
    """The plan's notes, a line each."""
    return [Text(f"note: {printable(note)}") for note in plan.notes]


class Visible:
    """Shows something without links, and with characters written out that move the cursor, hide or turn text.

    Names in plan files may contain such characters.
    """

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self._content, options.update(markup=False)):
            if not control:
                unlinked = style.update_link(None) if style is not None and style.link else style
                yield Segment(printable(text, keep="\n"), unlinked)


def as_text(content: RenderableType, *, width: int = 100) -> str:
    """The output of `rich.print` as text without colours."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(Visible(content))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def as_html(content: RenderableType, *, width: int = 100) -> str:
    """The output of `rich.print` as HTML for a notebook."""
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(Visible(content))
    return console.export_html(inline_styles=True, code_format=_HTML)


def summary(plan: PlanRecord, *, width: int = 100) -> Table:
    """The model, the budget, the solver, and the predicted memory and time."""
    footprints = (plan.baseline, plan.no_recompute, plan.predicted)
    rows = [
        ("peak", *(_share(item.peak_bytes, plan.baseline.peak_bytes) for item in footprints)),
        ("  of the step", *(format_bytes(item.dynamic_peak_bytes) for item in footprints)),
        ("  resident", *(format_bytes(item.resident_bytes) for item in footprints)),
        *_on_the_device(plan),
        ("time", *(format_seconds(item.seconds) for item in footprints)),
    ]
    headers = ("", "unplanned", "nothing recomputed", "planned")
    table = fitted_table(headers, rows, width=width, least=("nothing recomputed", "unplanned"))
    target, solver, model = plan.target, plan.solver, plan.model
    budget = printable(target.budget_text)
    if target.budget_bytes is not None:
        budget += f", {format_bytes(target.budget_bytes)}"
    mode = "training" if model.training else "evaluation"
    inputs = ", ".join(
        f"{item.path} {'x'.join(map(str, item.shape)) or 'scalar'}" for item in model.inputs[:6]
    )
    more = ", ..." if len(model.inputs) > 6 else ""
    gap = "" if solver.gap is None else f", at most {solver.gap:.2%} slower than possible"
    if solver.bound_seconds is not None and solver.bound_covers != "every schedule":
        gap += f" (of {solver.bound_covers})"
    packed = [graph.ops[index] for graph in plan.graphs for run in graph.by_execution for index in run.packed]
    masks = [op.bytes for op in packed if op.phase == "forward"]
    signs = len(packed) - len(masks)
    facts = {
        "model": f"{model.class_name}, {model.parameter_count:,} parameters, {mode}",
        "inputs": f"{inputs}{more}" or "none",
        "captured": f"{_COVERAGES[plan.coverage]} ({len(plan.graphs)})",
        **({"regions": ", ".join(folded_names(model.regions))} if model.regions else {}),
        **({"in pieces": _in_pieces(plan)} if any(graph.split for graph in plan.graphs) else {}),
        "budget": f"{budget}, on {target.device}",
        **({"in flight": _in_flight(plan)} if target.in_flight is not None else {}),
        "extra time": f"{plan.overhead:+.1%} (costs: {target.costs}; workspace: {target.workspace})",
        "solver": f"{solver.name}, {solver.status}{gap}",
    }
    if target.offload != "none" and plan.whole_step is not None:
        there = format_bytes(plan.whole_step.host_bytes)
        facts[f"on the {target.offload}"] = f"{len(masks)} results, {there}, until the backward fetches them"
    elif packed:
        of_masks = (
            f"{len(masks)} masks, as {format_bytes(sum((m + 7) // 8 for m in masks))} of bits "
            f"instead of {format_bytes(sum(masks))}"
        )
        of_signs = f"the signs of {signs} results of ReLU, a bit for each element"
        facts["packed"] = "; ".join([of_masks] * bool(masks) + [of_signs] * bool(signs))
    if solver.solve_seconds is not None and solver.capture_seconds is not None:
        capture, solve = format_seconds(solver.capture_seconds), format_seconds(solver.solve_seconds)
        facts["solver"] += f", in {solve} after {capture} of capture"
    outer = Table.grid(padding=(0, 2))
    outer.add_column(no_wrap=True)
    outer.add_column(overflow="fold")
    for name, fact in facts.items():
        outer.add_row(Text(name, style="bold"), Text(printable(fact)))
    stacked = Table.grid()
    stacked.add_row(outer)
    stacked.add_row(Text())
    stacked.add_row(table)
    return stacked


def _on_the_device(plan: PlanRecord) -> list[tuple[str, str, str, str]]:
    """Rows for the memory of the whole step, the optimizer's included, in a GPU's caching allocator."""
    before, now = plan.baseline_whole_step, plan.whole_step
    if before is None or now is None or before.total_bytes == before.allocated_bytes:
        return []
    rows = [
        ("whole step, allocated", before.allocated_bytes, now.allocated_bytes),
        ("  reserved", before.reserved_bytes, now.reserved_bytes),
        ("  with the context", before.total_bytes, now.total_bytes),
    ]
    if now.recorded_bytes:
        rows.insert(1, ("  of recorded graphs, beside", 0, now.recorded_bytes))
    unplanned, planned = before.expandable_reserved_bytes, now.expandable_reserved_bytes
    if unplanned is not None and planned is not None:
        rows.insert(-1, ("  reserved, expandable segments", unplanned, planned))
    if now.arena and now.unarranged_reserved_bytes is not None:
        rows.insert(
            2, ("  reserved, without the arena", before.reserved_bytes, now.unarranged_reserved_bytes)
        )
    return [(name, format_bytes(a), "", format_bytes(b)) for name, a, b in rows]


def reserved_beforehand(segments: Sequence[int], without_bytes: int, with_bytes: int) -> str:
    """Text about the bytes that segments save which are reserved before the first step."""
    sizes = " and ".join(map(format_bytes, segments))
    named = f"one segment of {sizes}" if len(segments) == 1 else f"{len(segments)} segments of {sizes}"
    change = f"{format_bytes(without_bytes)} -> {format_bytes(with_bytes)} reserved"
    return f"with {named} reserved beforehand: {change}"


def timeline_chart(plan: PlanRecord, *, width: int = 100, height: int = 10) -> Text:
    """Draw live bytes over the step: the plan in blocks, the unplanned step in dots, the budget as a line."""
    columns = max(8, width - 14)
    share = plan.timeline.forward_length / len(plan.timeline.bytes)
    split = min(columns - 1, max(1, round(columns * share)))
    planned = _columns(plan.timeline, split, columns)
    unplanned = _columns(plan.baseline_timeline, split, columns)
    budget_bytes = None
    if plan.target.budget_bytes is not None:
        budget_bytes = plan.target.budget_bytes - plan.resident.total
    # Not drawn to scale with a budget far above the step: the step would be a flat line.
    highest = max(*planned, *unplanned, 1)
    drawn_budget = budget_bytes if budget_bytes is not None and budget_bytes <= 1.3 * highest else None
    top = max(highest, drawn_budget or 0)
    budget_row = None if drawn_budget is None else min(height - 1, int(drawn_budget / top * height))
    chart = Text(no_wrap=True)
    chart.append("live bytes over the step  ", style="bold")
    chart.append("█ planned", style="cyan")
    chart.append("  · unplanned", style="yellow")
    if drawn_budget is not None:
        chart.append("  ─ budget", style="red")
    for row in reversed(range(height)):
        label = format_bytes(int(top * (row + 1) / height)) if row in (height - 1, height // 2 - 1) else ""
        if row == budget_row and drawn_budget is not None:
            label = format_bytes(drawn_budget)
        chart.append(f"\n{label:>11} ┤")
        cells = [
            _cell(planned[column], unplanned[column], top, height, row, row == budget_row)
            for column in range(columns)
        ]
        for style, run in itertools.groupby(cells, key=lambda cell: cell[1]):
            chart.append("".join(character for character, _ in run), style)
    axis = "─" * split + "┴" + "─" * (columns - split - 1)
    chart.append(f"\n{'0 B':>11} └{axis}")
    chart.append(f"\n{'':>13}{'forward':<{split}}{'backward' if columns - split >= 8 else ''}")
    return chart


def module_table(plan: PlanRecord, *, width: int = 100) -> Table:
    """Operations kept and re-run, by module; layers that are treated alike share a line."""
    rows = module_rows(plan)
    kept_is_known = any(graph.kept for graph in plan.graphs)
    cells: list[tuple[Cell, ...]] = []
    for row in rows[:_MOST_ROWS]:
        share = row.share
        cells.append(
            (
                _module_label(row),
                str(share.recomputed_ops) if share.recomputed_ops else "-",
                str(share.ops),
                format_bytes(share.recomputed_bytes) if share.recomputed_ops else "-",
                format_bytes(share.kept_bytes) if kept_is_known and share.kept_bytes else "-",
                format_seconds(share.recomputed_seconds) if share.recomputed_ops else "-",
            )
        )
    if len(rows) > _MOST_ROWS:
        cells.append((Text(f"... and {len(rows) - _MOST_ROWS} more lines"),))
    headers = ("module", "re-run", "of", "bytes re-made", "kept", "extra time")
    return fitted_table(headers, cells, width=width, least=("kept", "bytes re-made", "of"))


def holder_table(plan: PlanRecord, most: int = 12, *, width: int = 100) -> Table:
    """Bytes alive at the planned peak, by module."""
    holders = folded_holders(plan, most)
    total = sum(holder.bytes for holder in holders) or 1
    rows = [
        (Text(printable(holder.module)), format_bytes(holder.bytes), f"{holder.bytes / total:.0%}")
        for holder in holders
    ]
    return fitted_table(("alive at the peak", "bytes", "share"), rows, width=width)


def format_seconds(seconds: float) -> str:
    """Write a time for people: 12.3 us, 4.56 ms, 1.2 s, 3 min."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e9:.3g} ns"


def _share(amount_bytes: int, whole_bytes: int) -> str:
    share = f" ({amount_bytes / whole_bytes:.0%})" if whole_bytes else ""
    return format_bytes(amount_bytes) + share


def _module_label(row: ModuleRow) -> Text:
    label = Text("  " * row.depth + printable(row.name))
    if row.count > 1:
        label.append(f" x{row.count}", style="dim")
    if row.recomputed_names:
        # aten._softmax.default is written as softmax.
        short = [(*name.split("."), name)[1].lstrip("_") for name in row.recomputed_names]
        more = f", {len(short) - 2} more" if len(short) > 2 else ""
        label.append(f" ({printable(', '.join(short[:2]))}{more})", style="dim")
    return label


def _in_pieces(plan: PlanRecord) -> str:
    splits = [graph.split for graph in plan.graphs if graph.split is not None]
    most = "at most " if splits[0].what == "auto" else ""
    of = [f"{s.pieces} of {run.rows:,} rows at {run.module or 'the root'}" for s in splits for run in s.runs]
    more = f" and {len(of) - 3} more" if len(of) > 3 else ""
    return f"{most}{', '.join(of[:3])}{more}; gradients in the {splits[0].form}, not equal in the last bits"


def _in_flight(plan: PlanRecord) -> str:
    # Gradients that are there at entry are those of earlier micro-batches of the same step.
    count, accumulates = plan.target.in_flight, plan.resident.gradient_bytes > 0
    batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    return f"{batches} of a pipeline, {'more follow' if accumulates else 'which are all'}"


def _columns(timeline: Timeline, split: int, columns: int) -> list[int]:
    # Forward and backward are stretched apart, so that all timelines split at the same column.
    forward, backward = timeline.bytes[: timeline.forward_length], timeline.bytes[timeline.forward_length :]
    return _stretched(forward, split) + _stretched(backward, columns - split)


def _stretched(values: list[int], columns: int) -> list[int]:
    if not values:
        return [0] * columns
    scale = len(values) / columns
    return [
        max(values[int(column * scale) : max(int(column * scale) + 1, math.ceil((column + 1) * scale))])
        for column in range(columns)
    ]


def _cell(planned: int, unplanned: int, top: int, height: int, row: int, on_budget: bool) -> tuple[str, str]:
    eighths = round(planned / top * height * 8) - 8 * row
    if eighths > 0 and not (on_budget and eighths < 3):
        return _EIGHTHS[min(8, eighths)], "cyan"
    if unplanned and row == min(height - 1, int(unplanned / top * height)):
        return "·", "yellow"
    if on_budget:
        return "─", "red"
    return " ", ""
