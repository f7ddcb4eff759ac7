"""TRL's own trainers with the plan inside: supervised fine-tuning and preferences.

    python benchmarks/trl_steps.py [--length 1024] [--steps 6] [--out docs/results/trl.md]

The Llama of ``benchmarks/split.py`` is trained on random words by ``SFTTrainer`` (loss "nll") and
``DPOTrainer``, as they are, on the CPU with one thread: without a plan, with TRL's checkpointing of each
layer, and with :class:`planner.integrations.huggingface.PlannerCallback`. Every run is a process of its own.
Peaks are of the fourth step, over entry, by the allocator's own events. Times are medians of the other steps
from the second on, in process time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.one_by_one import ROOT
from benchmarks.time_truth import SETTINGS
from planner.planfile.atomic_file import write_atomically

WORDS, TOLD = 32_000, "trl-row "
WAYS = {"no plan": None, "TRL's checkpoints": None, "planned, min": "min", "planned, the same peak": "peak"}
INTRODUCTION = """# TRL's trainers, planned

Made by `python benchmarks/trl_steps.py --out docs/results/trl.md`: TRL {trl}, a Llama of 4 layers, width 256
and {words:,} words, {length:,} tokens a step, one thread. Peaks are over entry, in MiB. Weights are compared
after {steps} steps with those of training without a plan.

TRL computes these losses in pieces by itself, inside an autograd function whose pieces are {chunk} rows. So
`split=` finds nothing to split, and says so; what is left to a plan are the layers.

| trainer | way | peak | predicted | time | weights |
|---|---|---:|---:|---:|---|
"""


def train(kind: str, way: str, budget: str | None, length: int, steps: int) -> dict[str, Any]:
    """Train; returns the peak of a step, the prediction, seconds of a step and the sum of all weights."""
    # Where `make venv` puts trainers.
    sys.path.append(str(Path(sys.executable).parent.parent / "trainers"))
    import torch
    import trl
    import trl.trainer.utils
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from planner.integrations.huggingface import PlannerCallback
    from planner.runtime.install import installed_plan
    from planner.verification.measure import measure_peak

    torch.set_num_threads(1)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2"
    )
    draw = torch.Generator().manual_seed(0)

    def text(count: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(3, WORDS, (count,), generator=draw).tolist())

    def model() -> LlamaForCausalLM:
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=WORDS, use_cache=False,
            )
        )  # fmt: skip

    options: dict[str, Any] = {"max_length": length}
    if kind == "SFT":
        trainer_class, config_class = trl.SFTTrainer, trl.SFTConfig
        data = Dataset.from_list([{"text": text(length)} for _ in range(steps)])
        more: dict[str, Any] = {}
    else:
        trainer_class, config_class = trl.DPOTrainer, trl.DPOConfig
        options["max_length"] = half = length // 2
        data = Dataset.from_list(
            [
                {"prompt": text(8) + " ", "chosen": text(half - 9), "rejected": text(half - 9)}
                for _ in range(steps)
            ]
        )
        more = {"ref_model": model()}

    class Measured(trainer_class):  # type: ignore[misc, valid-type]
        peak = 0
        plan: Any = None

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.seconds = getattr(self, "seconds", [])
            losses: list[torch.Tensor] = []
            step = super().training_step
            started = time.process_time()
            if len(self.seconds) == 3:
                peak = measure_peak(lambda: losses.append(step(*args, **kwargs)), "cpu")
                self.peak, self.plan = peak.peak_bytes, installed_plan(self.model)
            else:
                losses.append(step(*args, **kwargs))
            self.seconds.append(time.process_time() - started)
            return losses[0]

    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=1, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no", bf16=False, logging_steps=steps,
            gradient_checkpointing=way == "TRL's checkpoints", **options,
        )  # fmt: skip
        callbacks = [] if budget is None else [PlannerCallback(budget=budget)]
        trainer = Measured(
            model(), args=config, train_dataset=data, processing_class=tokenizer, callbacks=callbacks, **more
        )
        trainer.train()
    timed = [s for i, s in enumerate(trainer.seconds) if i not in (0, 3)]
    return {
        "kind": kind,
        "way": way,
        "peak": trainer.peak,
        "predicted": None if trainer.plan is None else trainer.plan.predicted.dynamic_peak_bytes,
        "resident": None if trainer.plan is None else trainer.plan.resident.total,
        "seconds": statistics.median(timed),
        "weights": [float(w.double().sum()) for w in trainer.model.state_dict().values()],
        "chunk": trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE,
        "trl": trl.__version__,
    }


def in_a_process(kind: str, way: str, budget: str | None, length: int, steps: int) -> dict[str, Any]:
    """:func:`train` in a process of its own."""
    asked = json.dumps([kind, way, budget, length, steps])
    ran = subprocess.run(
        [sys.executable, __file__, "--row", asked],
        env=os.environ | SETTINGS | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    row = next(line for line in ran.stdout.splitlines() if line.startswith(TOLD))
    return json.loads(row.removeprefix(TOLD))  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(TOLD + json.dumps(train(*json.loads(options.row))), flush=True)
        return
    lines, row = [], {}
    for kind in ("SFT", "DPO"):
        rows: dict[str, dict[str, Any]] = {}
        for way, budget in WAYS.items():
            if budget == "peak":
                resident = rows["planned, min"]["resident"]
                budget = str(resident + rows["TRL's checkpoints"]["peak"])
            rows[way] = row = in_a_process(kind, way, budget, options.length, options.steps)
            lines.append(_line(row, rows["no plan"]))
            print(lines[-1], flush=True)
    text = INTRODUCTION.format(
        trl=row["trl"], words=WORDS, length=options.length, steps=options.steps, chunk=row["chunk"]
    ) + "\n".join(lines)
    if options.out is not None:
        write_atomically(options.out, text + "\n")


def _line(row: dict[str, Any], plain: dict[str, Any]) -> str:
    def mib(count: int | None) -> str:
        return "" if count is None else f"{count / 2**20:,.1f}"

    predicted = "the same" if row["predicted"] == row["peak"] else mib(row["predicted"])
    more = "" if row is plain else f"{row['seconds'] / plain['seconds'] - 1:+.0%}"
    weights = "" if row is plain else "equal" if row["weights"] == plain["weights"] else "differ"
    return f"| {row['kind']} | {row['way']} | {mib(row['peak'])} | {predicted} | {more} | {weights} |"


if __name__ == "__main__":
    main()
