"""Plans for a GPU that is not here have the operators and layouts that it has, as recorded on one.

The numbers are those of PyTorch 2.13 on an NVIDIA H200.
"""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import planner
from planner._torch.cuda.kernels import dispatched_in_python, kernels_of_cuda
from planner._torch.tracing.meta_patches import layouts_of_kernels
from planner.capture.capture import capture
from planner.capture.captured_step import CapturedStep, CudaKernels
from planner.runtime.remap import planned_bytes, total_bytes
from planner.training_step.step import Step
from planner.user_plan import Plan
from tests.side_by_side import plan_of

aten = torch.ops.aten
H100 = (9, 0)


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())


def operations(plan: Plan) -> dict[str, int]:
    """Bytes of operators by their names; of several the last's."""
    return {op.name.removeprefix("aten."): op.bytes for graph in plan.graphs for op in graph.ops}


def captured_for(model: nn.Module, args: tuple[torch.Tensor, ...], device: CudaKernels) -> CapturedStep:
    return capture(model, Step(args, loss=torch.sum), cuda=device)


def called(captured: CapturedStep) -> list[str]:
    return [
        str(op.node.target).removeprefix("aten.") for g in captured.graphs if g.joint for op in g.joint.ops
    ]


@pytest.mark.parametrize("device", ["H100", "T4"])
def test_batch_normalisation_is_cudnn_s(device: str) -> None:
    x = torch.randn(16, 3, 64, 64)
    found = operations(plan_of(normalised(), (x,), device=device, loss=torch.sum))
    assert found["convolution.default"] == 8_388_608
    assert found["_batch_norm_with_update_functional.default"] == 8_390_656
    assert "batch_norm_backward.default" in found
    assert not [name for name in found if "native_batch_norm" in name]
    here = operations(plan_of(normalised(), (x,), loss=torch.sum))
    assert "_native_batch_norm_legit_functional.default" in here


@pytest.mark.parametrize("case", ["bfloat16", "no parameters", "AMD", "switched off"])
def test_batch_normalisation_is_pytorch_s_own_where_cudnn_s_does_not_run(case: str) -> None:
    model, x = normalised(), torch.randn(16, 3, 64, 64)
    if case == "no parameters":
        model[1] = nn.BatchNorm2d(32, affine=False)
    device = CudaKernels(H100, None, case != "AMD")
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=case == "bfloat16")
    with autocast, torch.backends.cudnn.flags(enabled=case != "switched off"):
        found = called(captured_for(model, (x,), device))
    assert "_native_batch_norm_legit_functional.default" in found
    assert "native_batch_norm_backward.default" in found


def test_the_eager_step_normalises_by_cudnn_too() -> None:
    captured = captured_for(normalised(), (torch.randn(16, 3, 64, 64),), CudaKernels(H100, None, True))
    eager = {str(call.func) for call in captured.eager.calls}
    assert {"aten.cudnn_batch_norm.default", "aten.cudnn_batch_norm_backward.default"} <= eager


def test_group_normalisation_makes_what_it_is_given_contiguous() -> None:
    model = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU())
    x = torch.randn(4, 32, 8, 8).to(memory_format=torch.channels_last)
    plan = plan_of(model, (x,), device="H100", loss=torch.sum)
    assert operations(plan)["clone.default"] == 32_768
    assert "clone.default" not in operations(plan_of(model, (x,), loss=torch.sum))


@pytest.mark.parametrize("cudnn", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_convolution_is_channels_last_where_a_weight_is(cudnn: bool, dtype: torch.dtype) -> None:
    with FakeTensorMode(), layouts_of_kernels(), kernels_of_cuda(H100, None, cudnn=cudnn):
        weight = torch.empty(8, 4, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)
        made = F.conv2d(torch.empty(2, 4, 16, 16, dtype=dtype), weight)
    channels_last = cudnn and dtype is torch.float32
    assert made.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_results_lie_as_on_the_gpu() -> None:
    def image(channels: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(4, channels, 64, 64, dtype=dtype).to(memory_format=torch.channels_last)

    with FakeTensorMode(), layouts_of_kernels(), kernels_of_cuda(H100, None), dispatched_in_python():
        few, many = (aten.upsample_bilinear2d(image(channels), [128, 128], True) for channels in (8, 16))
        pooled = aten.avg_pool2d(image(16), [3, 3], [1, 1], [1, 1])
        rolled = aten.log_sigmoid_forward(torch.empty(4, 8))
        normal = aten._native_batch_norm_legit_functional(
            *(image(16, torch.bfloat16), *[torch.empty(16)] * 4, True, 0.1, 1e-5)
        )
        half = torch.empty(4, 8, dtype=torch.bfloat16)
        layer = aten.native_layer_norm(half, [8], *[torch.empty(8, dtype=torch.bfloat16)] * 2, 1e-5)
    assert few.stride() == (131072, 1, 1024, 8)
    assert many.is_contiguous(memory_format=torch.channels_last)
    assert pooled.stride() == (65536, 1, 1024, 16)
    assert rolled[1].numel() == 0
    assert [t.dtype for t in (normal[1], normal[2], layer[1], layer[2])] == [torch.float32] * 4


def test_layouts_of_the_cpu_hold_again_afterwards() -> None:
    def buffer() -> int:
        return aten.log_sigmoid_forward(torch.empty(4, 8))[1].numel()  # type: ignore[no-any-return]

    with FakeTensorMode(), layouts_of_kernels():
        before = buffer()
        with kernels_of_cuda(H100, None):
            assert buffer() == 0
        assert buffer() == before == 32
    hint = torch._meta_registrations.device_hint
    assert hint(torch.empty(1)) == "cpu"


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).view(4, 32, 4, 32).transpose(1, 2)
        return self.last(F.scaled_dot_product_attention(h, h, h).transpose(1, 2).reshape(4, 32, 128))


def test_seeds_that_attention_keeps_on_the_host_are_no_bytes_of_the_gpu() -> None:
    """A plan does not count them; what is traced where it is applied must not either."""
    plan = planner.plan(Attends(), (torch.randn(4, 32, 128),), budget="100GiB", device="H100", loss=torch.sum)
    assert "aten._scaled_dot_product_efficient_attention.default" in {op.name for op in plan.graphs[0].ops}
    captured = captured_for(Attends(), (torch.randn(4, 32, 128),), CudaKernels(H100, None, True))
    joint = captured.graphs[0].joint
    assert joint is not None
    assert total_bytes(joint) == planned_bytes(plan.graphs[0])
