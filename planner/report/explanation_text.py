"""An explanation: its records, and its text."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.errors import printable
from planner.planfile.budget import format_bytes
from planner.report.columns import Cell, fitted_table
from planner.report.text import as_html, as_text, format_seconds

_MOST_RERUNS = 30
_MOST_NAMES = 6


@dataclass(frozen=True)
class Moment:
    """A step of the schedule."""

    step: int
    """Its position in the schedule, from 0."""
    of: int
    """How many steps the schedule has."""
    operation: str
    module: str
    line: str
    phase: str
    """"forward", "backward" or "recomputation"."""
    live_bytes: int
    """Bytes that are alive then, workspace included, beyond those at the entry of the training step."""


@dataclass(frozen=True)
class Rerun:
    """A forward operation that the backward runs again."""

    operation: str
    module: str
    line: str
    bytes: int
    """Bytes that it makes each time."""
    seconds: float
    """The time of all its re-runs."""
    steps: tuple[int, ...]
    """The steps of the schedule at which it is run again."""


@dataclass(frozen=True)
class Keeping:
    """The same schedule with fewer re-runs, as simulated."""

    operations: int
    """How many re-runs would be spared, those included that only these operations needed."""
    extra_bytes: int
    """Additional bytes at the plan's own peak, the moment that binds."""
    peak_bytes: int
    """The dynamic peak."""
    peak: Moment
    """The step at which it is reached, in the schedule with fewer re-runs."""
    saved_seconds: float
    fits: bool | None
    """Whether the plan's budget allows it; None where the budget was the least that can be reached."""


@dataclass(frozen=True)
class Explanation:
    """What a plan does with a module, why, and what keeping more or less would take.

    `print` and notebooks show it; `to_dict()` returns it as plain data.
    """

    module: str
    operations: int
    """Operations of its forward, with those of modules inside it."""
    kept_operations: int
    kept_bytes: int
    """Text about results that live on from the forward into the backward."""
    freed_operations: int
    """Operations whose results neither live on nor are made again: nothing of the backward reads them."""
    fixed_operations: int
    """Operations that may not be re-run: their effects, or what they read, would not be the same."""
    reruns: tuple[Rerun, ...]
    rerun_seconds: float
    plan_rerun_seconds: float
    """The time of all re-runs of the plan."""
    step_seconds: float
    """The time of the planned step."""
    binding: Moment
    """The plan's peak."""
    binding_module_bytes: int
    """Bytes of the module's results, forward and backward, that are alive then."""
    room_bytes: int | None
    """The dynamic peak that the budget allows; None where it was the least that can be reached."""
    keeping: Keeping | None
    """The schedule that keeps all of the module; None where nothing of it is re-run."""
    more: Keeping | None
    """The schedule that keeps as much of it as fits 10 % more budget, as far as tried; None if nothing."""
    more_operations: tuple[str, ...]
    """Modules or operations that `more` keeps."""
    less_bytes: int | None
    """Bytes by which the plan exceeds 10 % less budget; None where the budget was the least."""
    less_steps: int
    """The number of steps of the schedule that exceed it."""
    less_module_bytes: int
    """Kept bytes of the module that could be recomputed and that are alive at the largest of these steps."""

    def __str__(self) -> str:
        return explanation_text(self)

    def _repr_html_(self) -> str:
        return as_html(render_explanation(self))

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data: seconds, bytes, steps of the schedule."""
        return asdict(self)


def explanation_text(found: Explanation, *, width: int = 100) -> str:
    """The explanation as text without colours."""
    return as_text(render_explanation(found, width=width), width=width)


def render_explanation(found: Explanation, *, width: int = 100) -> Group:
    """Lay out an explanation, for `rich.print`.

    Args:
        found: The explanation.
        width: Characters that a line may take.
    """
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, fact in sentences(found):
        facts.add_row(Text(name, style="bold"), Text(printable(fact)))
    parts: list[RenderableType] = [Text(printable(found.module or "(the model)"), style="bold"), facts]
    if found.reruns:
        parts += [Text(), _rerun_table(found.reruns, width)]
    return Group(*parts)


def sentences(found: Explanation) -> list[tuple[str, str]]:
    """The explanation as pairs of a heading and a sentence."""
    facts = [
        ("kept", _kept(found)),
        ("recomputed", _recomputed(found)),
        ("binding", _binding(found)),
    ]
    if found.keeping is not None:
        facts.append(("keeping it", _keeping(found, found.keeping)))
    if found.room_bytes is not None:
        facts += [("10 % more", _more(found)), ("10 % less", _less(found))]
    return facts


def moment_text(moment: Moment) -> str:
    """A step of a schedule in words, as in: step 812 of 2310, aten.mm of head in the backward (net.py:12)."""
    phase = "when it is recomputed" if moment.phase == "recomputation" else f"in the {moment.phase}"
    where = f" ({moment.line})" if moment.line else ""
    name, module = short_name(moment.operation), moment.module or "(the model)"
    return f"step {moment.step} of {moment.of}, {name} of {module} {phase}{where}"


def short_name(operation: str) -> str:
    """An operator's name without its overload: aten.mm of aten.mm.default."""
    return ".".join(operation.split(".")[:2])


