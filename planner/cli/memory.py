"""The commands `snapshot` and `replay`: a plan's memory in viewers, a recorded run under other settings."""

import json
import pickle
from dataclasses import replace
from typing import Annotated

import typer

from planner.allocator.recorded import arena_of_run, read_snapshot, recorded_run
from planner.allocator.recorded import replay as replay_run
from planner.allocator.settings import AllocatorSettings
from planner.allocator.snapshot import chrome_trace, record, snapshot
from planner.cli.builder import build
from planner.cli.options import AsJson, Debug, Reference, StepOptions, with_step_options
from planner.cli.output import one_line_errors, print_json, say, stdout_for_results
from planner.cli.progress import shown_progress
from planner.errors import BudgetError, PlannerError
from planner.planfile.atomic_file import check_writable, replace_atomically
from planner.planfile.budget import format_bytes, parse_budget
from planner.report.text import reserved_beforehand
from planner.user_plan import Plan

Settings = Annotated[
    str,
    typer.Option(
        "--settings", metavar="CONF", help="Written as PYTORCH_CUDA_ALLOC_CONF is: expandable_segments:True."
    ),
]


_SAID_BY_PLANS = {
    **{name: name for name in ("outputs", "accumulate", "inputs", "offload", "parallel")},
    "in_flight": "in-flight",
    "regions": "region",
}
"""Options of the step that change its memory, and that a plan file holds; each with its name here."""


class NoAllocatorError(PlannerError, ValueError):
    """There is no caching allocator where the step is to run."""


@with_step_options
def snapshot_command(
    reference: Reference,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE", help="A snapshot as .pickle, a Chrome trace as .json."
        ),
    ],
    plan_path: Annotated[
        str | None,
        typer.Option(
            "--plan", metavar="PLAN", help="A plan file that the step follows; without one it is not planned."
        ),
    ] = None,
    conf: Settings = "",
    as_json: AsJson = False,
    debug: Debug = False,
    *,
    step: StepOptions,
) -> None:
    """Write a training loop's predicted memory on a GPU for pytorch.org/memory_viz or ui.perfetto.dev."""
    with one_line_errors(debug, as_json):
        settings = AllocatorSettings.parse(conf)
        check_writable(output)
        plan = None if plan_path is None else Plan.load(plan_path)
        if plan is not None and step.device is None:
            step = replace(step, device=plan.target.device)
        # Imported here, as these import PyTorch: the command line must start without it.
        from planner.planning.options import OptionError, StepKeywords, options_of, read_options
        from planner.planning.prepare import prepare
        from planner.problem.allocations import planned_allocations
        from planner.runtime.shapes.schedule_at import schedule_at
        from planner.training_step.inputs import read_step

        for name, option in () if plan is None else _SAID_BY_PLANS.items():
            if getattr(step, name) != getattr(StepOptions(), name):
                raise OptionError(f"--{option} with --plan: expected none, as the plan says it: leave it out")
        with stdout_for_results(), shown_progress() as progress:
            built = build(reference, progress)
            options = read_options("snapshot", StepKeywords, step.keywords())
            if plan is not None:
                options = replace(
                    options_of(plan),
                    loss=options.loss,
                    device=options.device,
                    optimizer=options.optimizer,
                    attention=options.attention,
                )
            training_step = read_step(
                built.model, built.args, built.kwargs, options.loss, options.outputs, of="snapshot"
            )
            training_step = replace(training_step, training=True if plan is None else plan.model.training)
            prepared = prepare(built.model, training_step, options, progress=progress)
        if prepared.device.kind != "cuda":
            raise NoAllocatorError(
                f"on {prepared.device.name} memory is not cached: name a GPU, as --device A100-80GB"
            )
        allocations = prepared.problem.eager.allocations
        if plan is not None:
            packing, schedule = schedule_at(plan, prepared)
            allocations = planned_allocations(packing.problem.graph, schedule)
        loop = prepared.footprint.loop(allocations)
        if plan is not None and plan.whole_step is not None and not settings.expandable_segments:
            loop = replace(loop, arena=tuple(plan.whole_step.arena))
        recorded = record(loop, settings)
        if output.endswith(".json"):
            content = json.dumps(chrome_trace(recorded)).encode()
        else:
            content = pickle.dumps(snapshot(recorded))
        replace_atomically(output, lambda file: file.write(content))
        allocator = recorded.allocator
        result = {
            "saved_to": output,
            "events": len(recorded.trace),
            "reserved_bytes": allocator.peak_reserved_bytes,
            "allocated_bytes": allocator.peak_allocated_bytes,
        }
        if as_json:
            print_json(result)
            return
        say(
            f"{len(recorded.trace)} events, {format_bytes(allocator.peak_allocated_bytes)} allocated, "
            f"{format_bytes(allocator.peak_reserved_bytes)} reserved; written to {output}"
        )


def replay_command(
    path: Annotated[
        str,
        typer.Argument(
            metavar="SNAPSHOT",
            help="A file of torch.cuda.memory._dump_snapshot(), with recorded history.",
            show_default=False,
        ),
    ],
    conf: Settings = "",
    other: Annotated[
        str, typer.Option("--instead", metavar="CONF", help="The settings to replay it with.")
    ] = "expandable_segments:True",
    device: Annotated[
        int | None, typer.Option(help="The index of the device, if the file has several.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="The memory of the device, as 79GiB; unlimited if not given.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """The bytes that a recorded run would reserve under other settings of the caching allocator."""
    with one_line_errors(debug, as_json):
        recorded_with, instead = AllocatorSettings.parse(conf), AllocatorSettings.parse(other)
        limit = None if memory is None else _bytes_of(memory)
        run = recorded_run(read_snapshot(path), device)
        before, after = (replay_run(run, settings, limit) for settings in (recorded_with, instead))
        default = replay_run(run, AllocatorSettings())
        arena = arena_of_run(run)
        with_arena = default.reserved_bytes - arena.saved_bytes
        if as_json:
            print_json(
                {
                    "device": run.device,
                    "events": len(run.events),
                    "recorded_reserved_bytes": run.peak_reserved_bytes,
                    "reserved_bytes": before.reserved_bytes,
                    "instead_reserved_bytes": after.reserved_bytes,
                    "default_reserved_bytes": default.reserved_bytes,
                    "arena": list(arena.segments),
                    "arena_reserved_bytes": with_arena,
                    "allocated_bytes": before.allocated_bytes,
                    "out_of_memory_at": before.failed_at,
                    "instead_out_of_memory_at": after.failed_at,
                }
            )
            return
        shown, allocated = other or "the defaults", format_bytes(before.allocated_bytes)
        change = f"{format_bytes(before.reserved_bytes)} -> {format_bytes(after.reserved_bytes)} reserved"
        say(
            f"your run on device {run.device}, {len(run.events)} events, with {shown}: {change} "
            f"({allocated} allocated)"
        )
        recorded_bytes = format_bytes(run.peak_reserved_bytes)
        say(f"recorded were {recorded_bytes} reserved; both figures above are simulated")
        if arena.segments:
            say(f"{reserved_beforehand(arena.segments, default.reserved_bytes, with_arena)}, by the defaults")
        for tried, found in ((conf, before), (other, after)):
            if found.failed_at is not None:
                settings_text = tried or "the defaults"
                say(f"with {settings_text}: out of memory at event {found.failed_at}")


def _bytes_of(memory: str) -> int:
    amount = parse_budget(memory, 2**40)
    if amount.bytes is None or amount.relative:
        raise BudgetError(f"--memory {memory}: expected bytes, as 79GiB")
    return amount.bytes
