"""What a training loop, or a forward itself, sets of how PyTorch computes, for the whole process."""

import copy
from typing import Any

import pytest
import torch

from planner._torch.execution.settings import default_dtype, set_as, settings
from tests.side_by_side import Layers, assert_same, layers, left_by, peak_of, plan_of, steps

pytestmark = pytest.mark.heavy


class Noisy(Layers):
    """Makes tensors without naming their type, and makes them again in the backward."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer((x * (1 + torch.rand(64, 32))).float())
            x = (x * torch.linspace(0.5, 1, 32) * torch.full((64, 32), 1 / 3)).to(x.dtype)
        return x


class Divides(Noisy):
    """Makes tensors of integers, whose quotients have the default type."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(x * (torch.arange(64 * 32).view(64, 32) / 2048))


class SetsType(Noisy):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        y = super().run(x)
        torch.set_default_dtype(torch.float32)
        return y


class SetsTypeForOne(Layers):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        with default_dtype(torch.float64):
            weight = torch.ones(32) / 3
        return super().run((x * weight).float())


class Deterministic(Layers):
    """PyTorch fills new memory where that is asked for."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        torch.use_deterministic_algorithms(True)
        filled = torch.isnan(torch.empty(32))
        torch.use_deterministic_algorithms(False)
        return super().run(x + filled)


class InInferenceMode(Layers):
    """Reads what a part computes for which autograd is off, of a view of what has a gradient."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        y = super().run(x)
        with torch.inference_mode():
            scale = torch.sin(y.view(-1))
            scale += 1
        return torch.tanh(y * scale.clone().view_as(y))


def test_a_default_type_that_is_over_before_the_backward() -> None:
    model, (x,), _ = layers(Divides)
    twin = copy.deepcopy(model)
    with default_dtype(torch.float64):
        plan = plan_of(model, (x,))
    plan.apply(model)
    assert any(op.split(".")[1] == "rand" for op in _recomputed(plan))

    def loop(network: Any) -> torch.Tensor:
        with default_dtype(torch.float64):
            loss: torch.Tensor = network(x)
        loss.backward()
        return loss

    assert_same(left_by(model, loop), left_by(twin, loop))


@pytest.mark.filterwarnings("error::planner.PlanWarning")
@pytest.mark.parametrize(
    "build",
    [SetsType, pytest.param(SetsTypeForOne, marks=pytest.mark.heavy), Deterministic, InInferenceMode],
)
def test_what_a_forward_sets(build: type[Layers]) -> None:
    model, (x,), _ = layers(build)
    twin = copy.deepcopy(model)
    plan = plan_of(model, (x,))
    plan.apply(model)
    loop = steps((x,))
    assert_same(left_by(model, loop), left_by(twin, loop))
    assert peak_of(model, (x,)) == plan.predicted.dynamic_peak_bytes


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="it is no setting before 2.9")
def test_a_precision_for_all_kernels_counts_after_a_re_run_too() -> None:
    backends: Any = torch.backends
    before = backends.fp32_precision
    try:
        backends.fp32_precision = "ieee"
        then = settings()
        backends.fp32_precision = "bf16"
        now = settings()
        assert now != then
        with set_as(then):
            assert settings() == then
        assert settings() == now
        backends.fp32_precision = "ieee"
        assert settings() == then
    finally:
        backends.fp32_precision = before
        for kernels in ("matmul", "conv"):  # a failure would leave these set
            torch._C._set_fp32_precision_setter("mkldnn", kernels, "none")


@pytest.mark.parametrize("name", ["fp16_reduced_precision_reduction", "fp16_accumulation"])
def test_how_products_may_be_summed_is_as_in_the_first_run(name: str) -> None:
    if not hasattr(torch._C, f"_get_cublas_allow_{name}"):
        pytest.skip("this version has no such setting")
    products = torch.backends.cuda.matmul
    then, allowed = settings(), getattr(products, f"allow_{name}")
    try:
        setattr(products, f"allow_{name}", not allowed)
        with set_as(then):
            assert getattr(products, f"allow_{name}") == allowed
        assert getattr(products, f"allow_{name}") != allowed
    finally:
        setattr(products, f"allow_{name}", allowed)


def _recomputed(plan: Any) -> list[str]:
    return [graph.ops[i].name for graph in plan.graphs for i in graph.recomputed]


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="it is no setting before 2.9")
def test_a_re_run_gives_kernels_no_precision_of_their_own() -> None:
    backends: Any = torch.backends
    before = backends.fp32_precision
    try:
        backends.fp32_precision = "ieee"
        backends.mkldnn.matmul.fp32_precision = "bf16"
        then = settings()
        backends.mkldnn.matmul.fp32_precision = "none"
        with set_as(then):
            assert backends.mkldnn.matmul.fp32_precision == "bf16"
        backends.fp32_precision = "bf16"
        assert backends.mkldnn.matmul.fp32_precision == "bf16"
        backends.fp32_precision = "ieee"
        assert backends.mkldnn.matmul.fp32_precision == "ieee"
    finally:
        backends.fp32_precision = before
        torch._C._set_fp32_precision_setter("mkldnn", "matmul", "none")
