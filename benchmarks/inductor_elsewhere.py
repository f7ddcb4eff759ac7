"""Plans that Inductor runs on a GPU, made on a machine without one.

    OMP_NUM_THREADS=1 python benchmarks/inductor_elsewhere.py --out docs/results/inductor-elsewhere.md

Models as large as they are trained, on the meta device, under bf16 autocast. Each is captured once and
planned for each budget. Neither CUDA nor Triton is needed. The table has what a step takes over entry, by
eager's operators and by the programs that Inductor emits. Each model is planned in a process of its own,
with an empty cache of Inductor's, so that seconds are those of a first plan.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks.frontiers.gpu_models import CASES, Inputs
from benchmarks.frontiers.gpu_ways import arithmetic
from planner.errors import PlanWarning
from planner.runtime.shapes.schedule_at import schedule_at
from solvers.model.schedule import simulate

MIB = 1 << 20

HEAD = """# Plans that Inductor runs on a GPU, made without one

    OMP_NUM_THREADS=1 python benchmarks/inductor_elsewhere.py --device {device} --out {out}

made this with torch {torch}, without CUDA and without Triton. **None has been run on a GPU.** Models are
on the meta device, under bf16 autocast: Hugging Face's GPT-2 (8 x 1024 words), BERT-Large (16 x 512) and
eight layers of Llama-3 8B's shape (2 x 4096), and ResNet-50 (128 pictures). Bytes are over entry: what the
step allocates at its peak. *Eager* and *Inductor* are steps that recompute nothing, by eager's operators and
by the programs that Inductor emits. Budgets are of the eager step's peak, with parameters and inputs.
*Planned* is what the emitted programs take, *simulated* what the solver knows of the same schedule, by
single operations. Extra time is the roofline's, of single operations. *Lowered* is how many schedules of
graphs were judged. Seconds are of one process from an empty cache: planning a budget, after the capture.

{columns}
|---|---:|---|---:|---:|---:|---:|---|---:|---:|---:|---:|
"""
COLUMNS = (
    "model", "capture, s", "budget", "eager, MiB", "Inductor, MiB", "simulated, MiB", "planned, MiB",
    "fusion", "re-run", "extra time", "lowered", "planning, s",
)  # fmt: skip


def llama(small: bool) -> tuple[torch.nn.Module, Inputs]:
    """Eight layers of Llama-3 8B's shape, 2 x 4096 words."""
    import transformers

    shape: Any = (
        {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 64, "vocab_size": 100}
        if small
        else {"num_hidden_layers": 8, "hidden_size": 4096, "num_attention_heads": 32,
              "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    )  # fmt: skip
    words = torch.randint(3, 100, (32, 64) if small else (2, 4096))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, use_cache=False))
    return model, ((), {"input_ids": words, "labels": words, "use_cache": False})


MODELS: dict[str, Callable[[bool], tuple[torch.nn.Module, Inputs]]] = {
    "gpt2": CASES["gpt2"].build,
    "bert-large": CASES["bert-large"].build,
    "llama": llama,
    "resnet-50": CASES["resnet-50"].build,
}


def rows(name: str, device: str, budgets: list[str], small: bool) -> Iterator[str]:
    """The rows of a model."""
    with torch.device("meta"):
        model, (args, kwargs) = MODELS[name](small)
    warnings.filterwarnings("ignore", ".*[Dd]isabling")  # autocast of a device that is not here
    with arithmetic("bf16"), torch.autocast("cuda", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        started = time.perf_counter()
        prepared = planner.prepare(
            model.train(), args, kwargs, backend="inductor", device=device, unproven=True, costs="roofline"
        )
        inside, capture = prepared._prepared, time.perf_counter() - started
        lowered = 0
        for budget in budgets:
            started = time.perf_counter()
            try:
                plan = prepared.plan(budget)
            except planner.InfeasibleBudget as error:
                yield f"| {name} | {capture:.0f} | {budget} | {error} |" + " |" * (len(COLUMNS) - 4)
                continue
            seconds = time.perf_counter() - started
            before, lowered = lowered, sum(len(m._programs) for m in inside.emitted_models.values())
            simulated = simulate(inside.problem.graph, schedule_at(plan, inside)[1]).peak_bytes
            taken = (
                plan.baseline.dynamic_peak_bytes,
                plan.no_recompute.dynamic_peak_bytes,
                simulated,
                plan.predicted.dynamic_peak_bytes,
            )
            yield (
                f"| {name} | {capture:.0f} | {budget} | {' | '.join(f'{b / MIB:,.0f}' for b in taken)} "
                f"| {plan.fusion} | {plan.recomputed_operations} "
                f"| {plan.predicted.seconds / plan.baseline.seconds - 1:+.1%} "
                f"| {lowered - before} | {seconds:.0f} |"
            )


def in_a_process(name: str, options: argparse.Namespace) -> Iterator[str]:
    """The rows of a model, planned in a process with an empty cache."""
    command = [sys.executable, __file__, "--device", options.device, "--only", name, "--budgets"]
    command += [*options.budgets, *(["--small"] if options.small else [])]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            yield from process.stdout or ()
    if process.returncode:
        raise SystemExit(f"{name} was not planned: see above")


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="H100", help="of the table of devices (H100)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--only", choices=list(MODELS), help="plan this model in this process")
    parser.add_argument("--budgets", nargs="+", default=["80%", "50%", "min"])
    parser.add_argument("--small", action="store_true", help="models of a few narrow layers")
    parser.add_argument("--out", type=Path, help="the page to write (none: print the rows)")
    options = parser.parse_args(arguments)
    if options.only is not None:
        for row in rows(options.only, options.device, options.budgets, options.small):
            print(row, flush=True)
        return
    table = []
    for row in itertools.chain.from_iterable(in_a_process(name, options) for name in options.models):
        table.append(row)
        print(row, end="", flush=True)
    if options.out is not None:
        columns = f"| {' | '.join(COLUMNS)} |"
        head = HEAD.format(device=options.device, out=options.out, torch=torch.__version__, columns=columns)
        options.out.write_text(head + "".join(table), encoding="utf-8")


if __name__ == "__main__":
    main()
