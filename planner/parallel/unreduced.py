"""Whole gradients, which ``fully_shard`` keeps between micro-batches with ``no_sync``.

Each micro-batch but the first finds them and adds to them. The last one reduces and frees them unit by unit;
the others free none. One plan serves all micro-batches: whole gradients count as there throughout. The last
one holds less than that after its first unit, mostly; where it holds more, the excess is a tensor of its own.
"""

from collections.abc import Sequence

import torch

from planner._torch.distributed import autograd_sums_micro_batches, local_tensor
from planner.parallel.strategies import FSDP2


def reduced_in(
    original: torch.dtype, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> torch.dtype:
    """The type that the gradient of a parameter is added up and reduced in.

    Args:
        original: The type of the parameter, before ``fully_shard`` casts it for computing.
        param_dtype, reduce_dtype: Those of ``MixedPrecisionPolicy``.
    """
    if reduce_dtype is not None:
        return reduce_dtype
    computed = param_dtype if original.is_floating_point and not autograd_sums_micro_batches() else None
    return computed or original


def unreduced_bytes(parameter: torch.Tensor, options: FSDP2) -> int:
    """Bytes of the whole gradient of a parameter; of a DTensor, that of its local part."""
    dtype = reduced_in(parameter.dtype, options.param_dtype, options.reduce_dtype)
    return local_tensor(parameter).numel() * dtype.itemsize


class Excess:
    """The bytes that the last micro-batch's backward holds beyond whole gradients, as one tensor.

    The tensor is made anew whenever the size changes; there is none while the backward holds less.
    """

    def __init__(self) -> None:
        self._bytes = self._input = 0
        self._held: torch.Tensor | None = None

    def let_go(self) -> None:
        """End the backward: the shards of gradients are left, and the optimizer's step counts them."""
        self.__init__()  # type: ignore[misc]

    def of_reduction(
        self,
        gradients: Sequence[int],
        held: int,
        shard: int,
        dtype: torch.dtype,
        original: torch.dtype,
        *,
        ranks: int,
        copies: bool,
        kept: bool,
        all_reduced: bool,
        device: torch.device,
    ) -> None:
        """Count ``foreach_reduce`` of a unit.

        Args:
            gradients: Bytes of each of its whole gradients.
            held: Bytes of those that it holds until it has reduced.
            shard: Elements of one rank's part of them, with padding.
            dtype, original: The type of the reduction, and that of the parameters.
            ranks: How many ranks reduce.
            copies: Whether communication copies its input.
            kept: Whether the result is kept, and not added to gradients that are there.
            all_reduced: Whether the reduced gradients are kept until the end of the backward.
            device: The device of the gradients.
        """
        output = shard * dtype.itemsize
        self._change(-self._input, device)  # the input of the previous unit's reduction
        self._input = output * ranks
        self._change(self._input, device)
        self._change(output + held - sum(gradients), device)
        if copies and ranks > 1:
            self._change(self._input, device)
            self._change(-self._input, device)
        if dtype != original:
            self._change(shard * original.itemsize, device)
            self._change(0 if all_reduced else -output, device)
            left = shard * original.itemsize
        else:
            left = 0 if all_reduced and not kept else output
        self._change(-held - (0 if kept else left), device)

    def _change(self, by: int, device: torch.device) -> None:
        before, self._bytes = max(self._bytes, 0), self._bytes + by
        if max(self._bytes, 0) != before:
            self._held = None
            self._held = torch.empty(max(self._bytes, 0), dtype=torch.uint8, device=device)
