"""Operators that have no kernel for double precision, computed by others that have one."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class InDoublePrecision(TorchFunctionMode):
    """Runs a step that is in double precision: experts' products are then one for each expert."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is getattr(torch, "_grouped_mm", None):
            rows, weights = args[:2]
            if rows.dtype is torch.float64 and (rows.dim(), weights.dim()) == (2, 3):
                return _by_expert(*args, **kwargs)
        return func(*args, **kwargs)


def _by_expert(
    rows: torch.Tensor,
    weights: torch.Tensor,
    offs: torch.Tensor,
    bias: Any = None,
    out_dtype: Any = None,  # noqa: ARG001
) -> torch.Tensor:
    """``torch._grouped_mm``: rows up to each of the offsets, times the weight of their group."""
    ends = offs.tolist()
    parts = [rows[begin:end] @ weight for begin, end, weight in zip([0, *ends], ends, weights, strict=False)]
    beyond = rows.new_zeros(len(rows) - ends[-1], weights.shape[-1])
    made = torch.cat([*parts, beyond])
    return made if bias is None else made + bias
