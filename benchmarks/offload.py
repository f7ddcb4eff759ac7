"""Results on the host: frontiers of recomputing alone and with offload, beside what trainers do by hand.

    python benchmarks/offload.py [--small BERT ...] [--models bert-large ...] [--devices V100-32GB H100]
                                 [--rows docs/results/offload] [--out docs/results/offload.md]

Small models run on the CPU, with their results in files, and are verified. The rows of a model are kept as
JSON, and the page has all that are there: with ``--small --models`` none is made.

Every other model is captured once a device, without data, and all is predicted by the same simulator, in the
seconds of the device's roofline and of its link. Three ways by hand are the budgets: blocks recomputed whole,
as ``torch.utils.checkpoint`` around each does it; the same with their inputs on the host; and all on the host
that the backward reads, nothing recomputed. They send and fetch as early as a plan would that takes no more
memory than they. Plans are made within the same peak, with offload and without.
"""

import argparse
import json
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import transformers as hf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks.models import MODELS, build
from planner._torch.execution import host_place
from planner._torch.execution.host_place import HostPlace
from planner.costs.devices import find_device
from planner.planning.prepared import Prepared
from planner.problem.encodings import packed
from planner.problem.link import overlapped
from planner.runtime.shapes.schedule_at import schedule_at
from planner.user_plan import Plan
from solvers.least import floor_bytes
from solvers.model.arrays import Schedule
from solvers.model.schedule import crosses, lifetimes, simulate
from solvers.whole_blocks import OUTSIDE, recompute_blocks

GB, MB = 1e9, 1e6
FRONTIERS = (
    "bert-large", "gpt2-xl", "t5-base", "llama-7b", "resnet-152", "sd-unet", "densenet-201",
    "gpt", "resnet", "unet", "lstm-1000", "resnet-1001",
)  # fmt: skip
DEVICES = ("V100-32GB", "H100")
NVLINK = "H100, NVLink-C2C"
_LINKED = {NVLINK: replace(find_device("H100"), name=NVLINK, to_host=170e9, from_host=415e9)}
"""An H100 at the link of a GH200, at the rates that were measured of one."""
PAGE = """# Results on the host

`python benchmarks/offload.py --out docs/results/offload.md`

## Run on the CPU

Small models of Hugging Face, a step each, with results in files (`offload="disk"`), over a link that a clock
slows down to 1 GB/s each way; operations as long as they take here. Least peaks, and peaks a fifth below the
least of recomputing alone, which nothing else reaches; where plans do not either, the share of it that they
reach, and a share that no schedule undercuts, as an operation of the backward and the gradients that are
there take it. In MB, over entry: the peak unplanned, the least
recomputing alone, and the plan's, which is measured to the byte, all gradients equal bit for bit
(`planner.verify`). In seconds: what compute waits for the link in a step, predicted; *took*, the time inside
the calls that wait, the median of seven steps; and *counted*, the same by a clock that counts the step's
processor time and stands still while other processes have the processor: where *took* is much longer, they
had it.

| model | unplanned | alone | asked for | with files | extra | in files | verified | wait | took | counted |
|---|---:|---:|---|---:|---:|---:|---|---:|---:|---:|
"""

FRONTIER = """
## Predicted for GPUs

Not run: dynamic peaks over entry, in GB, and extra time over the step that recomputes nothing, for models
of [the frontiers](frontier.md) at full size in single precision. V100: PCI Express 3.0, 15.75 GB/s each
way; H100: 5.0, 63 GB/s. *By hand* is what blocks recomputed whole take, the same with their inputs on the
host, and everything on the host; beside it are plans within that peak, recomputing alone and with
`offload="host"`, what no schedule within that peak undercuts, though it sends what the link carries (by the
programs of `solvers/programs/lower_bound.py`; empty where they were not asked), and what the plans
keep on the host. The last row has the least peaks of both.

At the peak of recomputed blocks the transformers' extra time is at most half of that of recomputing alone,
but for gpt on the V100, where that is proven to be impossible.

| model | device | way | peak | by hand | recomputing alone | with offload | at least | on the host |
|---|---|---|---:|---:|---:|---:|---:|---:|
"""

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 500,
}
SMALL = ("BERT", "GPT-2", "Llama", "ViT", "ResNet-50")
RATE = 1e9
"""Bytes a second of the slow link."""
LIMIT = 240
"""Seconds of the clock for a solver, so that a busy machine finds the same."""


