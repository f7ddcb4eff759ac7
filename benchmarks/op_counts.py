"""What a planned step that recomputes nothing executes, operator by operator, against eager.

    python benchmarks/op_counts.py [--models gpt2 bert llama resnet50] [--repeats 15] [--all] [--json]

Each model trains a step unplanned and a step by a plan with all the memory it wants. Counted are all the
operators that run, those that others call included, by the profiler's names: how often each is called, how
often it allocates itself, and the time that is its own. Printed are those that allocate, or copy, more often
in the plan's step than in eager's, with the reason; --all prints every one. With --repeats, steps are timed
as well, by turns: medians of process time, and of its ratio. The program starts itself again with the
settings of ``benchmarks/time_truth.py``, or page faults would be what is timed. With --kernels as well,
the time of operators is told apart: that of kernels which a plan runs with eager's arguments, whatever it
does, or the bits would be others; and that of all other operators, which is what can be saved.
"""

import argparse
import copy
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks import hugging_face
from benchmarks.time_truth import SETTINGS
from planner.verification.measure import time_steps

MODELS = ("gpt2", "bert", "llama", "resnet50")

COPIES = frozenset({"aten::copy_"})
"""Operators that copy into memory that is there."""

REASONS = {
    "aten::copy_": "masks of dropout as numbers; single numbers; empty caches of keys and values; statistics "
    "written back",
    "aten::empty_strided": "the memory for these; clones of statistics",
    "aten::empty": "where numbers of large masks of dropout are drawn",
    "aten::_to_copy": "single numbers",
    "aten::clone": "empty caches of keys and values; statistics of batch normalisation",
    "aten::add": "counters of batch normalisations, one number each; sums by `out=`",
}
"""By operator: why the plan's step calls it more often. Operators without one are to be looked into."""


KERNELS = frozenset(
    f"aten::{name}"
    for name in (
        *("convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm"),
        *("native_batch_norm", "_native_batch_norm_legit", "native_batch_norm_backward"),
        *("native_layer_norm", "native_layer_norm_backward"),
        *("max_pool2d_with_indices", "max_pool2d_with_indices_backward"),
        *("_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data"),
        *("nll_loss_forward", "nll_loss_backward", "embedding_dense_backward", "index_select"),
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
)
"""Operators that compute more than elements, or sums, of their arguments."""

PARTS = "kernels", "others"


@dataclass
class Count:
    """Calls of one operator in a step: how many, how many of them allocated, and their seconds."""

    calls: int = 0
    allocating: int = 0
    seconds: float = 0.0


def build(
    name: str, layers: int, words: int, images: int = 8, side: int = 96
) -> tuple[nn.Module, dict[str, Any]]:
    """A model by name, with arguments of a step whose output has a ``loss`` or is one."""
    torch.manual_seed(0)
    if name != "resnet50":
        tokens = torch.randint(0, hugging_face.WORDS, (2, words))
        return hugging_face.build(name, layers), {"input_ids": tokens, "labels": tokens}
    import transformers

    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=100))
    pixels, labels = torch.randn(images, 3, side, side), torch.randint(0, 100, (images,))
    return model.train(), {"pixel_values": pixels, "labels": labels}


