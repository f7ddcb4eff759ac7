"""Losses and MLPs in pieces: peaks and times of plans with split="loss" and "auto", against those without.

    python benchmarks/split.py [--models llama gpt2 bert ...] [--repeats 3] [--out docs/results/split.md]
    python benchmarks/split.py --planning   # seconds of planning where there is nothing to split

Every model trains one step on the CPU, its outputs dropped. Peaks are over entry, in MiB: measured by the
allocator's own events, and predicted by the plan. Times are measured process time over the unplanned step's;
the program starts itself again with the settings of ``benchmarks/time_truth.py``, or page faults would be
what is timed. ``planner.verify`` compares gradients and losses with the step in double precision.
"""

import argparse
import contextlib
import copy
import itertools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import transformers as hf
from torch.utils.checkpoint import checkpoint

import planner
from benchmarks.time_truth import SETTINGS
from planner.choices import SplitWhat
from planner.verification.measure import measure_peak, time_steps

MIB = 2**20
Built = tuple[nn.Module, dict[str, torch.Tensor]]


class Classifier(nn.Module):
    """A classifier with 50,000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU())
        self.head = nn.Linear(256, 50_000)
        self.checkpointed = False

    def gradient_checkpointing_enable(self) -> None:
        self.checkpointed = True

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.rows(x)), labels)


class MLPs(nn.Module):
    """Four blocks whose MLPs are eight times as wide as their rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width)
            )
            for _ in range(4)
        )
        self.head = nn.Linear(width, 8)
        self.checkpointed = False

    def gradient_checkpointing_enable(self) -> None:
        self.checkpointed = True

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return x

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.rows(x)), labels)


class Convolutions(nn.Module):
    """Convolutions and batch normalisations, without a product of rows."""

    def __init__(self) -> None:
        super().__init__()
        channels = [3, *(32 for _ in range(12))]
        self.body = nn.Sequential()
        for i, o in itertools.pairwise(channels):
            self.body.extend([nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()])
        self.head = nn.Conv2d(32, 10, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x)).mean((2, 3)), labels)


class Attentions(nn.Module):
    """Attention without MLPs, and a head on the mean of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(6))
        self.attentions = nn.ModuleList(nn.MultiheadAttention(128, 4, batch_first=True) for _ in range(6))
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            y = norm(x)
            x = x + attention(y, y, y, need_weights=False)[0]
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels)


class Trained(nn.Module):
    """A training step of a model, and of one that does not train: what ``planner.step`` plans.

    Args:
        step: Computes the loss of both models and a batch.
    """

    def __init__(self, step: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        config = hf.LlamaConfig(**LLAMA_SIZES, tie_word_embeddings=False)
        self.model = hf.LlamaForCausalLM(config)
        self.other = hf.LlamaForCausalLM(config).requires_grad_(False)
        self.step = step

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.step(self.model, self.other, **batch)


def fine_tuning(model: Any, other: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """Negative log likelihood of the next words, of logits that are shifted outside of the model."""
    logits = model(input_ids=input_ids).logits[:, :-1].contiguous()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def preference(model: Any, other: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Direct preference optimisation: the first half of the batch is preferred to the second."""

    def log_probabilities(of: Any) -> torch.Tensor:
        logits = of(input_ids=input_ids).logits[:, :-1]
        chosen = torch.gather(logits.log_softmax(-1), -1, labels[:, 1:, None]).squeeze(-1)
        return chosen.sum(-1)

    with torch.no_grad():
        reference = log_probabilities(other)
    chosen, rejected = (log_probabilities(model) - reference).chunk(2)
    return -nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def distillation(model: Any, other: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """The divergence of a model's words from a teacher's."""
    with torch.no_grad():
        teacher = other(input_ids=input_ids).logits.flatten(0, 1).log_softmax(-1)
    student = model(input_ids=input_ids).logits.flatten(0, 1).log_softmax(-1)
    return nn.functional.kl_div(student, teacher, log_target=True, reduction="batchmean")


LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama() -> Built:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA_SIZES, tie_word_embeddings=False))
    return model, _tokens(1, 2048, 32_000)


def qwen() -> Built:
    model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**LLAMA_SIZES, tie_word_embeddings=True))
    return model, _tokens(1, 1024, 32_000)


def gemma() -> Built:
    config = hf.Gemma2Config(**LLAMA_SIZES, head_dim=64, attn_implementation="eager")
    return hf.Gemma2ForCausalLM(config), _tokens(1, 1024, 32_000)


