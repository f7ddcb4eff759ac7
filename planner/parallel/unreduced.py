"""Whole gradients that ``fully_shard`` keeps between micro-batches, until the last one's backward.

They are there when a micro-batch begins, but for the first, and are added to. The last one reduces and
frees them unit by unit; what that allocates is, after the first unit, mostly less than what it has freed.
Of the others none is freed. A plan is for all of them: whole gradients count as there throughout, and what
the last one holds beyond them, where it does, is one tensor of its own.
"""

from collections.abc import Sequence

import torch

from planner._torch.distributed import autograd_adds_up, local_tensor
from planner.parallel.strategies import FSDP2


def reduced_in(
    original: torch.dtype, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> torch.dtype:
    """What the gradient of a parameter is added up and reduced in.

    Args:
        original: What the parameter is, before it is cast to be computed with.
        param_dtype, reduce_dtype: Of ``MixedPrecisionPolicy``.
    """
    if reduce_dtype is not None:
        return reduce_dtype
    computed = param_dtype if original.is_floating_point and not autograd_adds_up() else None
    return computed or original


def unreduced_bytes(parameter: torch.Tensor, options: FSDP2) -> int:
    """Bytes of the whole gradient of a parameter, of what is here of one that is distributed."""
    dtype = reduced_in(parameter.dtype, options.param_dtype, options.reduce_dtype)
    return local_tensor(parameter).numel() * dtype.itemsize


class Excess:
    """What the last micro-batch's backward holds beyond whole gradients, as one tensor that is made anew
    where it is another size; none where it holds less."""

    def __init__(self) -> None:
        self._bytes = self._input = 0
        self._held: torch.Tensor | None = None

    def let_go(self) -> None:
        """The backward has ended: the shards of gradients are what is left, and the optimizer's step counts
        them."""
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
        """``foreach_reduce`` of a unit.

        Args:
            gradients: Bytes of its whole gradients.
            held: Those that it holds until it has reduced.
            shard: Elements of one rank's part of them, with padding.
            dtype, original: What is reduced in, and what the parameters are.
            ranks: How many reduce.
            copies: Whether communication copies what it reads.
            kept: Whether the result is kept, and not added to gradients that are there.
            all_reduced: Whether what is reduced is kept until the end of the backward.
            device: Where it is.
        """
        output = shard * dtype.itemsize
        self._change(-self._input, device)  # of the unit before
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
