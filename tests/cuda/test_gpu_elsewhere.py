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
from planner._torch.layouts.shape_functions import layouts_of_kernels
from planner.capture.capture import capture
from planner.capture.captured_step import CapturedStep, CudaKernels
from planner.planning.options import PlanOptions
from planner.planning.prepare import prepare
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


def test_states_of_generators_are_no_bytes_of_the_gpu() -> None:
    """Dropout that is run again keeps the state of a generator: on the CPU in the memory that is planned."""
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)) for _ in range(4)))
        x = torch.randn(512, 64)
    sizes = {}
    for device in ("H100", "cpu"):
        problem = prepare(module, Step((x,), {}, torch.sum), PlanOptions(device=device)).problem
        values = {v.name: v.bytes for v in problem.graph.values if v.name.startswith("generator state")}
        again = sum(op.workspace_bytes for op in problem.graph.ops[problem.graph.base_length :])
        sizes[device] = len(values), sum(values.values()), again
    state = torch.default_generator.get_state().nbytes
    assert sizes["H100"] == (4, 0, 0)
    assert sizes["cpu"] == (4, 4 * (state + -state % 64), 4 * state)


class Scaled(nn.Module):
    """A linear layer and ``nn.RMSNorm``."""

    def __init__(self, *sizes: int, affine: bool = True, weight: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.norm = nn.RMSNorm(sizes or 256, elementwise_affine=affine, dtype=weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x).transpose(0, 1))  # type: ignore[no-any-return]


FUSED, FUSED_BACKWARD = "_fused_rms_norm.default", "_fused_rms_norm_backward.default"


def made_by(captured: CapturedStep, name: str) -> list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]]:
    """Types, sizes and strides of an operator's results."""
    (joint,) = [g.joint for g in captured.graphs if g.joint]
    (op,) = [op for op in joint.ops if str(op.node.target) == f"aten.{name}"]
    return [(t.dtype, tuple(t.shape), t.stride()) for t in op.node.meta["val"] if t is not None]


@pytest.mark.parametrize("device", ["H100", "T4", "MI300X"])
@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_is_one_kernel(device: str, affine: bool) -> None:
    x = torch.randn(128, 32, 256)
    plan = plan_of(Scaled(affine=affine), (x,), device=device, loss=torch.sum)
    found = operations(plan)
    assert found[FUSED] == 4_210_688  # its result, and a number for each row
    assert found[FUSED_BACKWARD] == 4_194_304 + 1024 * affine
    assert not [name for name in found if name.startswith(("pow", "rsqrt", "mul"))]
    assert "rsqrt.default" in operations(plan_of(Scaled(affine=affine), (x,), loss=torch.sum))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_results_of_rms_norm_lie_as_on_the_gpu(dtype: torch.dtype) -> None:
    model, x = Scaled(4, 256).to(dtype), torch.randn(4, 6, 256, dtype=dtype)
    captured = captured_for(model, (x,), CudaKernels(H100, None, True))
    single = torch.float64 if dtype is torch.float64 else torch.float32
    assert made_by(captured, FUSED) == [(dtype, (6, 4, 256), (1024, 256, 1)), (single, (6, 1, 1), (1, 1, 1))]
    assert made_by(captured, FUSED_BACKWARD) == [
        (dtype, (6, 4, 256), (1024, 256, 1)),
        (dtype, (4, 256), (256, 1)),
    ]
    eager = {str(call.func) for call in captured.eager.calls}
    assert {f"aten.{FUSED}", f"aten.{FUSED_BACKWARD}"} <= eager


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_under_autocast_is_in_single_precision(affine: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        captured = captured_for(
            Scaled(affine=affine), (torch.randn(4, 6, 256),), CudaKernels(H100, None, True)
        )
    row = (torch.float32, (6, 4, 1), (4, 1, 1))
    assert made_by(captured, FUSED) == [(torch.float32, (6, 4, 256), (1024, 256, 1)), row]
    assert made_by(captured, FUSED_BACKWARD)[0][0] is torch.float32


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_rms_norm_is_taken_apart_where_its_weight_is_of_another_type() -> None:
    model, x = Scaled(weight=torch.bfloat16), torch.randn(4, 6, 256)
    found = called(captured_for(model, (x,), CudaKernels(H100, None, True)))
    assert "rsqrt.default" in found
    assert FUSED not in found


class Penalised(nn.Module):
    """A loss with a gradient of itself by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        loss = self.body(x).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


def test_rms_norm_can_be_differentiated_twice() -> None:
    x = torch.randn(4, 6, 256)
    plan = planner.plan(Penalised(), (x,), budget="1GiB", device="H100", solver="none", loss=torch.sum)
    found = operations(plan)
    assert FUSED in found
    assert FUSED_BACKWARD not in found  # of it there is no derivative: its parts are differentiated


def test_rms_norm_of_the_cpu_is_as_it_was_afterwards() -> None:
    kernels = dict(aten._fused_rms_norm.default.py_kernels)
    with kernels_of_cuda(H100, None), dispatched_in_python():
        weight = torch.randn(8, requires_grad=True)
        given = torch.randn(4, 8, requires_grad=True)
        result = F.rms_norm(given, [8], weight)  # with data
    assert aten._fused_rms_norm.default.py_kernels == kernels
    torch.testing.assert_close(result, F.rms_norm(given, [8], weight))


def test_the_gradient_of_rms_norm_is_contiguous_whatever_it_is_given() -> None:
    with FakeTensorMode(), layouts_of_kernels(), kernels_of_cuda(H100, None), dispatched_in_python():
        turned = torch.empty(4, 6, 8).transpose(0, 1)
        made = aten._fused_rms_norm_backward(
            turned, turned, [8], torch.empty(6, 4, 1), torch.empty(8), [True, True]
        )
    assert [t.stride() for t in made] == [(32, 8, 1), (1,)]