def gpt2() -> Built:
    config = hf.GPT2Config(vocab_size=50_257, n_embd=256, n_layer=4, n_head=4)
    return hf.GPT2LMHeadModel(config), _tokens(2, 512, 50_257)


def bert() -> Built:
    config = hf.BertConfig(
        vocab_size=30_522, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    batch = _tokens(4, 256, 30_522)
    batch["labels"][:, ::7] = -100
    return hf.BertForMaskedLM(config), batch


def t5() -> Built:
    config = hf.T5Config(
        vocab_size=32_128,
        d_model=256,
        d_ff=1024,
        d_kv=64,
        num_layers=4,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config), _tokens(2, 512, 32_000)


def mixtral() -> Built:
    config = hf.MixtralConfig(**LLAMA_SIZES, num_local_experts=4)
    return hf.MixtralForCausalLM(config), _tokens(1, 1024, 32_000)


def vit() -> Built:
    config = hf.ViTConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, num_labels=1000
    )
    batch = {"pixel_values": torch.randn(16, 3, 224, 224), "labels": torch.randint(0, 1000, (16,))}
    return hf.ViTForImageClassification(config), batch


def mlps() -> Built:
    return MLPs(256), {"x": torch.randn(4096, 256), "labels": torch.randint(0, 8, (4096,))}


def classifier() -> Built:
    return Classifier(), {"x": torch.randn(1024, 512), "labels": torch.randint(0, 50_000, (1024,))}


def steps(step: Callable[..., torch.Tensor], batch: int, length: int) -> Callable[[], Built]:
    return lambda: (Trained(step), _tokens(batch, length, 32_000))


MODELS: dict[str, tuple[str, Callable[[], Built]]] = {
    "llama": ("Llama, 2,048 tokens, 32,000 words", llama),
    "gpt2": ("GPT-2 (tied), 2 x 512, 50,257", gpt2),
    "bert": ("BERT for masked words, 4 x 256, 30,522", bert),
    "gemma": ("Gemma 2 (soft cap, tied), 1,024, 32,000", gemma),
    "qwen": ("Qwen 2 (tied), 1,024, 32,000", qwen),
    "t5": ("T5, 2 x 512, 32,128", t5),
    "mixtral": ("Mixtral, 4 experts, 1,024, 32,000", mixtral),
    "vit": ("ViT, 16 x 224 x 224, 1,000 classes", vit),
    "mlps": ("MLPs of 256 x 2,048, 4,096 rows", mlps),
    "classifier": ("classifier, 1,024 rows, 50,000 classes", classifier),
    "sft": ("step: fine-tuning, 1,024, 32,000", steps(fine_tuning, 1, 1024)),
    "dpo": ("step: preferences, 4 x 256, 32,000", steps(preference, 4, 256)),
    "distillation": ("step: distillation, 1,024, 32,000", steps(distillation, 1, 1024)),
}

HEADS = dict.fromkeys(("llama", "qwen", "mixtral", "gpt2", "gemma"), ("lm_head", 1)) | {
    "bert": ("cls", 0),
    "t5": ("lm_head", 0),
    "vit": ("classifier", 0),
    "mlps": ("head", 0),
    "classifier": ("head", 0),
}
"""Of the models of which the loss is computed by hand: what makes logits of rows, and by how much the labels
are shifted."""

NOTHING_TO_SPLIT: dict[str, Callable[[], Built]] = {
    "a ResNet-50": lambda: (
        hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=1000)),
        {"pixel_values": torch.randn(4, 3, 96, 96), "labels": torch.randint(0, 1000, (4,))},
    ),
    "12 convolutions": lambda: (
        Convolutions(),
        {"x": torch.randn(4, 3, 64, 64), "labels": torch.randint(0, 10, (4,))},
    ),
    "6 layers of attention": lambda: (
        Attentions(),
        {"x": torch.randn(8, 128, 128), "labels": torch.randint(0, 10, (8,))},
    ),
}

OVER_ENTRY = {"llama": (292, 150)}
"""MiB over entry that are planned for besides; of others a third of the unplanned step's."""


def _tokens(batch: int, length: int, words: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, words, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()}


