"""What was measured on a GPU beside what was predicted: the rows, what they say, and the table of them."""

from dataclasses import dataclass, replace
from typing import Any

from planner.planfile.budget import format_bytes


@dataclass(frozen=True)
class Row:
    """One way to run one model's step.

    Attributes:
        way: "unplanned", "plan 60%", "checkpoint per block", "compile", "compile 0.5", "inductor 60%",
            "recorded 80%", "inductor-recorded 80%", "split min", "offload 60%", and others of these.
        predicted_bytes, measured_bytes: Peak of allocated bytes over entry, each block as large as was asked
            for, rounded up to 512; no prediction for peers.
        unsplit_bytes: How much more ``torch.cuda.max_memory_allocated`` counts.
        reserved_bytes: What the caching allocator reserved in all for two steps; None on the CPU.
        predicted_reserved_bytes: What that was predicted to be.
        otherwise_reserved_bytes: What it reserved of plans without their arena, and of the unplanned
            step with one.
        replayed_bytes: What the simulated allocator reserves for the events of these steps, as recorded.
        budget_bytes, total_bytes: Of a plan: the budget, and what the step measured against it.
        predicted_overhead, measured_overhead: Extra time over the unplanned step: 0.1 is 10 %.
        right: Whether loss, gradients, buffers and random states are the unplanned step's; None where
            they were not compared.
        problem: What went wrong, out of memory say; where nothing was measured, why.
    """

    model: str
    precision: str
    way: str
    measured_bytes: int | None = None
    predicted_bytes: int | None = None
    unsplit_bytes: int | None = None
    reserved_bytes: int | None = None
    predicted_reserved_bytes: int | None = None
    otherwise_reserved_bytes: int | None = None
    replayed_bytes: int | None = None
    budget_bytes: int | None = None
    total_bytes: int | None = None
    seconds: float | None = None
    predicted_overhead: float | None = None
    measured_overhead: float | None = None
    right: bool | None = None
    problem: str = ""

    def with_times(self, other: "Row") -> "Row":
        """This row with the times of another, and what went wrong there."""
        problems = dict.fromkeys(filter(None, [self.problem, other.problem]))
        return replace(
            self,
            seconds=other.seconds,
            measured_overhead=other.measured_overhead,
            problem="; ".join(problems),
        )


def judged(rows: list[Row]) -> dict[str, Any]:
    """What the rows say of the promises: how far memory and time are off, and whether budgets hold."""
    memory = [r for r in rows if r.predicted_bytes and r.measured_bytes]
    errors = [
        r.predicted_bytes / r.measured_bytes - 1 for r in memory if r.predicted_bytes and r.measured_bytes
    ]
    reserved = [
        r.predicted_reserved_bytes / r.reserved_bytes - 1
        for r in rows
        if r.predicted_reserved_bytes and r.reserved_bytes
    ]
    replayed = [
        r.replayed_bytes / r.reserved_bytes - 1 for r in rows if r.replayed_bytes and r.reserved_bytes
    ]
    times = [
        abs(r.predicted_overhead - r.measured_overhead)
        for r in rows
        if r.predicted_overhead is not None and r.measured_overhead is not None
    ]
    over = [
        f"{r.model} {r.precision} {r.way}"
        for r in rows
        if r.budget_bytes is not None and r.total_bytes is not None and r.total_bytes > r.budget_bytes
    ]
    return {
        "largest_memory_error": max(map(abs, errors), default=None),
        "most_below_measured": -min([*errors, 0.0]),
        "largest_reserved_error": max(map(abs, reserved), default=None),
        "largest_replayed_error": max(map(abs, replayed), default=None),
        "over_budget": over,
        "largest_overhead_error": max(times, default=None),
        "failed": [f"{r.model} {r.precision} {r.way}" for r in rows if r.problem],
        "wrong": [f"{r.model} {r.precision} {r.way}" for r in rows if r.right is False],
    }


def table(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = [Row(**row) for row in document["rows"]]
    found = document["judged"]
    lines = [
        f"# Predicted and measured on {document['device']}",
        "",
        f"Made by `python benchmarks/gpu.py` with torch {document['torch']}, in {document['seconds']:.0f} s.",
        "Memory is the peak of allocated bytes that forward and backward add to what is there before, by",
        "the allocator's own events: each block as large as was asked for, rounded up to 512. Unsplit is",
        "how much more `torch.cuda.max_memory_allocated` counts: what the caching allocator does not split",
        "off its blocks. Reserved is all that it has, of plans with their arena; otherwise, of plans",
        "without it, and of the unplanned step with one (`planner.reserve`). Replayed is what its simulation",
        "reserves for the events that it recorded. Seconds are of a step among five in a row, between two",
        "waits for the GPU.",
        *_calibrated(document.get("calibration")),
        "",
        "| model | precision | way | predicted | measured | error | unsplit | reserved, predicted | reserved "
        "| otherwise | replayed | seconds | predicted overhead | overhead | right | problem |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        both = row.predicted_bytes and row.measured_bytes
        error = f"{row.predicted_bytes / row.measured_bytes - 1:+.2%}" if both else ""  # type: ignore[operator]
        lines.append(
            f"| {row.model} | {row.precision} | {row.way} | {_bytes(row.predicted_bytes)} "
            f"| {_bytes(row.measured_bytes)} | {error} | {_bytes(row.unsplit_bytes)} "
            f"| {_bytes(row.predicted_reserved_bytes)} "
            f"| {_bytes(row.reserved_bytes)} | {_bytes(row.otherwise_reserved_bytes)} "
            f"| {_bytes(row.replayed_bytes)} "
            f"| {'' if row.seconds is None else f'{row.seconds:.4f}'} "
            f"| {_share(row.predicted_overhead)} | {_share(row.measured_overhead)} "
            f"| {'' if row.right is None else 'yes' if row.right else 'no'} "
            f"| {row.problem.replace('|', '/')} |"
        )
    lines += [
        "",
        f"Largest error of memory {_share(found['largest_memory_error'])}, at most "
        f"{found['most_below_measured']:.2%} below what was measured. Largest error of reserved memory: "
        f"{_share(found['largest_reserved_error']) or 'none measured'}; of the simulated allocator on "
        f"recorded events: {_share(found['largest_replayed_error']) or 'none recorded'}. Over budget: "
        f"{', '.join(found['over_budget']) or 'none'}. Largest error of overhead: "
        f"{_share(found['largest_overhead_error'])} of the unplanned step. Wrong: "
        f"{', '.join(found['wrong']) or 'none'}. Failed: {', '.join(found['failed']) or 'none'}.",
    ]
    if document["running"]:
        lines.append(f"Not finished: {document['running']} was running when this was written.")
    if document["left_out"]:
        lines.append(f"Left out, because the time was up: {', '.join(document['left_out'])}.")
    return "\n".join(lines) + "\n"


def _calibrated(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    if "error" in found:
        return ["", f"Not calibrated: {found['error']}."]
    flops = ", ".join(f"{name} {figure / 1e12:,.2f}" for name, figure in found["measured"]["flops"].items())
    return [
        "",
        f"Calibrated: {found['bandwidth'] / 1e9:,.1f} GB/s; TFLOP/s {flops}; a launch "
        f"{found['launch_seconds'] * 1e6:.2f} us; libraries {format_bytes(found['library_bytes'])}; context "
        f"{format_bytes(found['context_bytes'])}.",
    ]


def _bytes(amount: int | None) -> str:
    return "" if amount is None else format_bytes(amount)


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"
