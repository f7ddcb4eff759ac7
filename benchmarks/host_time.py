"""Time of a planned step that recomputes nothing: what planning itself costs.

    python benchmarks/host_time.py [--repeats 15] [--json]

Two GPTs train unplanned, planned, planned for a longer sequence after twenty other lengths (so that sizes are
symbols), and under ``torch.compile(backend="aot_eager")``, interleaved, with one thread. The kernels of the
first (width 32, batch 2, sequence 16) take no time, so that all there is to see is Python and dispatch; the
second (width 256, batch 4, sequence 128) computes. Printed are medians of process time and their ratios to
the unplanned step.

Below stand the same two, followed by replays: extra time as predicted, Python's included, and as measured.
Then twelve layers of width 32 and eight words with every block checkpointed: by replays, by graphs and by
``torch.utils.checkpoint``; and, where nothing runs again, under a dispatch mode that does nothing, and with
hooks on saved tensors that do nothing.
The same for Hugging Face's ViT of ``time_truth.py``, of which nothing runs again: what replays take at least.
Then what Python takes to enter a planned graph, from a wait for data to the graph's first operator, for each
tensor that the graph is given (``planner/costs/host_time.py``): a GPU has nothing to do meanwhile.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks.time_truth import build
from planner.verification.measure import measure_seconds
from tests.zoo import GPT

MODELS = {"launch-bound": (32, 2, 16, 10), "compute-bound": (256, 4, 128, 1)}
"""Width, batch, sequence, and how many steps are timed at once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        name: measure(*sizes, options.repeats) | replayed(*sizes[:3], options.repeats)
        for name, sizes in MODELS.items()
    }
    results["every block checkpointed"] = checkpointed(options.repeats)
    results["ViT, nothing runs again"] = watched(options.repeats)
    entered = entering_seconds(options.repeats)
    if options.json:
        json.dump({**results, "entering_seconds": entered}, sys.stdout, indent=1)
        return
    for name, networks in results.items():
        print(name)
        for network, found in networks.items():
            if "predicted" in found:
                print(
                    f"  {network:22} {found['predicted']:+.0%} predicted, {found['measured']:+.0%} measured"
                )
                continue
            milliseconds, ratio = found["seconds"] * 1e3, found["ratio_to_eager"]
            print(f"  {network:22} {milliseconds:8.2f} ms a step, {ratio:.3f}x eager")
    print(f"entering a planned graph: {entered * 1e6:.1f} us for each tensor that it is given")


