"""Published headlines, planned on the device they were published for, beside the published figures.

    python benchmarks/headlines.py --list
    python benchmarks/headlines.py --parts bert-large-128 resnet-50 --out docs/results

Nothing is run: every figure is a prediction by the device's roofline and by counting bytes. Each part
writes a JSON file below ``headlines/``; the table is made of all that are there. Parts take from seconds
to several minutes, of which the capture of the model is most.
"""

import argparse
import functools
import gc
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks.frontiers.classics import VGG, VGG_16, VGG_19, GoogLeNet, OriginalUNet, PSPNet
from benchmarks.frontiers.headlines import table
from benchmarks.frontiers.nets import DeepResNet, DenseNet, UnrolledLSTM
from planner.assembly import Prepared, make_plan, prepare
from planner.batch_search import BatchSearch, MaxBatch
from planner.budget import Budget
from planner.devices import find_device
from planner.files import write_atomically
from planner.report import figure
from planner.sizes import SizedSteps
from planner.step import Step
from solvers import portfolio
from solvers.schedule import alive_at, simulate
from solvers.solution import Solution
from tests.zoo import BottleneckNet, WithLoss

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

DEVICE = find_device("V100-32GB")
BUDGET = Budget(DEVICE.memory_bytes, DEVICE.name)
LARGE = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
OVERHEADS = (0.15, 0.29)

Result = dict[str, Any]
PARTS: dict[str, Callable[[], Result]] = {}


def bert(attention: str, **size: int) -> nn.Module:
    """A sequence classifier, as fine-tuned on XNLI."""
    import transformers

    config = transformers.BertConfig(**size, num_labels=3, attn_implementation=attention)
    with torch.device("meta"):
        return transformers.BertForSequenceClassification(config).train()