def step(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Forward and backward of one batch, into fresh gradients."""
    model.zero_grad(set_to_none=True)
    output = model(**kwargs)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    del output
    loss.backward()


def counted(run: Callable[[], None]) -> dict[str, Count]:
    """The operators that a step calls, by name."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    found: dict[str, Count] = {}
    for event in profile.events():
        if not event.name.startswith("aten::"):
            continue
        count = found.setdefault(event.name, Count())
        count.calls += 1
        count.allocating += event.self_cpu_memory_usage > 0
        count.seconds += event.self_cpu_time_total * 1e-6
    return found


def in_kernels(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a step in :data:`KERNELS`, with what these call, and in all other operators."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    kernels = others = 0.0
    for event in profile.events():
        within, caller = event.name in KERNELS, event.cpu_parent
        while caller is not None and caller.name not in KERNELS:
            caller = caller.cpu_parent
        if caller is None and within:
            kernels += event.cpu_time_total * 1e-6
        elif caller is None and event.name.startswith("aten::"):
            others += event.self_cpu_time_total * 1e-6
    return kernels, others


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Count, and time, the unplanned and the planned step of one model."""
    eager, kwargs = build(name, options.layers, options.words, options.images, options.side)
    planned = copy.deepcopy(eager)
    plan = planner.plan(planned, kwargs=kwargs, budget="1TiB", solver="none", outputs="dropped")
    plan.apply(planned)
    runs = [partial(step, model, kwargs) for model in (eager, planned)]
    for run in runs:
        run()
        run()
    theirs, ours = map(counted, runs)
    result: dict[str, Any] = {
        "operators": {
            operator: {
                "eager": asdict(theirs.get(operator, Count())),
                "planned": asdict(ours.get(operator, Count())),
            }
            for operator in sorted({*theirs, *ours})
        },
    }
    if options.repeats and options.kernels:
        rounds = [[in_kernels(run) for run in runs] for _ in range(options.repeats)]
        result["operator_seconds"] = {
            kind: {where: _median([both[k][w] for both in rounds]) for w, where in enumerate(PARTS)}
            for k, kind in enumerate(("eager", "planned"))
        }
    if options.repeats:
        taken = time_steps(runs, options.repeats)
        ratios = sorted(p / e for e, p in zip(*taken, strict=True))
        result["seconds"] = dict(zip(("eager", "planned"), map(_median, taken), strict=True))
        result["ratio"] = {
            "median": _median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        }
    return result


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def table(result: dict[str, Any], everything: bool) -> list[str]:
    """Lines of a Markdown table of what is more often, or of everything."""
    lines = [
        "| operator | calls: eager | planned | allocating: eager | planned | ms: eager | planned | why |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for operator, by_step in result["operators"].items():
        eager, planned = by_step["eager"], by_step["planned"]
        kind = "calls" if operator in COPIES else "allocating"
        more = planned[kind] > eager[kind]
        if not everything and not more:
            continue
        figures = [f"{s[k]}" for k in ("calls", "allocating") for s in (eager, planned)]
        figures += [f"{s['seconds'] * 1e3:.1f}" for s in (eager, planned)]
        reason = REASONS.get(operator, "") if more else ""
        lines.append(f"| `{operator.removeprefix('aten::')}` | {' | '.join(figures)} | {reason} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--layers", type=int, default=4, help="of the language models")
    parser.add_argument(
        "--words", type=int, default=256, help="length of their sequences, of which there are 2"
    )
    parser.add_argument("--images", type=int, default=8, help="of ResNet-50")
    parser.add_argument("--side", type=int, default=96, help="of these images, in pixels")
    parser.add_argument("--repeats", type=int, default=0, help="timed steps of each kind; 0 for none")
    parser.add_argument("--all", action="store_true", help="print every operator")
    parser.add_argument("--kernels", action="store_true", help="tell kernels that any plan runs apart")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--page-faults", action="store_true", help="with glibc's cache of each thread")
    options = parser.parse_args()
    settings = {k: v for k, v in SETTINGS.items() if k != "GLIBC_TUNABLES" or not options.page_faults}
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **settings})
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    results = {name: compare(name, options) for name in options.models}
    if options.json:
        json.dump(results, sys.stdout, indent=1)
        return
    for name, result in results.items():
        print(f"## {name}\n")
        if options.repeats:
            eager, planned = (result["seconds"][k] * 1e3 for k in ("eager", "planned"))
            low, high = result["ratio"]["quartiles"]
            print(
                f"A step takes {eager:.0f} ms eager and {planned:.0f} ms planned: "
                f"{result['ratio']['median']:.3f} (quartiles {low:.3f} to {high:.3f}).\n"
            )
        if (by_kind := result.get("operator_seconds")) is not None:
            (kernels, others), (theirs, ours) = ((k * 1e3 for k in s.values()) for s in by_kind.values())
            print(
                f"Of {kernels + others:.1f} ms in eager's operators, {kernels:.1f} "
                f"({kernels / (kernels + others):.3f}) are in kernels that any plan runs ({theirs:.1f} "
                f"planned), {others:.1f} in others ({ours:.1f} planned).\n"
            )
        print("\n".join(table(result, options.all)), end="\n\n")


if __name__ == "__main__":
    main()
