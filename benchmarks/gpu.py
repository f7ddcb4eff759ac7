"""Predicted against measured, on the device at hand: memory and time of unplanned and planned steps.

    python benchmarks/gpu.py --out docs/results                  # everything, on the CUDA device that is here
    python benchmarks/gpu.py --models gpt2 --precisions bf16 --budgets 60%
    python benchmarks/gpu.py --device cpu --small                # what can be tried without a GPU

For every model and precision: the step as it is, plans for several budgets, and what PyTorch itself has to
offer (a checkpoint around every block, and ``torch.compile`` with ``activation_memory_budget``). Plans are
made with measured costs; the tightest is compared bit for bit with the unplanned step (within the spread of
two unplanned steps, where kernels are not deterministic). A model that is not done when the time is up is
left out, and the results say so.
"""

import argparse
import contextlib
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks.frontiers.gpu_results import Row, judged, table
from benchmarks.frontiers.nets import DiffusionUNet
from planner.files import write_atomically
from planner.measure import measure_peak, measure_seconds
from planner.step import find_loss
from tests.zoo import BottleneckNet, WithLoss

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
PRECISIONS = ("fp32", "tf32", "bf16")
BUDGETS = ("80%", "60%", "40%")
SECONDS = 460.0


@dataclass(frozen=True)
class Case:
    """A model of the benchmark.

    Attributes:
        build: Makes the model and its inputs on the default device, told whether to be small.
        blocks: The classes of its blocks, which PyTorch's own checkpointing wraps.
    """

    build: Callable[[bool], tuple[nn.Module, Inputs]]
    blocks: tuple[str, ...]


def bert_large(small: bool) -> tuple[nn.Module, Inputs]:
    """Masked language model, 16 x 512 tokens."""
    import transformers

    size = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64,
            "vocab_size": 100} if small else {"num_hidden_layers": 24, "hidden_size": 1024,
            "num_attention_heads": 16, "intermediate_size": 4096}  # fmt: skip
    words = torch.randint(3, 100, (32, 64) if small else (16, 512))
    model = transformers.BertForMaskedLM(transformers.BertConfig(**size))
    return model, ((), {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words})


def gpt2(small: bool) -> tuple[nn.Module, Inputs]:
    """Language model, 8 x 1024 tokens."""
    import transformers

    size = {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 100} if small else {}
    words = torch.randint(3, 100, (32, 64) if small else (8, 1024))
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, use_cache=False))
    return model, ((), {"input_ids": words, "labels": words, "use_cache": False})


def resnet_50(small: bool) -> tuple[nn.Module, Inputs]:
    """Classifier, 128 pictures of 224 x 224."""
    blocks, batch, side = ((1, 1, 1, 1), 16, 64) if small else ((3, 4, 6, 3), 128, 224)
    model = WithLoss(BottleneckNet(blocks))
    return model, ((torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))), {})


def sd_unet(small: bool) -> tuple[nn.Module, Inputs]:
    """U-Net of Stable Diffusion 1.5's shape, 4 latents of 64 x 64."""
    widths, context, batch, side = ((8, 16), 8, 8, 16) if small else ((320, 640, 1280, 1280), 768, 4, 64)
    model = DiffusionUNet(widths, context, *((2, 4) if small else (8, 32)))
    image, noise = torch.randn(2, batch, 4, side, side)
    return model, ((image, torch.randn(batch, widths[0]), torch.randn(batch, 77, context), noise), {})


CASES = {
    "bert-large": Case(bert_large, ("BertLayer",)),
    "gpt2": Case(gpt2, ("GPT2Block",)),
    "resnet-50": Case(resnet_50, ("Bottleneck",)),
    "sd-unet": Case(sd_unet, ("TimeBlock", "SpatialTransformer")),
}