def words(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Full sequences: no padding."""
    with torch.device("meta"):
        ids = torch.zeros((batch, length), dtype=torch.long)
        labels = torch.zeros(batch, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def images(batch: int, size: int, channels: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures and their classes."""
    return torch.empty(batch, channels, size, size, device="meta"), torch.zeros(
        batch, dtype=torch.long, device="meta"
    )


def classifier(build: Callable[[], nn.Module]) -> nn.Module:
    """A classifier with its loss, without weights."""
    with torch.device("meta"):
        return WithLoss(build()).train()


def prepared(model: nn.Module, args: Any, optimizer: Any = None, *, device: Any = DEVICE) -> Prepared:
    """A captured step."""
    kwargs = args if isinstance(args, dict) else {}
    step = Step(() if isinstance(args, dict) else tuple(args), kwargs)
    return prepare(model, step, optimizer=optimizer, device=device, progress=lambda text, fraction: None)


def search(model: nn.Module, make_args: Callable[[int], Any], optimizer: Any) -> BatchSearch:
    """A search for the largest batch on the whole of the device."""
    steps = SizedSteps(lambda size: prepared(model, make_args(size), optimizer))
    return BatchSearch(
        steps,
        BUDGET,
        progress=lambda text, fraction: print(f"  {text}", file=sys.stderr) if "batch" in text else None,
    )


def told(found: MaxBatch) -> Result:
    """What a search found, without the plan itself."""
    whole = found.plan.whole_step
    assert whole is not None
    return {**found.to_dict(), "whole_step": {**whole.model_dump(), "total_bytes": whole.total_bytes}}


def holders(step: Prepared) -> Result:
    """Bytes a sample by operation, of what is alive when the step that recomputes nothing peaks."""
    graph = step.problem.graph
    schedule = graph.base_schedule
    timeline = simulate(graph, schedule)
    by_name: dict[str, int] = {}
    masks = 0
    for value in alive_at(graph, schedule, timeline.peak_step).tolist():
        op = graph.ops[int(graph.producer[value])]
        name = op.name.split(" ")[0]
        by_name[name] = by_name.get(name, 0) + graph.values[value].bytes
        if name == "aten.native_dropout.default" and op.outputs.index(value) == 1:
            masks += graph.values[value].bytes
    largest = sorted(by_name.items(), key=lambda item: -item[1])[:8]
    return {"peak_bytes": timeline.peak_bytes, "by_operation": dict(largest), "dropout_mask_bytes": masks}


def batches(
    model: nn.Module,
    make_args: Callable[[int], Any],
    optimizer: Any,
    published: Result,
    overheads: tuple[float, ...] = OVERHEADS,
) -> Result:
    """The largest batches without a plan and at several overheads."""
    looking = search(model, make_args, optimizer)
    answers = {f"{share:.2f}": told(looking.run(max_overhead=share)) for share in overheads}
    largest = max(looking.steps.captured)
    nearest = min(looking.steps.captured, key=lambda size: abs(size - published["unplanned"]))
    return {
        "kind": "batches",
        "published": published,
        "answers": answers,
        "largest_captured": largest,
        "holders": {"batch": nearest, **holders(looking.steps.prepared[nearest])},
    }


def part(name: str) -> Callable[[Callable[[], Result]], Callable[[], Result]]:
    """Registers a headline."""

    def register(function: Callable[[], Result]) -> Callable[[], Result]:
        PARTS[name] = function
        return function

    return register


# ---- BERT ---------------------------------------------------------------------------------------------

_PADDLE = {
    ("large", 128): {"unplanned": 93, "planned": 562, "ratio": 6.04},
    ("large", 512): {"unplanned": 28, "planned": 120, "ratio": 4.29},
    ("base", 128): {"unplanned": 273, "planned": 1390, "ratio": 5.09},
    ("base", 512): {"unplanned": 80, "planned": 300, "ratio": 3.75},
}


def _register_berts() -> None:
    for (size, length), published in _PADDLE.items():
        for attention in ("eager", "sdpa"):

            def run(
                size: str = size,
                length: int = length,
                attention: str = attention,
                published: Result = published,
            ) -> Result:
                model = bert(attention, **(LARGE if size == "large" else {}))
                return batches(model, lambda batch: words(batch, length), "Adam", published)

            name = f"bert-{size}-{length}" + ("" if attention == "eager" else "-sdpa")
            PARTS[name] = run
        shape = LARGE if size == "large" else {}
        PARTS[f"bert-{size}-{length}-length"] = functools.partial(fitting_length, shape, published, length)


def fitting_length(shape: dict[str, int], published: Result, length: int) -> Result:
    """What the published unplanned batch takes here, and the length at which it would just fit."""
    batch = published["unplanned"]
    model = bert("eager", **shape)
    steps = SizedSteps(lambda tokens: prepared(model, words(batch, tokens), "Adam"))
    full = steps.capture(length)
    steps.capture(length // 2)
    for _ in range(3):  # attention's bytes grow with the square: each capture is nearer
        low, high = 1, 2 * length
        while high - low > 1:
            middle = (low + high) // 2
            fits = steps.at(middle).unplanned_bytes <= BUDGET.bytes
            low, high = (middle, high) if fits else (low, middle)
        if low in steps.captured:
            break
        steps.capture(low)
    fitting = max(n for n, sized in steps.captured.items() if sized.unplanned_bytes <= BUDGET.bytes)
    per_sample = {
        tokens: int(sized.eager_bytes.max() - full.eager_final_bytes) // batch
        for tokens, sized in sorted(steps.captured.items())
    }
    return {
        "kind": "length",
        "published": published,
        "batch": batch,
        "length": length,
        "unplanned_bytes": full.unplanned_bytes,
        "fitting_length": fitting,
        "fitting_bytes": steps.captured[fitting].unplanned_bytes,
        "resident_bytes": full.footprint.resident.total,
        "gradient_bytes": full.eager_final_bytes,
        "activation_bytes_a_sample": per_sample,
    }


_register_berts()


@part("bert-100-layers")
def bert_100_layers() -> Result:
    """100 layers of BERT-Base's width, 32 x 128 tokens, the whole step in 32 GB."""
    return planned(bert("eager", num_hidden_layers=100), words(32, 128), "Adam", BUDGET, {"fits": "32 GB"})


@part("bert-100-layers-large")
def bert_100_layers_large() -> Result:
    """The same of BERT-Large's width."""
    model = bert("eager", **{**LARGE, "num_hidden_layers": 100})
    return planned(model, words(32, 128), "Adam", BUDGET, {"fits": "32 GB"})


@part("bert-large-562")
def bert_large_562() -> Result:
    """BERT-Large at 562 x 128 tokens in 20 GB: live bytes over the step, planned and not."""
    published = {"unplanned_gb": "175-184", "planned_gb": "20-25"}
    budget = Budget(20 * 10**9, "20GB")
    return planned(bert("eager", **LARGE), words(562, 128), "Adam", budget, published, draw="bert-large-562")


def planned(
    model: nn.Module, args: Any, optimizer: Any, budget: Budget, published: Result, draw: str | None = None
) -> Result:
    """One plan for one budget."""
    step = prepared(model, args, optimizer)
    room = step.footprint.room_bytes(budget.bytes or 0)
    graph = step.problem.graph
    solution = portfolio.solve(graph, room, time_limit=30)
    whole = step.footprint.whole_step(solution.peak_bytes, step.problem.final_bytes)
    base = step.baseline_whole_step
    result: Result = {
        "kind": "plan",
        "published": published,
        "budget_bytes": budget.bytes,
        "fits": solution.feasible,
        "unplanned": {**base.model_dump(), "total_bytes": base.total_bytes},
        "planned": {**whole.model_dump(), "total_bytes": whole.total_bytes},
        "unplanned_dynamic_bytes": step.problem.eager.peak_bytes,
        "planned_dynamic_bytes": solution.peak_bytes,
        "overhead": solution.seconds / step.problem.eager.seconds - 1,
    }
    if draw is not None and solution.feasible:
        result["figure"] = f"headlines/{draw}.svg"
        result["plan"] = make_plan(step, solution, budget)
    return result


# ---- convolutional and recurrent nets -------------------------------------------------------------------


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """What residual nets are trained with."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@part("resnet-50")
def resnet_50() -> Result:
    """ResNet-50, 224 x 224, fp32."""
    model = classifier(BottleneckNet)
    published = {"unplanned": 380, "planned": 780, "ratio": 2.05}
    return batches(model, lambda n: images(n, 224), momentum(model), published, (0.15, 0.30))


def least_within(
    model: nn.Module, args: Any, most_overhead: float, published: Result, optimizer: Any = None
) -> Result:
    """The least dynamic peak at a bounded overhead, by bisection on the budget."""
    step = prepared(model, args, optimizer)
    graph, eager = step.problem.graph, step.problem.eager
    lowest = portfolio.solve(graph, None, time_limit=30)
    allowed = (1 + most_overhead) * eager.seconds
    best = None
    if lowest.seconds <= allowed:
        best = lowest
    low, high = lowest.peak_bytes, eager.peak_bytes
    for _ in range(10):
        if best is lowest or high - low <= 0.005 * high:
            break
        middle = (low + high) // 2
        known = [] if best is None else [best.schedule]
        solution = portfolio.solve(graph, middle, time_limit=15, known=known)
        if solution.feasible and solution.seconds <= allowed:
            best, high = solution, solution.peak_bytes
        else:
            low = middle
    assert best is not None
    return least(step, best, published)


def at_factor(model: nn.Module, args: Any, factor: float, published: Result) -> Result:
    """The least overhead found for a given share of the unplanned peak."""
    step = prepared(model, args)
    room = int(step.problem.eager.peak_bytes / factor)
    return least(step, portfolio.solve(step.problem.graph, room, time_limit=240), published)


def least(step: Prepared, best: Solution, published: Result) -> Result:
    """What a solution takes beside the unplanned step."""
    eager = step.problem.eager
    return {
        "kind": "least",
        "published": published,
        "unplanned_dynamic_bytes": eager.peak_bytes,
        "planned_dynamic_bytes": best.peak_bytes,
        "gradient_and_output_bytes": step.problem.final_bytes,
        "resident_bytes": step.resident.total,
        "factor": eager.peak_bytes / best.peak_bytes,
        "reduction": 1 - best.peak_bytes / eager.peak_bytes,
        "reduction_with_resident": 1
        - (best.peak_bytes + step.resident.total) / (eager.peak_bytes + step.resident.total),
        "overhead": best.seconds / eager.seconds - 1,
        "overhead_over_no_recompute": best.seconds / step.problem.graph.base_seconds - 1,
        "bound_over_no_recompute": None
        if best.bound_seconds is None
        else best.bound_seconds / step.problem.graph.base_seconds - 1,
    }


@part("resnet-1001")
def resnet_1001() -> Result:
    """Chen et al.: a 1000-layer residual net from 48 to 7 GB at 30 % extra time; a batch of 48 GB."""
    model = classifier(lambda: DeepResNet(111))
    return at_factor(model, images(336, 32), 6.9, {"factor": 6.9, "overhead": 0.30})


@part("lstm-1000")
def lstm_1000() -> Result:
    """Gruslys et al.: 1000 steps, 95 % less memory at 33 % extra time."""
    with torch.device("meta"):
        model = UnrolledLSTM(256).train()
        args = (torch.empty(1000, 32, 256), torch.zeros(32, dtype=torch.long))
    return least_within(model, args, 0.33, {"reduction": 0.95, "overhead": 0.33})


@part("vgg-16")
def vgg_16() -> Result:
    """MONeT: VGG-16 from 14.12 to 5.51 GB at 9 % extra time."""
    model = classifier(lambda: VGG(VGG_16))
    steps = SizedSteps(lambda n: prepared(model, images(n, 224)))
    steps.capture(16)
    steps.capture(64)

    def allocated(n: int) -> int:
        sized = steps.at(n)
        return sized.footprint.resident.total + int(sized.eager_bytes.max())

    batch = max(n for n in range(1, 1000) if allocated(n) <= 14.12e9)
    published = {"unplanned_gb": 14.12, "planned_gb": 5.51, "overhead": 0.09}
    step = steps.capture(batch)
    solution = portfolio.solve(step.graph, int(5.51e9) - step.footprint.resident.total, time_limit=30)
    return {
        "kind": "gigabytes",
        "published": published,
        "batch": batch,
        "unplanned_bytes": allocated(batch),
        "planned_bytes": solution.peak_bytes + step.footprint.resident.total,
        "fits": solution.feasible,
        "overhead": solution.seconds / step.eager_seconds - 1,
    }


_KUSUMOTO: dict[str, tuple[Callable[[], nn.Module], int, int, int, float]] = {
    "pspnet": (PSPNet, 2, 713, 3, 0.71),
    "u-net": (OriginalUNet, 8, 572, 1, 0.48),
    "resnet-50": (BottleneckNet, 96, 224, 3, 0.62),
    "resnet-152": (lambda: BottleneckNet((3, 8, 36, 3)), 48, 224, 3, 0.75),
    "vgg-19": (lambda: VGG(VGG_19), 64, 224, 3, 0.36),
    "densenet-161": (lambda: DenseNet((6, 12, 36, 24), 48), 32, 224, 3, 0.81),
    "googlenet": (GoogLeNet, 256, 224, 3, 0.39),
}


def _register_kusumoto() -> None:
    for name, (build, batch, size, channels, reduction) in _KUSUMOTO.items():

        def run(
            build: Callable[[], nn.Module] = build,
            args: Any = (batch, size, channels),
            reduction: float = reduction,
        ) -> Result:
            return least_within(classifier(build), images(*args), 1.0, {"reduction": reduction})

        PARTS[f"kusumoto-{name}"] = run


_register_kusumoto()


def planning(
    model: nn.Module, args: dict[str, torch.Tensor], device: str, budget: str, optimizer: Any
) -> Result:
    """What it takes to plan for a GPU on this machine."""
    started = time.process_time()
    plan = planner.plan(model, (), args, budget=budget, device=device, optimizer=optimizer)
    seconds = time.process_time() - started
    assert plan.whole_step is not None
    assert plan.baseline_whole_step is not None
    return {
        "kind": "planning",
        "for": device,
        "plan_seconds": round(seconds, 1),
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "total_bytes": plan.whole_step.total_bytes,
        "unplanned_bytes": plan.baseline_whole_step.total_bytes,
        "overhead": plan.overhead,
    }


@part("plan-bert-large")
def plan_bert_large() -> Result:
    """BERT-Large, 64 x 512 tokens, for a V100."""
    return planning(bert("eager", **LARGE), words(64, 512), "V100-32GB", "31GiB", "AdamW")


@part("plan-llama-7b")
def plan_llama_7b() -> Result:
    """Llama of 7 billion parameters in bfloat16, 4 x 4096 tokens, without an optimizer, for an H100."""
    import transformers

    size = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
            "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096}  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, use_cache=False))
        tokens = torch.zeros((4, 4096), dtype=torch.long)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    return planning(model.to(torch.bfloat16).train(), inputs, "H100", "78GiB", None)


# ---- running ----------------------------------------------------------------------------------------------


def main() -> None:
    """Run the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="which headlines; all if not given")
    parser.add_argument("--list", action="store_true", help="list them and stop")
    parser.add_argument("--table", action="store_true", help="only make the table of what is there")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for results (out)")
    options = parser.parse_args()
    if options.list:
        print("\n".join(PARTS))
        return
    names = [] if options.table else (options.parts or list(PARTS))
    for name in names:
        if name not in PARTS:
            parser.error(f"no headline {name!r}; expected some of {', '.join(PARTS)}")
    folder = options.out / "headlines"
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        started = time.process_time()
        print(name, file=sys.stderr)
        result = PARTS[name]()
        plan = result.pop("plan", None)
        if plan is not None:
            figure.save(plan, options.out / result["figure"])
        result |= {
            "device": DEVICE.name,
            "process_seconds": round(time.process_time() - started, 1),
            "torch": torch.__version__,
            "machine": platform.machine(),
        }
        write_atomically(folder / f"{name}.json", json.dumps(result, indent=1) + "\n")
        gc.collect()
    found = {name: folder / f"{name}.json" for name in PARTS}
    results = {name: json.loads(path.read_text()) for name, path in found.items() if path.exists()}
    text = table(results, DEVICE)
    write_atomically(options.out / "headlines.md", text)
    print(text)


if __name__ == "__main__":
    main()
