"""Inductor's decompositions, and those of our own that take less memory.

Inductor's passes over a forward and backward that it captured itself rewrite some of its decompositions. The
graphs of a plan do not go through these. Seen to work with torch 2.13.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._inductor.decomposition import select_decomp_table

_MEAN = 1
"""The reduction of a loss that is divided by the weight of its targets."""


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The decomposition of each operator that has one, for this moment's settings of Inductor."""
    aten = torch.ops.aten
    ours = {
        aten.nll_loss_backward.default: nll_loss_backward,
        aten.nll_loss2d_backward.default: nll_loss_backward,
    }
    return {**select_decomp_table(), **ours}


def nll_loss_backward(
    grad_output: torch.Tensor,
    values: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """The gradient of ``nll_loss``, element by element, so that it need not be in memory.

    PyTorch's scatters into zeros: a tensor as large as all logits, beside the gradient made of it.

    Args:
        grad_output: The gradient of the loss.
        values: The logarithms of probabilities, of which the shape is read.
        target: The class of each element.
        weight: The weight of each class.
        reduction: 0 for none, 1 for the mean, 2 for the sum.
        ignore_index: The class of targets that count nothing.
        total_weight: The weight of all targets.
    """
    channel = 0 if values.dim() < 2 else 1
    if reduction == _MEAN:
        grad_output = grad_output / total_weight
    if values.dim() == 1 and target.dim() > 0:
        target = target[0]
    target = target.unsqueeze(channel)
    along = functools.partial(_along, channel=channel, dimensions=values.dim())
    if values.dim() > grad_output.dim() > 0:
        grad_output = grad_output.unsqueeze(channel)
    if weight is not None:
        grad_output = grad_output * along(weight)
    counted = torch.where(target != ignore_index, -grad_output, 0)
    classes = along(torch.arange(values.shape[channel], device=values.device))
    return torch.where(classes == target, counted, 0)


def _along(vector: torch.Tensor, channel: int, dimensions: int) -> torch.Tensor:
    """A vector laid along one of so many dimensions."""
    return vector.reshape([-1 if d == channel else 1 for d in range(dimensions)])