@dataclass
class Bench:
    """The benchmark on one device."""

    device: torch.device
    small: bool
    repeats: int
    deadline: float
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _clear: Callable[[], None] = field(default=lambda: None, repr=False)

    def run(self, name: str, precision: str, budgets: list[str]) -> None:
        """All ways of one model in one precision."""
        if time.monotonic() > self.deadline:
            self.left_out.append(f"{name} {precision}")
            return
        with _arithmetic(precision):
            try:
                self._run(name, precision, budgets)
            except Exception as error:
                text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                self.rows.append(Row(name, precision, "unplanned", problem=text))
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, name: str, precision: str, budgets: list[str]) -> None:
        torch.manual_seed(0)
        with self.device:
            model, (args, kwargs) = CASES[name].build(self.small)
        model.train()
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16")

        def stepping(module: nn.Module) -> Callable[[], Any]:
            def step() -> Any:
                with autocast:
                    output = module(*args, **kwargs)
                loss = find_loss(output)
                assert loss is not None
                loss.backward()
                return output  # which users hold while backward runs

            return step

        self._clear = lambda: model.zero_grad(set_to_none=True)
        step = stepping(model)
        unplanned = self._measured(name, precision, "unplanned", step)
        plans = []
        for budget in budgets:
            print(f"  {name} {precision} {budget}", file=sys.stderr)
            model.zero_grad(set_to_none=True)
            try:
                with autocast:
                    limit = 5 if self.small else 20
                    plan = planner.plan(
                        model, args, kwargs, budget=budget, costs="measured", time_limit=limit
                    )
            except planner.InfeasibleBudget as error:
                self.rows.append(Row(name, precision, f"plan {budget}", problem=str(error).splitlines()[0]))
                continue
            plans.append(plan)
            right = None
            if budget == budgets[-1]:
                with autocast:
                    report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
                right = report.ok or not any("differ" in problem for problem in report.problems)
            plan.apply(model)
            try:
                row = self._measured(name, precision, f"plan {budget}", step, unplanned)
            finally:
                planner.remove(model)
            assert row.measured_bytes is not None
            whole = plan.whole_step
            assert whole is not None
            around = whole.total_bytes - whole.forward_backward_bytes
            self.rows.append(
                Row(
                    **{
                        **asdict(row),
                        "predicted_bytes": plan.predicted.dynamic_peak_bytes,
                        "budget_bytes": plan.target.budget_bytes,
                        "total_bytes": plan.resident.total + row.measured_bytes + around,
                        "predicted_overhead": plan.predicted.seconds / plan.baseline.seconds - 1,
                        "right": right,
                    }
                )
            )
        predicted = plans[0].baseline.dynamic_peak_bytes if plans else None
        self.rows.append(Row(**{**asdict(unplanned), "predicted_bytes": predicted}))
        with _checkpointed(model, CASES[name].blocks):
            self.rows.append(self._measured(name, precision, "checkpoint per block", step, unplanned))
        with _compiled(model, 0.5) as compiled:
            self.rows.append(self._measured(name, precision, "compile 0.5", stepping(compiled), unplanned))

    def _measured(
        self, name: str, precision: str, way: str, step: Callable[[], Any], unplanned: Row | None = None
    ) -> Row:
        def cleared() -> Any:
            self._clear()
            return step()

        try:
            cleared()
            cleared()
            reserved = None
            if self.device.type == "cuda":
                self._clear()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)
                step()
                reserved = torch.cuda.max_memory_reserved(self.device)
            self._clear()
            peak = measure_peak(step, self.device).peak_bytes
            seconds = measure_seconds([cleared], self.repeats, device=self.device)[0]
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            return Row(name, precision, way, problem=text)
        before = None if unplanned is None else unplanned.seconds
        return Row(
            name,
            precision,
            way,
            measured_bytes=peak,
            reserved_bytes=reserved,
            seconds=seconds,
            measured_overhead=None if before is None else seconds / before - 1,
        )


@contextlib.contextmanager
def _arithmetic(precision: str) -> Iterator[None]:
    """TF32 for matrix products and convolutions, or not."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextlib.contextmanager
def _checkpointed(model: nn.Module, blocks: tuple[str, ...]) -> Iterator[None]:
    """PyTorch's checkpointing around every block."""
    wrapped = [m for m in model.modules() if type(m).__name__ in blocks]
    for module in wrapped:
        forward = module.forward
        module.forward = lambda *a, forward=forward, **k: checkpoint(  # type: ignore[method-assign]
            forward, *a, use_reentrant=False, **k
        )
    try:
        yield
    finally:
        for module in wrapped:
            del module.forward


@contextlib.contextmanager
def _compiled(model: nn.Module, budget: float) -> Iterator[nn.Module]:
    """The model under torch.compile with a memory budget; eager kernels where there is no GPU."""
    import torch._functorch.config as config

    on_gpu = next(model.parameters()).device.type == "cuda"
    torch._dynamo.reset()
    with config.patch(activation_memory_budget=budget):
        yield torch.compile(model, backend="inductor" if on_gpu else "aot_eager_decomp_partition")  # type: ignore[misc]
    torch._dynamo.reset()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the chosen parts, write and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu (cuda)")
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), help="largest first")
    parser.add_argument("--small", action="store_true", help="models of a few narrow layers")
    parser.add_argument("--repeats", type=int, default=5, help="how often each step is timed (5)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"start nothing after ({SECONDS:.0f})")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for results (out)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is here; --device cpu tries everything without one")
    started = time.monotonic()
    bench = Bench(device, options.small, options.repeats, started + options.seconds)
    for precision in options.precisions:
        for name in options.models:
            bench.run(name, precision, options.budgets)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
    document = {
        "device": name,
        "torch": torch.__version__,
        "seconds": time.monotonic() - started,
        "judged": judged(bench.rows),
        "left_out": bench.left_out,
        "rows": [asdict(row) for row in bench.rows],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    plain = "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")
    write_atomically(options.out / f"gpu-{plain}.json", json.dumps(document, indent=1) + "\n")
    write_atomically(options.out / f"gpu-{plain}.md", table(document))
    print(table(document))
    return document


if __name__ == "__main__":
    main()
