"""How one graph is to be traced: what a plan found out about the step around it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Literal, NamedTuple, Self

from planner._torch.joint.memory_layout import MemoryLayout
from planner.planfile.graph_record import GraphRecord, SplitRecord

SplitForm = Literal["forward", "backward"]
"""Where the gradients of pieces are computed, see :mod:`planner.graph.split.pieces`."""


SplitRuns = Literal["loss", "auto"]
"""Which runs are split: those that end in the loss, or those of MLPs too."""


class Split(NamedTuple):
    """How row-wise runs are computed in pieces.

    Attributes:
        form: Where the gradients of those that end in the loss are computed.
        pieces: How many pieces, at most.
        what: Which runs.
    """

    form: SplitForm
    pieces: int
    what: SplitRuns = "loss"

    @classmethod
    def of(cls, record: SplitRecord) -> Self:
        """What a plan stored."""
        return cls(record.form, record.pieces, record.what)


@dataclass(frozen=True)
class GraphSpec:
    """What tracing must know of a graph besides the graph itself.

    Planning finds it out, the plan file keeps it, training follows it, and the ranks of a job compare it.

    Attributes:
        unused_outputs: Positions of the outputs that no gradient reaches: they are cut off from
            differentiation.
        per_use_inputs: Positions of the inputs whose gradients are returned unsummed, one for each use.
        tangent_layouts: Of outputs whose gradients have other strides than they do, by position: how the
            gradients lie in memory.
        split: How what can be computed in pieces of rows is split; None where it is not.
        handed_inputs: Positions of the inputs that may be kept on the host: they are read as operations.
    """

    unused_outputs: tuple[int, ...] = ()
    per_use_inputs: frozenset[int] = frozenset()
    tangent_layouts: Mapping[int, MemoryLayout] = field(default_factory=dict)
    split: Split | None = None
    handed_inputs: frozenset[int] = frozenset()

    @classmethod
    def of(cls, record: GraphRecord) -> Self:
        """The specification that a plan stored for a graph."""
        return cls(
            tuple(record.unused_outputs),
            frozenset(record.per_use_inputs),
            {
                layout.output: MemoryLayout(tuple(layout.dimensions), tuple(layout.inside), layout.step)
                for layout in record.gradient_layouts
            },
            None if record.split is None else Split.of(record.split),
            frozenset(record.handed_inputs),
        )

    @classmethod
    def per_use(cls, inputs: int) -> Self:
        """How a graph of so many inputs is traced that the plan has not seen.

        It may share any of them with other graphs: each use has a gradient of its own, and the engine adds
        them up in the order of the step without a plan.
        """
        return cls(per_use_inputs=frozenset(range(inputs)))

    @property
    def digest(self) -> str:
        """Equal for specifications by which graphs are traced alike."""
        layouts = [(i, astuple(layout)) for i, layout in sorted(self.tangent_layouts.items())]
        inputs = sorted(self.per_use_inputs), sorted(self.handed_inputs)
        content = [sorted(self.unused_outputs), *inputs, layouts, self.split]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()
