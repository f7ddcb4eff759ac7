"""What is measured on a GPU is remembered apart for every setting that chooses other kernels."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.costs.devices import DEVICES
from planner.costs.measurement_cache import environment
from planner.costs.roofline import roofline

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The name of one, and the settings as they were afterwards."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="A GPU"))
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: "cublas")
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    before = [backend.fp32_precision for backend in backends]
    yield
    for backend, precision in zip(backends, before, strict=True):
        backend.fp32_precision = precision
    torch.get_float32_matmul_precision()  # raises where the two ways of setting it disagree


def test_precisions_can_be_set_the_newer_way() -> None:
    before = environment(CUDA)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    products = environment(CUDA)
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    convolutions = environment(CUDA)
    assert len({before, products, convolutions}) == 3
    x = torch.empty(64, 64, device="meta")
    roofline(DEVICES["H100"]).seconds(torch.ops.aten.mm.default, (x, x), {}, x)  # does not raise either


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch.backends.cudnn, "allow_tf32", False),
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn, "enabled", False),
        (torch.backends.cudnn, "benchmark", True),
        (torch.backends.cuda.matmul, "allow_tf32", True),
        (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    ],
)
def test_a_setting_that_chooses_kernels_is_part_of_the_environment(
    owner: Any, name: str, value: bool
) -> None:
    before, set_before = environment(CUDA), getattr(owner, name)
    setattr(owner, name, value)
    try:
        after = environment(CUDA)
    finally:
        setattr(owner, name, set_before)
    assert after != before
    assert environment(CUDA) == before


def test_so_is_the_workspace_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment(CUDA)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert environment(CUDA) != before