def small_models() -> Iterator[tuple[str, nn.Module, dict[str, torch.Tensor]]]:
    """Models that take seconds to run: :data:`SMALL`."""
    words = torch.randint(0, 500, (8, 512))
    text = {"input_ids": words, "labels": words}
    image = {"pixel_values": torch.randn(8, 3, 128, 128), "labels": torch.randint(0, 10, (8,))}
    yield "BERT", hf.BertForMaskedLM(hf.BertConfig(**SIZES, intermediate_size=512)), text
    yield "GPT-2", hf.GPT2LMHeadModel(hf.GPT2Config(**SIZES, use_cache=False)), text
    yield "Llama", hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, intermediate_size=344, use_cache=False)), text
    patches = hf.ViTConfig(**SIZES, intermediate_size=512, image_size=128, patch_size=4, num_labels=10)
    yield "ViT", hf.ViTForImageClassification(patches), image
    image = {"pixel_values": torch.randn(8, 3, 192, 192), "labels": image["labels"]}
    yield "ResNet-50", hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=10)), image


def ran(name: str, model: nn.Module, kwargs: dict[str, torch.Tensor]) -> Iterator[str]:
    """The rows of a model that is planned without and with files, verified, and run over a slow link."""
    device = replace(find_device("cpu"), to_host=RATE, from_host=RATE)
    step = planner.prepare(
        model.train(), (), kwargs, device=device, offload="disk", backend="graph", costs="measured"
    )
    least, resident = _alone(step).plan("min").predicted.dynamic_peak_bytes, step._prepared.resident.total
    for asked, budget in (("the least", "min"), ("0.8", resident + 4 * least // 5)):
        try:
            plan = step.plan(budget)
        except planner.InfeasibleBudget as error:
            share = (error.minimum_bytes - resident) / least
            floor = floor_bytes(packed(step._prepared.problem, step._prepared.packings).problem.graph)
            row = (
                f"| {name} | {step._prepared.problem.eager.peak_bytes / MB:.1f} | {least / MB:.1f} | {asked} "
            )
            yield row + f"| not possible: {share:.2f} reached, {floor / least:.2f} proven | | | | | | |"
            continue
        report = planner.verify(model, (), kwargs, plan=plan)
        peak, there = plan.predicted.dynamic_peak_bytes, plan.whole_step
        exact = report.ok and report.measured_dynamic_peak_bytes == peak
        sizes = [f"{size / MB:.1f}" for size in (plan.baseline.dynamic_peak_bytes, least)]
        host = f"{0 if there is None else there.host_bytes / MB:.1f} | {'yes' if exact else 'no'}"
        waits = (predicted_wait(step, plan), *measured_waits(model, kwargs, plan))
        yield (
            f"| {name} | {' | '.join(sizes)} | {asked} | {peak / MB:.1f} | {plan.overhead:+.1%} "
            f"| {host} | {' | '.join(f'{wait:.3f}' for wait in waits)} |"
        )


def predicted_wait(step: planner.PreparedStep, plan: Plan) -> float:
    """The seconds that compute waits for the link in a step by a plan."""
    prepared = step._prepared
    at_once = tuple(replace(p, send_seconds=0.0, fetch_seconds=0.0) for p in prepared.packings)
    seconds = []
    for packings in (prepared.packings, at_once):
        made, schedule = schedule_at(plan, replace(prepared, packings=packings))
        seconds.append(simulate(made.problem.graph, schedule).seconds)
    return seconds[0] - seconds[1]


def measured_waits(model: nn.Module, kwargs: dict[str, torch.Tensor], plan: Plan) -> tuple[float, float]:
    """The seconds that steps of a planned model wait for a link of so many bytes a second, the medians.

    Returns:
        Those of the clock, and those of a clock that counts the step's processor time and these waits: it
        stands still while other processes have the processor.
    """
    copy, begin, wait = host_place._copy, HostPlace._begin, HostPlace._wait
    waited, counted = [0.0], [0.0]
    free: dict[object, float] = {}  # when the link of a direction is, by each of the clocks
    until: dict[int, float] = {}

    def slowly(tensors: list[torch.Tensor]) -> None:
        begun, size, link = time.perf_counter(), tensors[0].nbytes, threading.get_ident()
        copy(tensors)
        free[link] = max(free.get(link, 0.0), begun) + size / RATE
        time.sleep(max(0.0, free[link] - time.perf_counter()))

    def now() -> float:
        return time.thread_time() + sum(counted)

    def begun(place: HostPlace, link: object, into: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        free[link] = until[id(into)] = max(free.get(link, 0.0), now()) + into.nbytes / RATE
        return begin(place, link, into, source)  # type: ignore[arg-type]

    def watched(place: HostPlace, tensor: torch.Tensor) -> torch.Tensor:
        counted[-1] += max(0.0, until.pop(id(tensor)) - now())
        started = time.perf_counter()
        result = wait(place, tensor)
        waited[-1] += time.perf_counter() - started
        return result

    host_place._copy, HostPlace._begin, HostPlace._wait = slowly, begun, watched  # type: ignore[method-assign]
    try:
        plan.apply(model)
        for _ in range(8):  # the first compiles
            waited.append(0.0)
            counted.append(0.0)
            model(**kwargs).loss.backward()
            model.zero_grad()
    finally:
        host_place._copy, HostPlace._begin, HostPlace._wait = copy, begin, wait  # type: ignore[method-assign]
        planner.remove(model)
    return statistics.median(waited[2:]), statistics.median(counted[2:])


def _alone(step: planner.PreparedStep) -> planner.PreparedStep:
    """The same step, to be planned without sending anything."""
    prepared = step._prepared
    return planner.PreparedStep(
        replace(prepared, packings=(), options=replace(prepared.options, offload="none"))
    )


@dataclass(frozen=True)
class ByHand:
    """A way that trainers take: its dynamic peak and its seconds."""

    name: str
    peak_bytes: int
    seconds: float


def by_hand(step: Prepared) -> list[ByHand]:
    """The ways by hand."""
    graph = step.problem.graph
    blocks: dict[str, int] = {}
    block = np.full(graph.base_length, OUTSIDE, dtype=np.int64)
    for row in graph.forward_ops:
        inside = re.match(r".*?\b\d+(?=\.|$)", graph.ops[row].module)
        if inside:
            block[row] = blocks.setdefault(inside[0], len(blocks))
    recomputed = recompute_blocks(graph, block)
    plain = simulate(graph, recomputed)
    return [
        ByHand("each block", plain.peak_bytes, plain.seconds),
        _sent("each block, inputs on the host", step, recomputed),
        _sent("everything on the host", step, graph.base_schedule),
    ]


def _sent(name: str, step: Prepared, schedule: Schedule) -> ByHand:
    """A schedule with all that it keeps sent to the host, and fetched where it is read first."""
    graph = step.problem.graph
    lives = lifetimes(graph, schedule)
    kept = set(lives.value[crosses(graph, lives)].tolist())
    run = set(schedule.tolist())  # what runs again by a row of its own is not fetched
    made = packed(
        step.problem, [p for p in step.packings if p.value in kept and graph.ops[p.row].replay not in run]
    )
    waiting = {p.value: p for p in made.packings}
    rows = list(range(made.problem.graph.forward_length))
    for row in schedule.tolist()[graph.forward_length :]:
        read = [v for v in graph.ops[row].inputs if v in waiting]
        rows += [made.row_of["unpack", waiting.pop(v).row] for v in read]
        rows.append(made.row_of["run", row])
    problem, moved = overlapped(step.problem, made, np.array(rows, dtype=np.int64))
    line = simulate(problem.graph, moved)
    return ByHand(name, line.peak_bytes, line.seconds)


def rows_of(name: str, device: str) -> list[str]:
    """The rows of the page for a model on a device."""
    model, args, kwargs = build(name)
    step = planner.prepare(
        model,
        args,
        kwargs,
        device=_LINKED.get(device, device),
        offload="host",
        backend="graph",
        costs="roofline",
        encodings="none",
    )
    prepared, alone = step._prepared, _alone(step)
    total, resident = prepared.baseline_whole_step.allocated_bytes, prepared.resident.total
    found = []

    def planned(one: planner.PreparedStep, peak_bytes: int) -> Plan | None:
        share = 100 * (resident + peak_bytes + 2) / total  # so that its digits are no less
        try:
            return one.plan(f"{share:.9f}%", time_limit=LIMIT)
        except planner.InfeasibleBudget:
            return None

    least = [one.plan("min", time_limit=LIMIT) for one in (alone, step)]
    for way in by_hand(prepared):
        plans = [
            None if way.peak_bytes < known.predicted.dynamic_peak_bytes else planned(one, way.peak_bytes)
            for one, known in zip((alone, step), least, strict=True)
        ]
        extra = way.seconds / prepared.problem.graph.base_seconds - 1
        found.append(_row(name, device, way.name, f"{way.peak_bytes / GB:.2f}", f"{extra:+.1%}", *plans))
    peaks = " / ".join(f"{plan.predicted.dynamic_peak_bytes / GB:.2f}" for plan in least)
    found.append(_row(name, device, "least peak", peaks, "", *least))
    return found


def _row(
    name: str, device: str, way: str, peak: str, extra: str, alone: Plan | None, both: Plan | None
) -> str:
    times = [
        "not possible" if p is None else f"{p.predicted.seconds / p.no_recompute.seconds - 1:+.1%}"
        for p in (alone, both)
    ]
    there = "" if both is None or both.whole_step is None else f"{both.whole_step.host_bytes / GB:.2f}"
    proven = None if both is None else both.solver.bound_seconds
    least = "" if both is None or proven is None else f"{proven / both.no_recompute.seconds - 1:+.1%}"
    return f"| {name} | {device} | {way} | {peak} | {extra} | {' | '.join(times)} | {least} | {there} |"


def kept(rows: Path, name: str, made: Iterable[str]) -> None:
    """Print rows as they are made, and keep them."""
    found = []
    for row in made:
        print(row, flush=True)
        found.append(row)
    (rows / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def page(rows: Path) -> str:
    """The page of all rows that are there."""

    def there(names: Iterable[str]) -> str:
        paths = (rows / f"{name}.json" for name in names)
        return "".join(f"{row}\n" for path in paths if path.exists() for row in json.loads(path.read_text()))

    small = there(f"cpu-{name}" for name in SMALL)
    return PAGE + small + FRONTIER + there(f"{name}-{device}" for name in FRONTIERS for device in DEVICES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--small", nargs="*", default=SMALL, choices=SMALL)
    parser.add_argument("--models", nargs="*", default=FRONTIERS, choices=[*MODELS])
    parser.add_argument("--devices", nargs="+", default=DEVICES)
    parser.add_argument("--rows", type=Path, default=Path("docs/results/offload"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/offload.md"))
    given = parser.parse_args()
    torch.manual_seed(0)
    given.rows.mkdir(parents=True, exist_ok=True)
    for name, model, kwargs in small_models():
        if name in given.small:
            kept(given.rows, f"cpu-{name}", ran(name, model, kwargs))
    for name in given.models:
        for device in given.devices:
            kept(given.rows, f"{name}-{device}", rows_of(name, device))
            given.out.write_text(page(given.rows))
    given.out.write_text(page(given.rows))


if __name__ == "__main__":
    main()
