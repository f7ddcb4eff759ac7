"""The table of published headlines beside what is planned."""

from collections.abc import Callable
from typing import Any

from benchmarks.frontiers.published_rows import anatomy_rows, formula_rows, layer_rows
from planner.costs.devices import Device
from planner.planfile.budget import format_bytes

Result = dict[str, Any]


def table(results: dict[str, Result], device: Device) -> str:
    """All results as Markdown."""
    lines = [
        "# Published headlines, planned",
        "",
        "Made by `python benchmarks/headlines.py --out docs/results`; rows as JSON are in `headlines/`.",
        f"Everything is predicted for {device.name} ({format_bytes(device.memory_bytes)}), by counting bytes",
        "and by its roofline, without the device: **no figure here was measured on a GPU**. A step is",
        "forward, backward and the optimizer's step; its memory is what PyTorch's caching allocator",
        f"reserves for it (simulated), {format_bytes(device.library_bytes)} for cuBLAS among that, and "
        f"{format_bytes(device.context_bytes)} for the context.",
        "cuDNN's workspace is not counted. Planned steps have an arena: segments reserved beforehand.",
        "",
    ]
    if before := [name for name, result in results.items() if _without_an_arena(result)]:
        lines += [f"Made before there were arenas, and not again: {', '.join(before)}.", ""]
    if any(_assumed(result) for result in results.values()):
        lines += [
            "Rows without reserved bytes were made when 3 % of what is allocated was assumed to be reserved",
            "on top, and have not been made again.",
            "",
        ]
    for kind, rows in _SECTIONS:
        chosen = {n: r for n, r in results.items() if r["kind"] == kind}
        if chosen:
            lines += [*rows(chosen), ""]
    return "\n".join(lines)


def _assumed(result: Result) -> bool:
    """Whether a result is of the time before reserved bytes were predicted."""
    steps = [result.get("planned"), *(a.get("whole_step") for a in result.get("answers", {}).values())]
    return any(isinstance(step, dict) and "reserved_bytes" not in step for step in steps)


def _without_an_arena(result: Result) -> bool:
    """Whether a result is of the time before segments were reserved beforehand."""
    steps = [result.get("planned"), *(a.get("whole_step") for a in result.get("answers", {}).values())]
    return any(isinstance(step, dict) and "reserved_bytes" in step and "arena" not in step for step in steps)


def _reserved(whole: Result) -> tuple[str, str, str]:
    """Allocated, reserved, and reserved with expandable segments."""
    names = ("allocated_bytes", "reserved_bytes", "expandable_reserved_bytes")
    there = whole if "reserved_bytes" in whole else {names[0]: whole["allocated_bytes"]}
    allocated, reserved, expandable = (
        "" if there.get(name) is None else format_bytes(there[name]) for name in names
    )
    return allocated, reserved, expandable


