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
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.frontiers import answers
from benchmarks.frontiers.answers import (
    BUDGET,
    DEVICE,
    Result,
    at_factor,
    at_the_peak,
    batches,
    fitting_length,
    least_within,
    planned,
    planning,
    prepared,
)
from benchmarks.frontiers.classics import VGG, VGG_16, VGG_19, GoogLeNet, OriginalUNet, PSPNet
from benchmarks.frontiers.headlines import table
from benchmarks.frontiers.nets import DeepBottleneckNet, DeepResNet, DenseNet, UnrolledLSTM
from benchmarks.frontiers.published import anatomy, formulas, layer_times
from planner.batch.interpolate import SizedSteps
from planner.planfile.atomic_file import write_atomically
from planner.planfile.budget import Budget
from planner.report import figure
from solvers import portfolio
from tests.zoo import BottleneckNet, WithLoss

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

LARGE = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}

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
        PARTS[f"bert-{size}-{length}-length"] = functools.partial(bert_length, size, length, published)


def bert_length(size: str, length: int, published: Result) -> Result:
    """The length at which the published unplanned batch would just fit."""
    model = bert("eager", **(LARGE if size == "large" else {}))
    batch = published["unplanned"]
    return fitting_length(model, lambda tokens: words(batch, tokens), batch, length, "Adam", published)


_register_berts()


class Mixed(nn.Module):
    """A model in mixed precision, by PyTorch's autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> Any:
        with torch.autocast("cuda", torch.float16):
            return self.model(**inputs)


@part("bert-large-512-amp")
def bert_large_512_amp() -> Result:
    """BERT-Large in mixed precision."""
    published = {"unplanned": 18, "planned": 180, "ratio": 10.0}
    return batches(Mixed(bert("eager", **LARGE)), lambda batch: words(batch, 512), "Adam", published)


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


def chen() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The 1000-layer net of Chen et al.: 32 pictures of 224 x 224, and five times the depth of the 200
    layers in the example that they published with the paper, every stage alike."""
    return classifier(lambda: DeepBottleneckNet((15, 120, 180, 15))), images(32, 224)


@part("resnet-1000")
def resnet_1000() -> Result:
    """Chen et al.: a 1000-layer residual net from 48 to 7 GB at 30 % extra time; their memory, our time."""
    return at_factor(*chen(), 6.9, {"factor": 6.9, "overhead": 0.30})


@part("resnet-1000-at-30")
def resnet_1000_at_30() -> Result:
    """The same; their time, our memory."""
    return least_within(*chen(), 0.30, {"factor": 6.9, "overhead": 0.30})


@part("resnet-1001")
def resnet_1001() -> Result:
    """Another net of 1000 layers, He et al.'s for pictures of 32 x 32, at a batch that takes 48 GB."""
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
    steps = SizedSteps(lambda n, like: prepared(model, images(n, 224), like=like))
    steps.capture(16)
    steps.capture(64)

    def allocated(n: int) -> int:
        sized = steps.at(n)
        return sized.footprint.resident.total + int(sized.eager_bytes.max())

    batch = max(n for n in range(1, 1000) if allocated(n) <= 14.12e9)
    published = {"unplanned_gb": 14.12, "planned_gb": 5.51, "overhead": 0.09}
    step = steps.capture(batch)
    solution = portfolio.solve(
        step.graph, int(5.51e9) - step.footprint.resident.total, time_limit=30 * answers.patience
    )
    return {
        "kind": "gigabytes",
        "published": published,
        "batch": batch,
        "unplanned_bytes": allocated(batch),
        "planned_bytes": solution.peak_bytes + step.footprint.resident.total,
        "fits": solution.feasible,
        "overhead": solution.seconds / step.eager_seconds - 1,
        "peak": at_the_peak(step.graph, solution.schedule),
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


# ---- one layer, one set-up ------------------------------------------------------------------------------


PARTS["transformer-layer"] = formulas
PARTS["layer-22b"] = layer_times


@part("hugging-face-bert-large")
def hugging_face() -> Result:
    """The published anatomy of a training step."""
    return anatomy(lambda: bert("eager", **LARGE), lambda batch: words(batch, 512))


# ---- running ----------------------------------------------------------------------------------------------


def main() -> None:
    """Run the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="which headlines; all if not given")
    parser.add_argument("--list", action="store_true", help="list them and stop")
    parser.add_argument("--table", action="store_true", help="only make the table of what is there")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="multiplies time limits, for a busy machine (1)"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for results (out)")
    options = parser.parse_args()
    answers.patience = options.patience
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
        result = {"device": DEVICE.name} | result
        result |= {
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
