"""Tensors without data in place of a graph's results."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from planner._torch import fake
from planner._torch.without_data.data_free import stand_ins


@stand_ins()
def fresh_results(
    values: Sequence[Any],
    input_values: Sequence[Any],
    arguments: Sequence[Any],
    views: Collection[int] = (),
    detached: Collection[int] = (),
) -> list[Any]:
    """Tensors without data like ``values``, which alias each other and the arguments as those do.

    Args:
        values: The results as traced.
        input_values: The arguments as traced, together with ``values``.
        arguments: The arguments.
        views: Positions of results that stay views even where they cover all of their memory.
        detached: Positions of results that no gradient goes through: they are views of no other.
    """
    bases: dict[int, torch.Tensor] = {}
    for value, argument in zip(input_values, arguments, strict=True):
        if isinstance(value, torch.Tensor) and isinstance(argument, torch.Tensor):
            bases[fake.storage_key(value)] = argument
    results: list[Any] = []
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            results.append(value)
            continue
        if value.layout is not torch.strided:
            results.append(torch.empty_like(value))
            continue
        key = fake.storage_key(value)
        if key not in bases:
            # No view where that does: nobody may change in place a view that a function returns.
            whole = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            bytes_ = value.untyped_storage().nbytes()
            if value.storage_offset() == 0 and whole.untyped_storage().nbytes() == bytes_:
                bases[key] = whole
                results.append(torch.ops.aten.alias(whole) if i in views else whole)
                continue
            span = bytes_ // max(value.element_size(), 1)
            bases[key] = torch.empty(span, dtype=value.dtype, device=value.device)
        base = bases[key]
        if base.dtype != value.dtype:
            base = base.view(value.dtype) if base.dim() == 1 else base
        part = base.as_strided(value.shape, value.stride(), value.storage_offset())
        results.append(part.detach() if i in detached else part)
    return results
