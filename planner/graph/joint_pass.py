"""The interface of joint passes, which correct a traced joint graph, and the context that they are given.

A joint graph does not always compute what eager computes, bit for bit. Each difference is
corrected by one pass, in a file of its own in `planner/graph/passes/`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch.fx import GraphModule


class AutocastContext(NamedTuple):
    """The region of autocast that a forward is called in.

    Attributes:
        inside: Whether that is inside of ``with torch.autocast``, even one that is switched off: casts are
            kept until the outermost of these ends.
        keeps: Whether autocast keeps casts (``cache_enabled``).
    """

    inside: bool
    keeps: bool

    @classmethod
    def here(cls) -> Self:
        """The region of the code that calls this."""
        torch.autocast_increment_nesting()
        return cls(torch.autocast_decrement_nesting() > 0, torch.is_autocast_cache_enabled())


@dataclass
class TraceContext:
    """The facts that passes are given of the traced graph, and the results that they add.

    Attributes:
        forward: The forward as Dynamo made it.
        inputs: Its example inputs.
        autocast: The region of autocast that the whole forward is called in.
        cuda: Whether it will run on CUDA, though its tensors without data are on the CPU.
        uses: By position, for each input whose gradients are to be handed out unsummed: how many gradients
            the engine adds up for it, where these are more than one.
        unsummed: Result: the positions of these inputs for which that was possible.
        cached_casts: Result: by position, inputs whose casts autocast keeps beyond the graph, and the dtype
            of these casts.
    """

    forward: GraphModule
    inputs: Sequence[Any]
    autocast: AutocastContext
    cuda: bool = False
    uses: Mapping[int, int] = field(default_factory=dict)
    unsummed: set[int] = field(default_factory=set)
    cached_casts: dict[int, torch.dtype] = field(default_factory=dict)


class JointPass(Protocol):
    """Changes a joint graph in place, so that it computes what eager computes."""

    def __call__(self, joint: GraphModule, context: TraceContext) -> None:
        """Correct one graph.

        Args:
            joint: The joint graph as AOTAutograd traced it and earlier passes left it.
            context: Facts about it; results are added to it.
        """
