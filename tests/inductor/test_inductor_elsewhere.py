"""Programs that Inductor emits for a GPU on a machine without one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import device_interface

import planner
from planner.lowering.inductor import InductorLowering
from planner.planning.inductor import emitted_model
from planner.problem.emitted_step import EmittedStep
from solvers.model.arrays import Schedule

MIB = 1 << 20
Emitted = tuple[list[str], EmittedStep, planner.PreparedStep]


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Emitted]:
    """What says what Inductor emits for a step that recomputes nothing, and what that takes."""
    lower, sources = InductorLowering.emitted, list[str]()

    def noted(self: InductorLowering, *args: Any) -> Any:
        found = lower(self, *args)
        sources.append(found[0].source)
        return found

    monkeypatch.setattr(InductorLowering, "emitted", noted)

    def of(model: nn.Module, *args: torch.Tensor, device: str = "H100", again: bool = False) -> Emitted:
        options: Any = {"backend": "inductor", "unproven": True, "costs": "roofline"}
        sources.clear()
        prepared = planner.prepare(model.train(), args, loss=torch.sum, device=device, **options)
        inside = prepared._prepared
        schedule: Schedule = inside.problem.graph.base_schedule
        if again:
            schedule = prepared.plan("min").schedule
        sequences = inside.problem.backward_sequences(inside.captured, schedule)
        return list(sources), emitted_model(inside).step(sequences), prepared

    return of


class Layer(nn.Module):
    """A layer with what kernels of a GPU differ in: dropout, a normalisation and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.norm = nn.Linear(256, 1024, bias=False), nn.LayerNorm(1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(self.norm(self.widen(x))), 0.1)


@pytest.mark.heavy
def test_a_program_for_a_gpu_is_counted_with_its_workspace(emitted: Callable[..., Emitted]) -> None:
    before = device_interface.get_interface_for_device("cuda"), torch.cuda.get_device_properties
    with torch.device("meta"):
        model, x = Layer(), torch.empty(16384, 256)
    sources, step, prepared = emitted(model, x)
    assert "multi_processor_count=132, cc=90" in sources[0]
    assert "planner_random.aten_native_dropout" in sources[0]
    # The gradients of the normalisation's weights are sums over parts of its rows, 4 MiB for each of the two.
    assert "workspace_0 = empty_strided_cuda((2097152, ), (1, ), torch.float32)" in sources[1]
    # Then there are, of 64 MiB, the gradient that arrives, what was normalised and that gradient's product with
    # what dropout and activation leave; the mask and the weight are smaller.
    assert step.peak_bytes // MIB == 0
    assert (device_interface.get_interface_for_device("cuda"), torch.cuda.get_device_properties) == before
    assert prepared is not None
