"""An estimate: its records, and tables of the memory of each module, without and with checkpoints."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from planner.planfile.budget import format_bytes
from planner.planfile.schema import WholeStep
from planner.report.columns import fitted_table
from planner.report.text import as_text, reserved_beforehand

_SHOWN = 0.01
"""Modules that hold less than this share of the activations and parameters are left out."""


@dataclass(frozen=True)
class ModuleMemory:
    """The memory of a module with all that it contains.

    Attributes:
        module: Its path; "" is the model itself.
        class_name: Its class.
        parameter_bytes: Bytes of its parameters and buffers; a shared one counts at the first module.
        gradient_bytes: Bytes of the gradients of its parameters, which backward makes.
        activation_bytes: Bytes that it computed and that are held for backward when the forward ends.
        peak_bytes: Bytes that it computed and that are alive at the peak of forward and backward.
    """

    module: str
    class_name: str
    parameter_bytes: int
    gradient_bytes: int
    activation_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Checkpointed:
    """A step with ``torch.utils.checkpoint`` around some modules.

    Attributes:
        modules: Their paths.
        peak_bytes: The most that is allocated at any time of forward and backward, resident bytes included.
        dynamic_peak_bytes: The same without resident bytes.
        total_bytes: The memory that the whole step takes of the device, the optimizer's step included.
        overhead: Extra time of forward and backward, as a share: 0.2 is 20 %.
    """

    modules: tuple[str, ...]
    peak_bytes: int
    dynamic_peak_bytes: int
    total_bytes: int
    overhead: float


@dataclass(frozen=True)
class Estimate:
    """The memory of a training step without a plan.

    Attributes:
        whole_step: The step as it is, with the optimizer's step.
        dynamic_peak_bytes: The peak of forward and backward beyond resident bytes.
        resident_bytes: Parameters, buffers, inputs, optimizer state, and gradients that are there before.
        optimizer_bytes: The optimizer's state, a part of the resident bytes.
        modules: The memory of each module, the model itself first.
        checkpointed: The step with checkpoints around named modules; None if none were named.
        gradient_checkpointing: The step with ``model.gradient_checkpointing_enable()``, of Hugging Face's
            models; None for others.
        reserving: The whole step with segments reserved for it beforehand, as :func:`planner.reserve` does
            it on a GPU.
    """

    whole_step: WholeStep
    dynamic_peak_bytes: int
    resident_bytes: int
    optimizer_bytes: int
    modules: list[ModuleMemory]
    checkpointed: Checkpointed | None
    gradient_checkpointing: Checkpointed | None
    reserving: WholeStep

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        steps = {"whole_step": self.whole_step.model_dump(), "reserving": self.reserving.model_dump()}
        return {**dataclasses.asdict(self), **steps}

    def __str__(self) -> str:
        return estimate_text(self)


def render_estimate(estimate: Estimate, *, width: int = 100) -> Group:
    """The step as it is, module by module, layers that are alike as one line; then with checkpoints."""
    whole = estimate.modules[0]
    most = max(whole.activation_bytes, 1), max(whole.parameter_bytes, 1)
    rows, above = [], dict[int, str]()
    for names, row in _folded(estimate.modules):
        share = row.activation_bytes / most[0]
        if row.module and share < _SHOWN and row.parameter_bytes / most[1] < _SHOWN:
            continue
        depth = row.module.count(".") + 1 if row.module else 0
        count = f" x{len(names)}" if len(names) > 1 else ""
        label = _label(names, above.get(depth - 1))
        above[depth] = _pattern(row.module) if count else row.module
        rows.append(
            (
                Text("  " * depth + label + count),
                row.class_name,
                format_bytes(row.parameter_bytes),
                format_bytes(row.gradient_bytes),
                format_bytes(row.activation_bytes),
                f"{len(names) * share:.0%}",
                format_bytes(row.peak_bytes),
            )
        )
    headers = ("module", "class", "parameters", "gradients", "held for backward", "share", "at the peak")
    table = fitted_table(headers, rows, width=width, least=("gradients", "class"))
    return Group(Text(_summary(estimate)), Text(), table, Text(), *_ways(estimate, width))


def estimate_text(estimate: Estimate) -> str:
    """What :func:`render_estimate` shows, as text."""
    return as_text(render_estimate(estimate, width=110), width=110)


def _summary(estimate: Estimate) -> str:
    whole = estimate.whole_step
    peak = estimate.resident_bytes + estimate.dynamic_peak_bytes
    text = (
        f"forward and backward peak at {format_bytes(peak)}: {format_bytes(estimate.resident_bytes)} are "
        f"there throughout, {format_bytes(estimate.dynamic_peak_bytes)} come and go"
    )
    if whole.total_bytes != peak:
        text += f"; the whole step takes {format_bytes(whole.total_bytes)} of the device"
    if segments := estimate.reserving.arena:
        saved = reserved_beforehand(segments, whole.reserved_bytes, estimate.reserving.reserved_bytes)
        text += f"\n{saved} (planner.reserve)"
    return text


def _ways(estimate: Estimate, width: int) -> list[Table]:
    ways: list[tuple[str, Checkpointed]] = []
    if estimate.checkpointed is not None:
        ways.append(("torch.utils.checkpoint on those modules", estimate.checkpointed))
    if estimate.gradient_checkpointing is not None:
        ways.append(("gradient_checkpointing_enable()", estimate.gradient_checkpointing))
    if not ways:
        return []
    peak = estimate.resident_bytes + estimate.dynamic_peak_bytes
    rows = [("as it is", "", format_bytes(peak), "", "")]
    rows += [
        (
            name,
            str(len(way.modules)),
            format_bytes(way.peak_bytes),
            f"{way.peak_bytes / peak - 1:+.0%}",
            f"{way.overhead:+.1%}",
        )
        for name, way in ways
    ]
    headers = ("checkpoints", "modules", "peak", "memory", "extra time")
    return [fitted_table(headers, rows, width=width, least=("modules",))]


def _folded(modules: list[ModuleMemory]) -> list[tuple[list[str], ModuleMemory]]:
    """Modules that differ in the numbers of their paths alone, and take the same, as one row."""
    together: dict[object, tuple[list[str], ModuleMemory]] = {}
    for row in modules:
        pattern = _pattern(row.module)
        sizes = (row.class_name, row.parameter_bytes, row.gradient_bytes, row.activation_bytes)
        together.setdefault((pattern, sizes), ([], row))[0].append(row.module)
    return list(together.values())


def _pattern(module: str) -> str:
    """The path of a module without its numbers."""
    return re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", module)


def _label(names: list[str], above: str | None) -> str:
    """A row's own name under the row above; the whole path where it folds more modules than that one."""
    own = {name.rpartition(".")[2] for name in names}
    if len(names) > 1 and _pattern(names[0]).rpartition(".")[0] != above:
        return _pattern(names[0])
    return "*" if len(own) > 1 else own.pop() or "(the model)"
