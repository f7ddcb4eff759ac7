"""Process time and host memory of capturing and planning BERT-Large, without running it.

    python benchmarks/capture.py [--layers 24] [--batch 32] [--sequence 512] [--solver sqrt_n] [--json]

Builds Hugging Face BERT-Large on the meta device (no weights in memory), captures its training step
on tensors without data and plans it for a named GPU. Prints process seconds and the peak resident
memory of the whole process, Python and PyTorch included.
"""

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--solver", default="sqrt_n")
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--device", default="A100-80GB")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    import transformers

    import planner

    config = transformers.BertConfig(
        num_hidden_layers=options.layers, hidden_size=1024, num_attention_heads=16, intermediate_size=4096
    )
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(config).train()
        ids = torch.zeros((options.batch, options.sequence), dtype=torch.long)
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.process_time()
    marks: list[tuple[str, float]] = []
    plan = planner.plan(
        model,
        kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids},
        budget=options.budget,
        solver=options.solver,
        device=options.device,
        progress=lambda text, _: marks.append((text, time.process_time() - start)),
    )
    seconds = time.process_time() - start
    result = {
        "model": f"BERT {options.layers} layers, batch {options.batch}, sequence {options.sequence}",
        "operations": sum(len(g.ops) for g in plan.graphs),
        "process_seconds": round(seconds, 2),
        "capture_seconds": round(plan.solver.capture_seconds, 2),
        "solve_seconds": round(plan.solver.solve_seconds, 2),
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_host_bytes_before": memory_before,
        "unplanned_peak_bytes": plan.baseline.peak_bytes,
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "overhead": round(plan.overhead, 4),
    }
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        return
    for key, value in result.items():
        print(f"{key:24} {value / 2**30:.2f} GiB" if "_bytes" in key else f"{key:24} {value}")
    for i, (text, at) in enumerate(marks):
        if not i or marks[i - 1][0] != text:
            print(f"  {at:7.2f} s  {text}")


if __name__ == "__main__":
    main()