def measure(width: int, batch: int, sequence: int, steps: int, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of a step and their ratio to the unplanned one, by how it is run."""
    longest = sequence + 8
    inputs = words(batch, sequence)

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT(width=width, context=longest).train()

    def training(
        network: Callable[..., torch.Tensor], parameters: list[torch.nn.Parameter]
    ) -> Callable[[], None]:
        def run() -> None:
            for _ in range(steps):
                for parameter in parameters:
                    parameter.grad = None
                network(*inputs).backward()

        return run

    eager, planned, varied, compiled = model(), model(), model(), model()
    planner.auto_checkpoint(planned, inputs, budget="1TiB", solver="none")
    planner.auto_checkpoint(varied, words(batch, longest), budget="1TiB", solver="none")
    for length in range(longest, longest - 21, -1):
        if length != sequence:
            varied(*words(batch, length)).backward()
    by_aot = torch.compile(compiled, backend="aot_eager", dynamic=False)
    networks = {
        "eager": (eager, eager),
        "planned": (planned, planned),
        "planned, lengths vary": (varied, varied),
        "aot_eager": (by_aot, compiled),
    }
    seconds = measure_seconds(
        [training(network, list(module.parameters())) for network, module in networks.values()], repeats
    )
    return {
        name: {"seconds": s / steps, "ratio_to_eager": s / seconds[0]}
        for name, s in zip(networks, seconds, strict=True)
    }


def replayed(width: int, batch: int, sequence: int, repeats: int) -> dict[str, dict[str, float]]:
    """Extra time of plans that are followed by replays, as predicted and as measured, by the budget."""
    found = {}
    for budget in ("80%", "min"):
        torch.manual_seed(0)
        model, inputs = GPT(width=width, context=sequence).train(), words(batch, sequence)
        plan = planner.plan(model, inputs, budget=budget, backend="replay")
        report = planner.verify(model, inputs, plan=plan, repeats=repeats)
        found[f"replayed, {budget}"] = {"predicted": plan.overhead, "measured": report.overhead}
    return found


class NothingMode(TorchDispatchMode):
    """A dispatch mode that calls what it is given."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def checkpointed(repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of steps in which every block runs again, and of steps that something watches which does
    nothing."""
    inputs = words(1, 8)

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT(width=32, layers=12, context=8).train()

    def step(network: GPT, *around: Callable[[], AbstractContextManager[object]]) -> Callable[[], None]:
        def run() -> None:
            network.zero_grad(set_to_none=True)
            with ExitStack() as stack:
                for context in around:
                    stack.enter_context(context())
                loss = network(*inputs)
            loss.backward()

        return run

    def planned(backend: str) -> GPT:
        network = model()
        options = {"solver": "manual", "checkpoints": ["blocks.*"], "backend": backend}
        planner.plan(network, inputs, budget="1TiB", costs="roofline", **options).apply(network)
        return network

    by_hand = model()
    for block in by_hand.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    hooks = partial(torch.autograd.graph.saved_tensors_hooks, lambda t: t, lambda t: t)
    steps = {
        "eager": step(model()),
        "a mode": step(model(), NothingMode),
        "a mode and hooks": step(model(), NothingMode, hooks),
        "checkpoint": step(by_hand),
        "graphs": step(planned("graph")),
        "replays": step(planned("replay")),
    }
    return timed(steps, repeats)


def watched(repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of steps of a ViT that recompute nothing: planned, and under what does nothing."""

    def step(backend: str = "", *around: Callable[[], AbstractContextManager[object]]) -> Callable[[], None]:
        model, inputs, _ = build("vit")
        if backend:
            planner.plan(model, (), inputs, budget="100%", backend=backend, costs="roofline").apply(model)

        def run() -> None:
            model.zero_grad(set_to_none=True)
            with ExitStack() as stack:
                for context in around:
                    stack.enter_context(context())
                loss = model(**inputs).loss
            loss.backward()

        return run

    hooks = partial(torch.autograd.graph.saved_tensors_hooks, lambda t: t, lambda t: t)
    steps = {
        "eager": step(),
        "a mode and hooks": step("", hooks, NothingMode),
        "graphs": step("graph"),
        "replays": step("replay"),
    }
    return timed(steps, repeats)


def timed(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of each step, and their ratio to those of the first."""
    seconds = measure_seconds(list(steps.values()), repeats)
    return {
        name: {"seconds": taken, "ratio_to_eager": taken / seconds[0]}
        for name, taken in zip(steps, seconds, strict=True)
    }


STAMPS: list[float] = []
"""The thread's seconds at each call of the operator below."""


@torch.library.custom_op("host_time::stamp", mutates_args=())
def stamp(x: torch.Tensor) -> torch.Tensor:
    """Notes when it is called, and returns a copy."""
    STAMPS.append(time.thread_time())
    return x.clone()


stamp.register_fake(torch.empty_like)
stamp.register_autograd(lambda _, gradient: gradient)


class Waiting(nn.Module):
    """A branch on data, and behind it a graph of so many layers, of two parameters each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.LayerNorm(4) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = stamp(x)
        if (x == x).all():
            x = stamp(x)
        return self.layers(x).sum()


def entering_seconds(repeats: int) -> float:
    """Seconds for each tensor: those between the stamps grow with the layers. The least of some steps."""
    few, many = 20, 200
    least = []
    for layers in (few, many):
        model, x = Waiting(layers).train(), torch.randn(4, 4, requires_grad=True)
        planner.auto_checkpoint(model, (x,), budget="1TiB", solver="none", backend="eager")
        taken = []
        for _ in range(3 + repeats):
            STAMPS.clear()
            model.zero_grad(set_to_none=True)
            model(x).backward()
            taken.append(STAMPS[1] - STAMPS[0])
        least.append(min(taken[3:]))
    return (least[1] - least[0]) / (2 * (many - few))


def words(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random words and targets."""
    return torch.randint(0, 1000, (batch, length)), torch.randint(0, 1000, (batch, length))


if __name__ == "__main__":
    main()
