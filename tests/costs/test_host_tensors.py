"""Seeds of attention that a GPU's kernels keep on the host: made there, and not counted as the GPU's."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.costs import workspace
from planner.costs.eager_timeline import real_sizes
from planner.costs.made_up import real_arguments
from planner.costs.workspace import NOT_RUN, OpMemory, WorkspaceMeter
from planner.training_step.call import Call

aten = torch.ops.aten
EFFICIENT = aten._scaled_dot_product_efficient_attention


def efficient_backward() -> Call:
    """A backward of the memory-efficient attention with dropout, on tensors that say they are on a GPU."""
    x = torch.empty(2, 4, 64, 16, device="cuda")
    out, sums, seed, offset = EFFICIENT(x, x, x, None, True, 0.1)
    assert seed.device.type == offset.device.type == "cuda"
    wanted = [True, True, True, False]
    return Call(
        aten._scaled_dot_product_efficient_attention_backward.default,
        (x, x, x, x, None, out, sums, seed, offset, 0.1, wanted),
    )


def flash_backward() -> Call:
    x = torch.empty(2, 4, 64, 16, device="cuda", dtype=torch.float16)
    out, sums, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(x, x, x, 0.1)
    return Call(
        aten._scaled_dot_product_flash_attention_backward.default,
        (x, x, x, x, out, sums, None, None, 64, 64, 0.1, False, seed, offset),
    )


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> WorkspaceMeter:
    """One for a GPU; under a mode without data its arguments can be made without one."""
    monkeypatch.setattr(workspace, "environment", lambda device: "a GPU")
    monkeypatch.setattr(real_arguments, "_available_bytes", lambda device: 2**40)
    return WorkspaceMeter("cuda", cache_path=None)


@pytest.mark.parametrize(("make", "on_host"), [(efficient_backward, {7, 8}), (flash_backward, set())])
def test_what_a_kernel_reads_on_the_host_is_made_there(
    make: Any, on_host: set[int], meter: WorkspaceMeter
) -> None:
    with FakeTensorMode():
        call = make()
        with meter.arguments(call) as (args, _):  # as the timer makes them
            devices = {i: a.device.type for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
            made, _, _ = meter.made_up.of(call, masks=True)  # as the meter makes them
    assert {i for i, device in devices.items() if device == "cpu"} == on_host
    assert len(devices) > 6
    for i in devices:
        assert made[i].device.type == devices[i]
        assert (made[i].shape, made[i].dtype) == (call.args[i].shape, call.args[i].dtype)


def test_what_a_kernel_makes_on_the_host_takes_no_memory_of_the_gpu() -> None:
    call = Call(EFFICIENT.default, ())
    sizes = [4096, 256, 8, 8]
    assert real_sizes(call, NOT_RUN, sizes) == [4096, 256, 0, 0]
    assert real_sizes(call, OpMemory(0, (5000, 512, 0, 0)), sizes) == [5000, 512, 0, 0]
    flash = Call(aten._scaled_dot_product_flash_attention.default, ())
    assert real_sizes(flash, OpMemory(0, (5000, 512, 16, 8)), sizes) == [5000, 512, 16, 8]