class LossByHand(torch.autograd.Function):
    """Cross-entropy of rows of 256, whose gradients are computed in the forward, as Liger does it."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        labels: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        count = (labels != -100).sum()
        of_rows, of_weights = torch.empty_like(rows), [torch.zeros_like(w) for w in weights]
        total = rows.new_zeros(())
        for begin in range(0, len(rows), 256):
            part = rows[begin : begin + 256].detach().requires_grad_()
            with torch.enable_grad():
                chunk = labels[begin : begin + 256]
                loss = nn.functional.cross_entropy(head(part), chunk, reduction="sum") / count
            found = torch.autograd.grad(loss, [part, *weights])
            of_rows[begin : begin + 256] = found[0]
            for sum_, gradient in zip(of_weights, found[1:], strict=True):
                sum_ += gradient
            total += loss.detach()
        ctx.found = of_rows, of_weights
        return total

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        of_rows, of_weights = ctx.found
        del ctx.found
        return of_rows.mul_(given[0]), None, None, *(gradient.mul_(given[0]) for gradient in of_weights)


def by_hand(name: str, repeats: int) -> tuple[int, float] | None:
    """Peak over entry, and time over the unplanned step's, of a step with a checkpoint around every block and
    the loss in pieces of 256 rows; None where no head is known."""
    if name not in HEADS:
        return None
    attribute, shift = HEADS[name]
    torch.manual_seed(0)
    model, batch = MODELS[name][1]()
    plain = copy.deepcopy(model).train()
    model.train().gradient_checkpointing_enable()
    given = {key: value for key, value in batch.items() if key != "labels"}
    labels = batch["labels"]
    if shift:
        labels = nn.functional.pad(labels, (0, shift), value=-100)[:, shift:]
    if name == "t5":
        given["decoder_input_ids"] = model._shift_right(labels)
    head = getattr(model, attribute)
    setattr(model, attribute, nn.Identity())
    cap = None
    if name == "gemma":
        cap, model.config.final_logit_softcapping = model.config.final_logit_softcapping, None

    def logits(part: torch.Tensor) -> torch.Tensor:
        return head(part) if cap is None else cap * torch.tanh(head(part) / cap)

    def step() -> None:
        model.zero_grad()
        head.zero_grad()
        rows = model.rows(**given) if hasattr(model, "rows") else model(**given).logits
        rows, weights = rows.flatten(0, -2), list(head.parameters())
        LossByHand.apply(rows, labels.flatten(), logits, *weights).backward()

    def unplanned() -> None:
        plain.zero_grad()
        loss = plain(**batch)
        (loss if isinstance(loss, torch.Tensor) else loss.loss).backward()

    step()
    model.zero_grad()
    head.zero_grad()
    peak = measure_peak(step, "cpu").peak_bytes
    times = time_steps([unplanned, step], max(repeats, 1))
    return peak, statistics.median(times[1]) / statistics.median(times[0]) - 1


def rows_of(name: str, repeats: int, *, least: bool) -> list[str]:
    """The lines of the table of one model; ``least``: those of "min" too."""
    torch.manual_seed(0)
    title, build = MODELS[name]
    model, batch = build()
    model.train()
    without = planner.plan(model, kwargs=batch, budget="min", outputs="dropped")
    without_least = f"{without.predicted.dynamic_peak_bytes / MIB:,.1f} ({without.overhead:+.0%})"
    lines = []
    third = without.baseline.dynamic_peak_bytes // 3 // MIB
    asked: list[tuple[SplitWhat, str | float]] = [("loss", "min"), ("auto", "min")] if least else []
    asked += [("loss", over) for over in OVER_ENTRY.get(name, (third,))]
    hand = by_hand(name, repeats)
    if hand is not None:
        asked.append(("auto" if name == "mlps" else "loss", hand[0] / MIB))
        print(f"{title}: by hand {hand[0] / MIB:,.1f} MiB, {hand[1]:+.0%}", flush=True)
    for split, over in asked:
        budget: str | int = over if isinstance(over, str) else without.resident.total + int(over * MIB)
        before = time.process_time()
        plan = planner.plan(model, kwargs=batch, budget=budget, outputs="dropped", split=split)
        seconds = time.process_time() - before
        report = planner.verify(model, kwargs=batch, plan=plan, repeats=repeats)
        splits = [graph.split for graph in plan.graphs if graph.split is not None]
        how = ", ".join(f"{s.pieces}, {s.form}" for s in splits) or "none"
        measured, predicted = report.measured_dynamic_peak_bytes, report.predicted_dynamic_peak_bytes
        cells = [
            title,
            f"{report.baseline_measured_dynamic_peak_bytes / MIB:,.1f}",
            without_least,
            split,
            over if isinstance(over, str) else f"{over:,.1f}",
            f"{hand[1]:+.0%}" if hand is not None and over == hand[0] / MIB else "",
            how,
            f"{predicted / MIB:,.1f}",
            f"{measured / MIB:,.1f}" if measured != predicted else "the same",
            f"{report.overhead:+.0%}",
            f"{seconds:.0f} s",
            "; ".join(problem.partition(":")[0] for problem in report.problems) or "yes",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def planning_seconds() -> Iterator[str]:
    """A line for each model of which nothing can be split, or nothing that is worth it."""
    for title, build in NOTHING_TO_SPLIT.items():
        seconds: dict[SplitWhat, list[float]] = {"none": [], "loss": [], "auto": []}
        for _, split in itertools.product(range(3), seconds):
            torch.manual_seed(0)
            model, batch = build()
            torch._dynamo.reset()
            before = time.process_time()
            with contextlib.suppress(planner.CaptureError):  # there is nothing to split
                planner.plan(
                    model.train(),
                    kwargs=batch,
                    budget="min",
                    outputs="dropped",
                    split=split,
                    costs="roofline",
                )
            seconds[split].append(time.process_time() - before)
        medians = ", ".join(f'"{split}" {statistics.median(s):.1f} s' for split, s in seconds.items())
        yield f"{title}: {medians}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each kind")
    parser.add_argument("--planning", action="store_true", help="seconds where there is nothing to split")
    parser.add_argument("--budgets", action="store_true", help='no rows of "min"')
    parser.add_argument("--out", type=Path, help="a page, in which rows that are there are replaced")
    given = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SETTINGS})
    warnings.simplefilter("ignore")
    if given.planning:
        for line in planning_seconds():
            print(line, flush=True)
        return
    there = given.out is not None and given.out.exists()
    before, _, table = given.out.read_text(encoding="utf-8").partition(_RULE) if there else (_PAGE, "", "")
    table, _, after = table.partition("\n\n")
    lines = {_row(line): line for line in table.splitlines()}
    for name in given.models:
        lines |= {_row(line): line for line in rows_of(name, given.repeats, least=not given.budgets)}
        if given.out is not None:
            text = before + _RULE + "\n".join(lines.values()) + "\n" + (after and f"\n{after}")
            given.out.write_text(text, encoding="utf-8")


def _row(line: str) -> tuple[str, ...]:
    """What tells a row of the table from others: its model, what is split, and its budget."""
    title, _, _, split, budget, by_hand, *_ = (cell.strip() for cell in line.strip("| ").split(" | "))
    return title, split, "by hand" if by_hand else budget


_PAGE = """# Losses and MLPs in pieces

