"""Strides of results on CUDA, as an H200 gave them with torch 2.13.0+cu130, on tensors without data."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from planner._torch.fake import fake_mode
from planner._torch.layouts.shape_functions import layouts_of_kernels

aten = torch.ops.aten


def new(sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A tensor on CUDA."""
    return torch.empty_strided(sizes, strides, device="cuda")


def upsampled() -> torch.Tensor:
    """Few channels, the innermost dimension: PyTorch's shape function takes the result for contiguous."""
    return aten.upsample_bilinear2d(new((4, 5, 16, 16), (1280, 1, 80, 5)), [64, 64], False)


def upsampled_backward() -> torch.Tensor:
    gradient = new((4, 8, 128, 128), (131072, 1, 1024, 8))
    return aten.upsample_bilinear2d_backward(gradient, [128, 128], [4, 8, 64, 64], True, 2.0, 2.0)


def log_softmax() -> torch.Tensor:
    return aten._log_softmax(new((4, 5, 64, 64), (20480, 1, 320, 5)), 1, False)


def normalised_backward() -> torch.Tensor:
    weight, sums = new((32,), (1,)), new((4, 64, 1), (64, 1, 1))
    gradient, given = new((4, 64, 32), (2048, 1, 64)), new((4, 64, 32), (2048, 32, 1))
    return aten.native_layer_norm_backward(gradient, given, [32], sums, sums, weight, weight, [True] * 3)[0]


def added() -> torch.Tensor:
    """Of operands that lie otherwise: the result lies as the first."""
    return aten.add.Tensor(new((4, 16, 16, 16), (4096, 1, 256, 16)), new((4, 16, 16, 16), (4096, 256, 16, 1)))


@pytest.mark.parametrize(
    ("result", "strides"),
    [
        (upsampled, (20480, 1, 320, 5)),
        (upsampled_backward, (32768, 1, 512, 8)),
        (log_softmax, (20480, 4096, 64, 1)),
        (normalised_backward, (2048, 32, 1)),
        (added, (4096, 1, 256, 16)),
    ],
)
def test_results_are_laid_out_as_on_a_gpu(result: Any, strides: tuple[int, ...]) -> None:
    with fake_mode(), layouts_of_kernels():
        try:
            made = result()
        except RuntimeError as error:
            if "not linked with support for cuda" not in str(error):
                raise
            pytest.skip("this PyTorch cannot run this shape function")
    assert made.stride() == strides
