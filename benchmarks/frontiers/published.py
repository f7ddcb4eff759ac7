"""Published measurements of one layer or one set-up: Korthikanti et al. (2022), and Hugging Face's guide.

The layer is the transformer layer of Megatron-LM, on one of `t` GPUs that share it: linear layers and heads
are divided, normalisations and the dropouts after the linear layers are not.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from planner.planning.options import PlanOptions
from planner.planning.prepare import prepare
from planner.planning.prepared import Prepared
from planner.training_step.step import Step
from solvers import portfolio
from solvers.model.arrays import Schedule
from solvers.model.graph import Graph
from solvers.model.just_in_time import recompute
from solvers.model.schedule import alive_at, simulate

Result = dict[str, Any]

SHAPES = (
    # s, b, h, a: the paper's 22B, 175B, 530B and 1T, and two smaller ones.
    (2048, 4, 6144, 64),
    (2048, 1, 12288, 96),
    (2048, 1, 20480, 128),
    (2048, 1, 25600, 160),
    (1024, 8, 4096, 32),
    (512, 16, 2048, 16),
)


class MegatronLayer(nn.Module):
    """One layer: attention and a perceptron, each after a normalisation and with a dropout behind it.

    Args:
        width, heads: Of the whole layer.
        shared: Among how many GPUs it is divided.
        flash: Attention by one kernel, else as matrix products, softmax and dropout.
    """

    def __init__(self, width: int, heads: int, shared: int = 1, flash: bool = False) -> None:
        super().__init__()
        self.heads, self.size, self.flash = heads // shared, width // heads, flash
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width // shared)
        self.out = nn.Linear(width // shared, width)
        self.up, self.down = nn.Linear(width, 4 * width // shared), nn.Linear(4 * width // shared, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is (length, batch, width), or with flash attention (batch, length, width)."""
        x = x + F.dropout(self.out(self.attention(self.norm1(x))), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """The result of all heads, side by side."""
        first, second, _ = x.shape
        if self.flash:
            q, k, v = self.qkv(x).view(first, second, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
            together = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            return together.transpose(1, 2).reshape(first, second, -1)
        q, k, v = self.qkv(x).view(first, second * self.heads, 3 * self.size).transpose(0, 1).chunk(3, 2)
        scores = torch.baddbmm(
            q.new_empty(()).expand(second * self.heads, first, first), q, k.transpose(1, 2),
            beta=0.0, alpha=self.size**-0.5,
        )  # fmt: skip
        kept = F.dropout(F.softmax(scores, -1), 0.1)
        return torch.bmm(kept, v).transpose(0, 1).reshape(first, second, -1)


class Layers(nn.Module):
    """Layers one after the other, and a loss."""

    def __init__(self, count: int, width: int, heads: int, shared: int = 1, flash: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(MegatronLayer(width, heads, shared, flash) for _ in range(count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the last layer's results."""
        return self.layers(x).sum()


def layers(count: int, s: int, b: int, h: int, a: int, *, shared: int = 1, flash: bool = False) -> Prepared:
    """A step of some layers in bfloat16, captured for an A100."""
    with torch.device("meta"):
        model = Layers(count, h, a, shared, flash).to(torch.bfloat16)
        shape = (b, s, h) if flash else (s, b, h)
        x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    options = PlanOptions(device="A100-80GB", attention="flash" if flash else None)
    return prepare(model, Step((x,), {}), options)


def activation_bytes(step: Prepared, layer: str = "layers.0") -> int:
    """What a layer leaves for the backward, when nothing is recomputed; what it is given counts with the
    layer before it, and its own result with it."""
    graph = step.problem.graph
    alive = alive_at(graph, graph.base_schedule, graph.forward_length - 1)
    made = [v for v in alive.tolist() if graph.ops[int(graph.producer[v])].module.startswith(layer)]
    return sum(graph.values[v].bytes for v in made)


def formula(s: int, b: int, h: int, a: int, flash: bool = False) -> float:
    """Bytes of a layer's activations by the paper's equation 1.

    With flash attention none of the (a, s, s) tensors is there (5as/h), and a float of each row's logarithm
    of the sum of exponentials is: 4a/h.
    """
    return s * b * h * (34 + (4 * a / h if flash else 5 * a * s / h))


def formulas(shapes: tuple[tuple[int, int, int, int], ...] = SHAPES) -> Result:
    """Both forms for all shapes."""
    rows = []
    for shape in shapes:
        for flash in (False, True):
            found = activation_bytes(layers(2, *shape, flash=flash))
            rows.append({"shape": shape, "flash": flash, "bytes": found, "formula": formula(*shape, flash)})
    return {"kind": "formula", "device": "A100-80GB", "rows": rows}


_CORE = ("baddbmm", "bmm", "softmax", "dropout")


def selective(step: Prepared) -> Schedule:
    """Recompute the attention's core in every layer, as the paper's selective recomputation does: what is
    quadratic in the length."""
    graph = step.problem.graph
    quadratic = max(value.bytes for value in graph.values) // 4
    again = []
    for row in range(graph.forward_length):
        made = [graph.values[v] for v in graph.ops[row].outputs if not graph.values[v].on_demand]
        name = graph.ops[row].name
        if any(part in name for part in _CORE) and any(value.bytes >= quadratic for value in made):
            again.append(row)
    return _keeping_all_but(graph, again)


def full(step: Prepared) -> Schedule:
    """Recompute all of every layer, from what it is given."""
    graph = step.problem.graph
    last = {}
    for row in range(graph.forward_length):
        layer = ".".join(graph.ops[row].module.split(".")[:2])
        if layer.startswith("layers.") and graph.ops[row].recomputable:
            last[layer] = row
    again = [
        row
        for row in range(graph.forward_length)
        if graph.ops[row].module.startswith("layers.") and row not in last.values()
    ]
    return _keeping_all_but(graph, again)


def _keeping_all_but(graph: Graph, rows: list[int]) -> Schedule:
    kept = np.ones(len(graph.values), dtype=bool)
    for row in rows:
        kept[list(graph.ops[row].outputs)] = False
    return recompute(graph, kept)


PAPER = {"selective": 0.07, "full": 0.39}
"""Korthikanti et al., table 4: extra time of a layer of the 22B model, without sequence parallelism."""


def layer_times(
    count: int = 4, s: int = 2048, b: int = 4, h: int = 6144, a: int = 64, shared: int = 8
) -> Result:
    """Extra time of the 22B model's layers at the memory of the paper's recomputations, by their schedule
    and by the planner's; by the A100's figures, without communication between the GPUs that share them."""
    step = layers(count, s, b, h, a, shared=shared)
    graph = step.problem.graph
    nothing = simulate(graph, graph.base_schedule)
    found = {}
    for name, schedule in (("selective", selective(step)), ("full", full(step))):
        theirs = simulate(graph, schedule)
        ours = portfolio.solve(graph, theirs.peak_bytes, time_limit=30)
        found[name] = {
            "peak_bytes": theirs.peak_bytes,
            "overhead": theirs.seconds / nothing.seconds - 1,
            "planned_peak_bytes": ours.peak_bytes,
            "planned_overhead": ours.seconds / nothing.seconds - 1,
            "published": PAPER[name],
        }
    return {
        "kind": "layer",
        "device": "A100-80GB",
        "layers": count,
        "shape": (s, b, h, a),
        "shared": shared,
        "peak_bytes": nothing.peak_bytes,
        "ways": found,
    }


ANATOMY = {"context": 1343, "model": 2631, 4: 14_949, 1: 8681}
"""MiB in use as NVML counts, from Hugging Face's "Anatomy of model's training": before any model, with
BERT-Large on the device, training at batch 4, and at batch 1 with gradients of four steps added up."""


def anatomy(build: Callable[[], nn.Module], make_args: Callable[[int], dict[str, torch.Tensor]]) -> Result:
    """BERT-Large's step at the published batches, with gradients that stay (as ``zero_grad()`` left them
    before PyTorch 2.0, and as accumulation has them) and with gradients that are let go."""
    rows = []
    for batch, accumulate in ((4, True), (4, False), (1, True)):
        options = PlanOptions(optimizer="AdamW", device="V100-16GB", accumulate=accumulate)
        step = prepare(build(), Step((), make_args(batch)), options)
        whole = step.baseline_whole_step
        rows.append(
            {
                "batch": batch,
                "gradients_stay": accumulate,
                "published_bytes": ANATOMY[batch] << 20,
                "context_bytes": ANATOMY["context"] << 20,
                "parameter_bytes": step.resident.parameter_bytes,
                "optimizer_bytes": step.resident.optimizer_bytes,
                "gradient_bytes": step.resident.parameter_bytes,
                "dynamic_bytes": step.problem.eager.peak_bytes,
                "allocated_bytes": whole.allocated_bytes,
                "library_bytes": whole.library_bytes,
                "fragmentation_bytes": whole.fragmentation_bytes,
                "reserved_bytes": whole.reserved_bytes,
                "expandable_reserved_bytes": whole.expandable_reserved_bytes,
            }
        )
    return {"kind": "anatomy", "device": "V100-16GB", "rows": rows}
