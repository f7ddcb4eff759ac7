"""Programs that Inductor emits for a GPU on a machine without one."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import device_interface

import planner
from planner._torch.inductor import compiling
from planner.costs.devices import find_device
from planner.errors import CaptureError, CompilerError, PlannerError
from planner.lowering.inductor import InductorLowering
from planner.planning.inductor import emitted_model
from planner.problem.emitted_step import EmittedStep
from tests.cuda.test_cuda_scratch import meta, scratch

KIB, MIB = 1 << 10, 1 << 20
OPTIONS: Any = {"loss": torch.sum, "backend": "inductor", "unproven": True, "costs": "roofline"}


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that are emitted from now on."""
    lower, found = InductorLowering.emitted, list[str]()

    def noted(self: InductorLowering, *args: Any) -> Any:
        emitted = lower(self, *args)
        found.append(emitted[0].source)
        return emitted

    monkeypatch.setattr(InductorLowering, "emitted", noted)
    return found


def unrecomputed(model: nn.Module, *inputs: torch.Tensor, device: str = "H100") -> EmittedStep:
    """What the programs of a step take that recomputes nothing on a GPU."""
    prepared = planner.prepare(model.train(), inputs, device=device, **OPTIONS)._prepared
    problem = prepared.problem
    sequences = problem.backward_sequences(prepared.captured, problem.graph.base_schedule)
    return emitted_model(prepared, "anywhere").step(sequences)


class Layer(nn.Module):
    """A layer with what is a GPU's own: dropout, and the backward of a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.norm = nn.Linear(256, 1024, bias=False), nn.LayerNorm(1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(self.norm(self.widen(x))), 0.1)


@pytest.mark.heavy
def test_programs_for_a_gpu_are_counted_with_their_workspace(sources: list[str]) -> None:
    before = device_interface.get_interface_for_device("cuda"), torch.cuda.get_device_properties
    with torch.device("meta"):
        model, x = Layer(), torch.empty(16384, 256)
    step = unrecomputed(model, x)
    forward, backward = sources
    assert "multi_processor_count=132, cc=90" in forward
    assert "planner_random.aten_native_dropout" in forward
    # Gradients of the normalisation's weight and bias are made of 1,024 partial sums each.
    assert "workspace_0 = empty_strided_cuda((2097152, ), (1, ), torch.float32)" in backward
    # There are then, of 64 MiB, the output and its gradient, the product before and after the normalisation,
    # and its gradient; a mask, of 16 MiB; mean, deviation and a sum of each row; the workspace, and what
    # adds it up; the two gradients; the loss and its gradient.
    whole, rows = 5 * 64 * MIB + 16 * MIB, 3 * 64 * KIB
    adding = scratch(torch.ops.aten.sum.dim_IntList, meta(1024, 1024), [0], device="H100")
    assert step.peak_bytes == whole + rows + 8 * MIB + adding + 2 * 4 * KIB + 2 * 512
    after = device_interface.get_interface_for_device("cuda"), torch.cuda.get_device_properties
    assert after == before


@pytest.mark.heavy
def test_operators_are_decomposed_as_on_a_gpu(sources: list[str]) -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 64), nn.LogSigmoid(), nn.Linear(64, 64)), torch.empty(4096, 64)
    unrecomputed(model, x)
    # Of its input, as large, the CPU's operator keeps the exponentials, and a GPU's nothing.
    assert "empty_strided_cuda((0, ), (1, ), torch.float32)" in sources[0]


@pytest.mark.heavy
def test_a_draw_on_a_gpu_runs_again_from_the_state_of_its_generator(sources: list[str]) -> None:
    with torch.device("meta"):
        model, x = Layer().train(), torch.empty(16384, 256)
    again: Any = {"budget": "64GiB", "solver": "sqrt_n", "recompute": ["aten.native_dropout"]}
    plan = planner.plan(model, x, device="H100", **again, **OPTIONS)
    assert plan.recomputed_operations > 0
    forward, backward = sources
    assert "planner_random.state_cuda_0.default" in forward
    assert "planner_random.aten_native_dropout_from_state_cuda_0" in backward


class Words(nn.Module):
    """A table of words, and attention with a mask that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.empty(1000, 64, dtype=torch.bfloat16))

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words[words].unflatten(-1, (4, 16)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, mask.expand(-1, 4, -1, -1), dropout_p=0.1)


@pytest.mark.heavy
def test_each_gpu_has_programs_of_its_own(sources: list[str]) -> None:
    with torch.device("meta"):
        model = Words()
        inputs = torch.zeros(8, 128, dtype=torch.long), torch.zeros(8, 1, 128, 128, dtype=torch.bfloat16)
    for device in ("H100", "A100-80GB"):
        unrecomputed(model, *inputs, device=device)
    _, on_hopper, _, on_ampere = sources
    assert "tl.atomic_add" in on_hopper
    assert "aten.index_put_(buf" not in on_hopper
    assert "aten.index_put_(buf" in on_ampere  # whose kernels add no bfloat16 up atomically


def test_no_compiler_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "missing_compiler", lambda: "none works")
    model, x = Layer().train(), torch.randn(64, 256)
    with pytest.raises(CompilerError, match="none works"):
        planner.plan(model, x, budget="min", device="cpu", **OPTIONS)
    assert planner.plan(model, x, budget="64GiB", device="H100", **OPTIONS).target.device == "H100"


def test_other_gpus_are_refused() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    of_pascal = replace(find_device("T4"), name="P100", capability=(6, 0))
    for device in ("MI300X", of_pascal):
        with pytest.raises(PlannerError, match=r"NVIDIA's GPUs from compute capability 7\.0 on, not for"):
            planner.plan(model, x, budget="min", device=device, **OPTIONS)


def test_what_a_gpu_cannot_is_an_error() -> None:
    model, x = nn.Linear(8, 8, dtype=torch.bfloat16), torch.randn(4, 8, dtype=torch.bfloat16)
    with pytest.raises(CaptureError, match="BF16 is not supported"):
        planner.plan(model.to("meta"), x.to("meta"), budget="min", device="T4", **OPTIONS)


PROGRAM = """
import sys
if {hidden}:
    sys.modules["triton"] = None
import planner, torch
from tests.inductor.test_inductor_elsewhere import OPTIONS, Layer
with torch.device("meta"):
    model, x = Layer().train(), torch.empty(16384, 256)
plan = planner.plan(model, x, budget="64GiB", device="H100", **OPTIONS)
print(plan.graphs[0].emitted)
"""


@pytest.mark.heavy
def test_programs_are_the_same_with_triton_and_without(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed, and need not be")
    found = []
    for hidden in (False, True):
        command = [sys.executable, "-c", PROGRAM.format(hidden=hidden)]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / str(hidden))}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append(done.stdout)
    assert found[0] == found[1] != ""
