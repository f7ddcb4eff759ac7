"""One rank: the bytes that it holds throughout, and the hooks that run around its step."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from planner.module_parts import parameters_of
from planner.parallel.data_parallel import let_go_of_gradients
from planner.parallel.fully_shard import ShardedUnits, shard_elements, shard_shape
from planner.parallel.strategies import DDP, FSDP2
from planner.parallel.unreduced import unreduced_bytes
from planner.training_step.copies import StepCopy
from planner.training_step.step import unique_storages


@dataclass(frozen=True)
class Rank:
    """One of the ranks that train a model: the one with the largest shards.

    Attributes:
        options: The strategy of training.
        units: Names of the regions, each of which ``fully_shard`` shards by itself.
    """

    options: FSDP2 | DDP
    units: tuple[str, ...] = ()

    def put_into(
        self, copied: StepCopy, added_to: Sequence[bool], *, elsewhere: bool
    ) -> tuple[list[bool], ShardedUnits | None]:
        """Make a copy of the module without data do what the rank does.

        Args:
            copied: The copy.
            added_to: For each parameter, whether it has a gradient already, which is added to.
            elsewhere: Whether the step will run on a GPU that is not here.

        Returns:
            For each parameter, whether the copy's own has a gradient already; and the sharded units, if any.
        """
        if isinstance(self.options, DDP):
            let_go_of_gradients(copied.module, self.options, added_to)
            return list(added_to), None
        on_cpu = all(p.device.type == "cpu" for p in parameters_of(copied.module))
        with copied.running():
            copies = on_cpu and not elsewhere
            units = ShardedUnits(copied.module, self.units, self.options, added_to, copies=copies)
        return [units.adds_to(parameter) for parameter in parameters_of(copied.module)], units

    def parameter_bytes(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Bytes of each parameter's storage on the rank."""
        return [self._bytes(p) for p in unique_storages(parameters)]

    def gradient_bytes(self, parameters: Iterable[torch.Tensor], added_to: Sequence[bool]) -> list[int]:
        """Bytes of each gradient that is there before the step."""
        pairs = zip(parameters, added_to, strict=True)
        return [self._bytes(p) for p, added in pairs if added]

    def bucket_bytes(self, parameters: Iterable[torch.Tensor], added_to: Sequence[bool]) -> list[int]:
        """Bytes of each part of the buckets that is no gradient at the same time."""
        options = self.options
        if not isinstance(options, DDP):
            return []
        pairs = zip(parameters, added_to, strict=True)
        return [
            p.numel() * p.element_size()
            for p, added in pairs
            if p.requires_grad and not (added and options.gradient_as_bucket_view)
        ]

    def unreduced_bytes(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Bytes of each gradient that is there whole between micro-batches."""
        options = self.options
        if not (isinstance(options, FSDP2) and options.no_sync):
            return []
        return [unreduced_bytes(p, options) for p in parameters if p.requires_grad]

    def reduced_bytes(self, parameters: Iterable[torch.Tensor], added_to: Sequence[bool]) -> int:
        """Bytes of the shards that reduction leaves of whole gradients, and does not add to others."""
        options = self.options
        if not (isinstance(options, FSDP2) and options.no_sync):
            return 0
        pairs = zip(parameters, added_to, strict=True)
        return sum(self._bytes(p) for p, added in pairs if p.requires_grad and not added)

    @property
    def shape_of(self) -> Callable[[torch.Tensor], tuple[int, ...]] | None:
        """The shape of a parameter on the rank; None where it is whole."""
        options = self.options
        return (lambda p: shard_shape(p, options.world_size)) if isinstance(options, FSDP2) else None

    def _bytes(self, parameter: torch.Tensor) -> int:
        if isinstance(self.options, FSDP2):
            return shard_elements(parameter, self.options.world_size) * parameter.element_size()
        return int(parameter.untyped_storage().nbytes())


def gradients_there(parameters: Iterable[torch.Tensor], accumulate: bool | None) -> list[bool]:
    """For each parameter, whether its gradient is there when a step begins, and is added to."""
    return [
        p.requires_grad and (p.grad is not None if accumulate is None else accumulate) for p in parameters
    ]
