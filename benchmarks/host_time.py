"""Host time of a planned step that recomputes nothing, on a model whose kernels take no time.

    python benchmarks/host_time.py [--repeats 15] [--json]

A small GPT (width 32, batch 2, sequence 16) trains unplanned, planned, and under
``torch.compile(backend="aot_eager")``, interleaved, with one thread. Printed are medians of process
time and their ratios to the unplanned step.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from planner.measure import measure_seconds
from tests.zoo import GPT

STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    inputs = torch.randint(0, 1000, (2, 16)), torch.randint(0, 1000, (2, 16))

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT(width=32, context=16).train()

    def steps(
        network: Callable[..., torch.Tensor], parameters: list[torch.nn.Parameter]
    ) -> Callable[[], None]:
        def run() -> None:
            for _ in range(STEPS):
                for parameter in parameters:
                    parameter.grad = None
                network(*inputs).backward()

        return run

    eager, planned, compiled = model(), model(), model()
    planner.auto_checkpoint(planned, inputs, budget="1TiB", solver="none")
    by_aot = torch.compile(compiled, backend="aot_eager", dynamic=False)
    networks = {"eager": (eager, eager), "planned": (planned, planned), "aot_eager": (by_aot, compiled)}
    seconds = measure_seconds(
        [steps(network, list(module.parameters())) for network, module in networks.values()], options.repeats
    )
    per_step = {name: s / STEPS for name, s in zip(networks, seconds, strict=True)}
    ratios = {name: s / per_step["eager"] for name, s in per_step.items()}
    if options.json:
        json.dump({"seconds": per_step, "ratio_to_eager": ratios}, sys.stdout, indent=1)
        return
    for name in networks:
        print(f"{name:10} {per_step[name] * 1e3:6.2f} ms a step, {ratios[name]:.2f}x eager")


if __name__ == "__main__":
    main()
