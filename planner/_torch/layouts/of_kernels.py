"""Layouts of operators' results: a list of the operators whose shape functions tell other strides than their
kernels give."""

from typing import Any

import torch

from planner._torch import compat
from planner._torch.layouts.elementwise_strides import ELEMENTWISE
from planner._torch.layouts.forms import (
    Layout,
    contiguous,
    element_by_element,
    like,
    made_contiguous,
    normalised_as,
    normalised_backward,
    rolled,
    suggested_by,
)

LAYOUTS: dict[Any, Layout] = {
    getattr(torch.ops.aten, name).default: layout
    for layout, names in (
        (
            normalised_as(0),
            (
                *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
                *("_batch_norm_with_update", "_batch_norm_with_update_functional"),
            ),
        ),
        (normalised_as(0, 1), ("native_batch_norm_backward", "batch_norm_backward")),
        (
            suggested_by(0),
            (
                *("native_group_norm", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"),
                *("channel_shuffle", "native_channel_shuffle", "max_unpool2d"),
                *("reflection_pad3d", "replication_pad3d"),
            ),
        ),
        (rolled, ("roll",)),
        (
            suggested_by(1),
            (
                *("reflection_pad2d_backward", "replication_pad2d_backward"),
                *("reflection_pad3d_backward", "replication_pad3d_backward"),
            ),
        ),
        (
            made_contiguous(1) if compat.version() >= (2, 14) else suggested_by(1),
            ("native_group_norm_backward",),
        ),
        (
            contiguous,
            (
                *("native_layer_norm", "native_layer_norm_backward", "_log_softmax", "log_sigmoid_forward"),
                *("_log_softmax_backward_data", "_fused_rms_norm", "_fused_rms_norm_backward"),
                *("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "tril", "triu"),
                *("glu_backward", "rrelu_with_noise", "im2col"),
            ),
        ),
        (
            like(0),
            (
                *("empty_like", "full_like", "zeros_like", "ones_like", "rand_like", "randn_like"),
                *("flip", "hardtanh", "nan_to_num", "_prelu_kernel", "log_sigmoid_backward"),
            ),
        ),
        (like(1), ("binary_cross_entropy_backward", "nll_loss2d_backward", "_prelu_kernel_backward")),
    )
    for name in names
    if hasattr(torch.ops.aten, name)
} | {torch.ops.aten._native_batch_norm_legit.no_stats: normalised_as(0)}
LAYOUTS[torch.ops.aten.pow.Scalar] = contiguous
LAYOUTS |= dict.fromkeys((torch.ops.aten.masked_fill.Scalar, torch.ops.aten.masked_fill.Tensor), contiguous)
LAYOUTS |= {operator: element_by_element(operator) for operator in ELEMENTWISE}

ON_CUDA: dict[Any, Layout] = {
    torch.ops.aten.roll.default: contiguous,
    torch.ops.aten.max_unpool2d.default: contiguous,
    torch.ops.aten.native_group_norm.default: contiguous,
    torch.ops.aten.native_dropout_backward.default: suggested_by(0),
    torch.ops.aten.native_batch_norm_backward.default: normalised_backward,
}
"""Layouts of CUDA's kernels where they differ from the CPU's."""

UNKNOWN_ON_CUDA = {getattr(torch.ops.aten, name).default for name in (
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_batch_norm_with_update", "_batch_norm_with_update_functional", "batch_norm_backward",
    "native_group_norm_backward", "reflection_pad2d_backward",
    "replication_pad2d_backward", "log_sigmoid_forward", "channel_shuffle", "native_channel_shuffle",
    "reflection_pad3d", "replication_pad3d", "reflection_pad3d_backward", "replication_pad3d_backward",
)}  # fmt: skip
"""Operators whose kernels on CUDA are assumed to give the strides of PyTorch's shape functions."""