`python benchmarks/split.py --out docs/results/split.md`

One step of each model on the CPU, one thread, 4 layers of width 256, outputs dropped. Peaks are
over entry, in MiB. "Without" is "min" with `split="none"`, and its predicted extra time; what
follows is with `split=`, of which "min" is the fastest that takes at most 2 % of the unplanned peak
more than the least. Pieces are the planner's choice: how many, and where their
gradients are computed. Times are process time over the unplanned step's, with MALLOC_MMAP_MAX_=0
and MALLOC_TRIM_THRESHOLD_=17179869184, so that page faults do not count. "Near enough" is what
`planner.verify` says: gradients are at most 1.5 times as far from those in double precision as the
unplanned step's. "By hand" is a checkpoint around every block and the loss in pieces of 256 rows, whose
gradients are computed in the forward, as Liger does it; its time stands beside the plan for its peak.
`MLPs(1024)` with 16,384 rows is not run here: with `costs="roofline"` it is predicted at 5,152.5
unplanned, 1,792.1 without and 608.2 with "auto".

What `planner.step` plans is called a step: fine-tuning by the likelihood of the next words, preferences as
in DPO and distillation, of that Llama and of a second one that does not train.

Where nothing is to be split, or nothing that is worth it, planning takes as long as without
(`python benchmarks/split.py --planning`, process seconds, medians of three): a ResNet-50 9.1 s, "loss" 9.2
and "auto" 9.0; 12 convolutions 0.7 s each; 6 layers of attention 1.7 s each.

"""

_RULE = """\
| model | unplanned | without | split | budget | hand | pieces | peak | measured | time | planned | near |
|---|---:|---:|---|---|---:|---|---:|---:|---:|---:|---|
"""

if __name__ == "__main__":
    main()
