"""The command `calibrate`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import AsJson, Debug
from planner.cli.output import one_line_errors, print_json, say, stdout_for_results
from planner.planfile.budget import format_bytes
from planner.report.text import format_seconds

if TYPE_CHECKING:
    from planner.calibration.calibrate import Calibration


def calibrate_command(
    device: Annotated[str, typer.Option(help="cuda, or cuda:1.")] = "cuda",
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the device to this file, for --device FILE."
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure the GPU that is here; plans for it use the measured figures from then on."""
    with one_line_errors(debug, as_json):
        if not device.replace(" ", "").lower().startswith("cuda"):
            raise typer.BadParameter(f"{device!r}: expected cuda, or cuda:1", param_hint="--device")
        from planner.calibration.calibrate import as_file, calibrate  # which imports PyTorch

        with stdout_for_results():
            found = calibrate(device, output)
        if as_json:
            print_json({**as_file(found.device), "measured": asdict(found.measured), "saved_to": found.path})
            return
        for line in described(found):
            say(line)


def described(found: "Calibration") -> list[str]:
    """The measured figures beside those that plans use without them."""
    now, before = found.device, found.table
    lines = [f"{now.name}: measured (published)"]
    lines.append(f"  bandwidth  {now.bandwidth / 1e9:,.0f} GB/s ({before.bandwidth / 1e9:,.0f})")
    for name, figure in found.measured.flops.items():
        known = before.flops.get(name)
        beside = "" if known is None else f" ({known / 1e12:,.1f})"
        lines.append(f"  {name}  {figure / 1e12:,.1f} TFLOP/s{beside}")
    launches = f"{format_seconds(now.launch_seconds)} ({format_seconds(before.launch_seconds)})"
    lines.append(f"  launch of a kernel  {launches}")
    for name, rate, known in (
        ("to", now.to_host, before.to_host),
        ("from", now.from_host, before.from_host),
    ):
        lines.append(f"  {name} the host  {rate / 1e9:,.1f} GB/s ({known / 1e9:,.1f})")
    lines.append(f"  libraries  {format_bytes(now.library_bytes)} ({format_bytes(before.library_bytes)})")
    lines.append(f"  context  {format_bytes(now.context_bytes)} ({format_bytes(before.context_bytes)})")
    lines += [f"note: {note}" for note in found.measured.notes]
    return [*lines, f"written to {found.path}"]