def _batch_rows(results: dict[str, Result]) -> list[str]:
    rows = [
        "## Largest batches",
        "",
        "Time per sample is of forward and backward, over the largest unplanned batch's.",
        "",
        "| model | unplanned | published | at most | planned | ratio | published ratio | time per sample "
        "| allocated | reserved | expandable |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for name, result in results.items():
        published = result["published"]
        for share, answer in result["answers"].items():
            unplanned = answer["unplanned"]["batch"]
            largest = answer["points"][-1]
            rows.append(
                f"| {name} | {unplanned} | {published['unplanned']} | +{float(share):.0%} "
                f"| {answer['batch']} "
                f"| {answer['ratio']:.2f}x | {published['ratio']:.2f}x | {largest['overhead']:+.1%} "
                f"| {' | '.join(_reserved(answer['whole_step']))} |"
            )
        held = result["holders"]
        parts = ", ".join(
            f"{op.removeprefix('aten.').removesuffix('.default')} {size / held['batch'] / 2**20:.1f}"
            for op, size in list(held["by_operation"].items())[:6]
        )
        notes.append(
            f"- **{name}**: MiB a sample alive at the peak without recomputation (batch {held['batch']}), by "
            f"operation: {parts}; of dropout's, {held['dropout_mask_bytes'] / held['batch'] / 2**20:.1f} are "
            "masks of booleans."
        )
    return [*rows, "", "### Where the bytes are", "", *notes]


def _length_rows(results: dict[str, Result]) -> list[str]:
    rows = [
        "### Published unplanned batches of BERT",
        "",
        "At full length the published batches contradict each other: in the same memory 28 sequences of 512",
        "tokens (14,336 tokens) are more tokens than 93 of 128 (11,904), as 80 of 512 (40,960) are more than",
        "273 of 128 (34,944), though a token's bytes only grow with the length, by its rows of the attention",
        "matrices. So those of 512 were padded to less. What they take here at full length, the length at",
        "which they just fit the device, and MiB of activations a sample by length:",
        "",
        "| model | sequences | take here | just fit at | resident | gradients, outputs | activations |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        sizes = ", ".join(
            f"{tokens}: {size / 2**20:.1f}" for tokens, size in result["activation_bytes_a_sample"].items()
        )
        rows.append(
            f"| {name.removesuffix('-length')} | {result['batch']} x {result['length']} "
            f"| {format_bytes(result['unplanned_bytes'])} | {result['fitting_length']} tokens "
            f"| {format_bytes(result['resident_bytes'])} | {format_bytes(result['gradient_bytes'])} "
            f"| {sizes} |"
        )
    return rows


def _planning_rows(results: dict[str, Result]) -> list[str]:
    rows = [
        "## What planning takes",
        "",
        "On a machine without a GPU, the whole of `planner.plan` for one; wall times are of a busy machine.",
        "",
        "| model | device | process seconds | host memory | peak | unplanned | extra time |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        rows.append(
            f"| {name} | {result['for']} | {result['plan_seconds']:.1f} "
            f"| {format_bytes(result['host_bytes'])} | {format_bytes(result['total_bytes'])} "
            f"| {format_bytes(result['unplanned_bytes'])} | {result['overhead']:+.1%} |"
        )
    return rows


def _plan_rows(results: dict[str, Result]) -> list[str]:
    rows = [
        "## Steps on the whole device",
        "",
        "| model | unplanned | planned | allocated | reserved | expandable | fits | optimizer's step "
        "| extra time | published |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    figures = []
    for name, result in results.items():
        published = ", ".join(
            f"{key.replace('_', ' ')} {value}" for key, value in result["published"].items()
        )
        rows.append(
            f"| {name} | {format_bytes(result['unplanned']['total_bytes'])} "
            f"| {format_bytes(result['planned']['total_bytes'])} "
            f"| {' | '.join(_reserved(result['planned']))} | {'yes' if result['fits'] else 'no'} "
            f"| {format_bytes(result['planned']['optimizer_step_bytes'])} | {result['overhead']:+.1%} "
            f"| {published} |"
        )
        if "figure" in result:
            figures += ["", f"![Live bytes over the step of {name}]({result['figure']})"]
    return rows + figures


def _least_rows(results: dict[str, Result]) -> list[str]:
    rows = [
        "## Least memory",
        "",
        "Bytes that the step allocates over entry, gradients included; in brackets with parameters and",
        "inputs. The named overhead is the most that was allowed (one whole forward where none is named).",
        "",
        "| model | unplanned | planned | less by | extra time | published |",
        "|---|---|---|---|---|---|",
    ]
    notes = []
    for name, result in results.items():
        published = ", ".join(
            f"{value:.1f}x"
            if key == "factor"
            else f"-{value:.0%}"
            if key == "reduction"
            else f"at +{value:.0%}"
            for key, value in result["published"].items()
        )
        rows.append(
            f"| {name} | {format_bytes(result['unplanned_dynamic_bytes'])} "
            f"| {format_bytes(result['planned_dynamic_bytes'])} | {result['reduction']:.0%} = "
            f"{result['factor']:.1f}x ({result['reduction_with_resident']:.0%}) | {result['overhead']:+.1%} "
            f"| {published} |"
        )
        if bound := result.get("bound_over_no_recompute"):
            notes.append(
                f"{name}: {result['overhead_over_no_recompute']:+.1%} over the captured step that recomputes "
                f"nothing, whose forward takes {result['forward_share']:.1%}; no schedule of this peak takes "
                f"less than {bound:+.1%}, by a proven bound."
            )
    listed = [f"- {note}" for note in notes]
    return [*rows, "", *listed, *(_CHEN.splitlines() if "resnet-1000" in results else [])]


_CHEN = """
### The 1000-layer residual net

Chen et al. (2016, sections 5.1, 5.2 and 5.4) trained bottleneck residual nets on pictures of 224 x 224,
32 a batch. Their memory is that of feature maps by a static plan, without parameters and the scratch of
convolutions: 48 GB where nothing is recomputed. Their time is that of whole training batches on a Titan X,
over the plan that recomputes nothing, at depths where that one fits.

The paper does not give the blocks of a stage at 1000 layers. The example that its authors published with it
(dmlc/mxnet-memonger) has 3, 24, 36 and 3, which are 200 layers, each a convolution, a batch normalisation
and a leaky ReLU. `resnet-1000` is that net with five times the blocks; unplanned it takes what was published,
by which it is taken for theirs. Counted here is more than they counted, before and after: gradients of
parameters as well. The time is that of forward and backward; whole batches, with the optimizer's step in
both, would show less of a difference.

`resnet-1001` is another net of that depth, He et al.'s for pictures of 32 x 32 with normalisation before each
convolution, at a batch that takes 48 GB. Its convolutions are narrow, and bound by memory like all that is
around them: its forward is a larger share of the step, and to keep a convolution saves hardly more time than
to keep a normalisation. It misses 30 % at 6.9x, and the bound says that every schedule does.
"""


def _gigabyte_rows(results: dict[str, Result]) -> list[str]:
    rows = ["### A given number of gigabytes", ""]
    for name, result in results.items():
        published = result["published"]
        alive = ", ".join(f"{made_by} {size / 1e9:.2f} GB" for made_by, size in result["peak"]["alive"])
        rows.append(
            f"**{name}**, batch {result['batch']}: {result['unplanned_bytes'] / 1e9:.2f} GB unplanned, "
            f"{result['planned_bytes'] / 1e9:.2f} GB planned at {result['overhead']:+.1%}"
            f"{'' if result['fits'] else ', which is the least'}; "
            f"published {published['unplanned_gb']} -> "
            f"{published['planned_gb']} GB at +{published['overhead']:.0%}. "
            f"The largest that are alive at its peak, in {result['peak']['operation']}: {alive}."
        )
    return rows


_SECTIONS: tuple[tuple[str, Callable[[dict[str, Result]], list[str]]], ...] = (
    ("batches", _batch_rows),
    ("length", _length_rows),
    ("plan", _plan_rows),
    ("least", _least_rows),
    ("gigabytes", _gigabyte_rows),
    ("formula", formula_rows),
    ("layer", layer_rows),
    ("anatomy", anatomy_rows),
    ("planning", _planning_rows),
)