def _kept(found: Explanation) -> str:
    text = (
        f"results of {found.kept_operations} of {_operations(found)} are held from the forward for "
        f"the backward, {format_bytes(found.kept_bytes)}"
    )
    if found.freed_operations:
        text += f"; {found.freed_operations} more are freed in the forward: the backward does not read them"
    if found.fixed_operations:
        text += f"; {found.fixed_operations} may not be run again"
    return text


def _operations(found: Explanation) -> str:
    return f"{found.operations} operation{'' if found.operations == 1 else 's'}"


def _recomputed(found: Explanation) -> str:
    if not found.reruns:
        return "nothing"
    runs = sum(len(rerun.steps) for rerun in found.reruns)
    steps = [step for rerun in found.reruns for step in rerun.steps]
    size = sum(rerun.bytes * len(rerun.steps) for rerun in found.reruns)
    often = "each once" if runs == len(found.reruns) else f"{runs} times in all"
    share = found.rerun_seconds / found.plan_rerun_seconds if found.plan_rerun_seconds else 0.0
    when = f"between steps {min(steps)} and {max(steps)}" if len(steps) > 1 else f"at step {steps[0]}"
    return (
        f"{len(found.reruns)} of {_operations(found)}, {often}, {when} "
        f"of {found.binding.of}: {format_bytes(size)} made again in "
        f"{format_seconds(found.rerun_seconds)}, {share:.0%} of what the plan recomputes"
    )


def _binding(found: Explanation) -> str:
    text = f"the step holds most, {format_bytes(found.binding.live_bytes)}, at {moment_text(found.binding)}"
    if found.room_bytes is not None:
        text += f"; the budget leaves it {format_bytes(found.room_bytes)}"
    return f"{text}. Of this module {format_bytes(found.binding_module_bytes)} are alive then"


def _keeping(found: Explanation, keeping: Keeping) -> str:
    text = f"would need {format_bytes(keeping.extra_bytes)} more at that moment and save "
    text += f"{format_seconds(keeping.saved_seconds)} ({_share(keeping.saved_seconds, found)} of the step). "
    text += f"The peak would be {format_bytes(keeping.peak_bytes)}, at {moment_text(keeping.peak)}"
    if keeping.fits is None or found.room_bytes is None:
        return text
    if keeping.fits:
        return f"{text}: it would fit; the solver did not find that, or another plan is faster"
    return f"{text}: {format_bytes(keeping.peak_bytes - found.room_bytes)} over the budget"


def _more(found: Explanation) -> str:
    if found.keeping is None:
        return "all that the backward reads of it is kept already"
    if found.more is None:
        return "nothing of it could be kept by this schedule alone; a new plan may do better"
    names = ", ".join(found.more_operations[:_MOST_NAMES])
    rest = len(found.more_operations) - _MOST_NAMES
    more = f" and {rest} more" if rest > 0 else ""
    saved, share = format_seconds(found.more.saved_seconds), _share(found.more.saved_seconds, found)
    return (
        f"{names}{more} could be kept by this schedule: {saved} ({share} of the step) less, peak "
        f"{format_bytes(found.more.peak_bytes)}; a new plan does as well or better"
    )


def _less(found: Explanation) -> str:
    if not found.less_bytes:
        return "the plan would still fit"
    steps = "1 step" if found.less_steps == 1 else f"{found.less_steps} steps"
    return (
        f"{format_bytes(found.less_bytes)} would have to go, at {steps} of the schedule; what is kept of "
        "this module and could be recomputed holds "
        f"{format_bytes(found.less_module_bytes)} at the largest of them"
    )


def _share(seconds: float, found: Explanation) -> str:
    return f"{seconds / found.step_seconds:.1%}" if found.step_seconds else "0 %"


def _rerun_table(reruns: tuple[Rerun, ...], width: int) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for rerun in reruns[:_MOST_RERUNS]:
        steps = ", ".join(map(str, rerun.steps[:3])) + (", ..." if len(rerun.steps) > 3 else "")
        label = f"{short_name(rerun.operation)} of {rerun.module or '(the model)'}"
        rows.append(
            (
                Text(printable(label)),
                f"{len(rerun.steps)}x",
                steps,
                format_bytes(rerun.bytes),
                format_seconds(rerun.seconds),
                Text(printable(rerun.line)),
            )
        )
    if len(reruns) > _MOST_RERUNS:
        rows.append((Text(f"... and {len(reruns) - _MOST_RERUNS} more"),))
    headers = ("recomputed", "", "at step", "bytes", "time", "line")
    return fitted_table(headers, rows, width=width, least=("line", "at step", "bytes"))
