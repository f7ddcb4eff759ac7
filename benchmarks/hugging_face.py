"""The least peak of a step against Hugging Face's own checkpointing, both measured on this machine.

    python benchmarks/hugging_face.py [--models bert gpt2 llama] [--layers 6] [--time-limit 60]

Models of width 256 with 8,192 words, 4 sequences of 256 tokens. Every peak is what a step allocates over
entry, to the byte, by the allocator's own events (planner/verification/measure.py): once with the outputs
held while
backward runs, and once dropped. Prints a table in MiB; "time" is measured over the unplanned step.
"""

import argparse
import copy
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

WORDS, WIDTH, BATCH, LENGTH = 8192, 256, 4, 256
MIB = 2**20


def build(name: str, layers: int) -> nn.Module:
    """A model of Hugging Face's by name: bert, gpt2 or llama."""
    import transformers as hf

    torch.manual_seed(0)
    if name == "gpt2":
        config = hf.GPT2Config(
            vocab_size=WORDS, n_embd=WIDTH, n_layer=layers, n_head=4, n_positions=512, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        return hf.GPT2LMHeadModel(config).train()
    size = {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 4 * WIDTH,
        "max_position_embeddings": 512,
    }
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**size)).train()
    return hf.LlamaForCausalLM(hf.LlamaConfig(**size, num_key_value_heads=4)).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["bert", "gpt2", "llama"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--budget", default="min")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each kind")
    parser.add_argument("--time-limit", type=float, default=60, help="seconds that the search may take")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    print(
        f"{'':16}{'unplanned':>11}{'Hugging Face':>14}{'time':>7}{'planned':>9}{'predicted':>11}{'time':>7}"
    )
    for name in options.models:
        for outputs in ("held", "dropped"):
            compare(name, outputs, options)


def compare(name: str, outputs: str, options: argparse.Namespace) -> None:
    """Measure one model without checkpointing, with Hugging Face's and with a plan, and print a line."""
    import planner
    from planner.verification.measure import measure_peak, measure_seconds

    words = torch.randint(0, WORDS, (BATCH, LENGTH))
    plain = build(name, options.layers)
    theirs, planned = copy.deepcopy(plain), copy.deepcopy(plain)
    theirs.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    plan = planner.plan(
        planned,
        kwargs={"input_ids": words, "labels": words},
        budget=options.budget,
        outputs=outputs,
        time_limit=options.time_limit,
    )
    plan.apply(planned)

    def step(model: nn.Module) -> object:
        output = model(input_ids=words, labels=words)
        loss = output.loss
        if outputs == "dropped":
            del output
        loss.backward()
        return loss

    def fresh(model: nn.Module) -> object:
        model.zero_grad(set_to_none=True)
        return step(model)

    models = (plain, theirs, planned)
    seconds = measure_seconds([partial(fresh, m) for m in models], max(1, options.repeats))
    peaks = []
    for model in models:
        model.zero_grad(set_to_none=True)
        peaks.append(measure_peak(partial(step, model), "cpu").peak_bytes / MIB)
    times = [s / seconds[0] - 1 for s in seconds]
    print(
        f"{name:7}{outputs:9}{peaks[0]:11.2f}{peaks[1]:14.2f}{times[1]:+7.0%}{peaks[2]:9.2f}"
        f"{plan.predicted.dynamic_peak_bytes / MIB:11.2f}{times[2]:+7.0%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
