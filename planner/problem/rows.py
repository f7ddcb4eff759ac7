"""Rows of the problem in the making, and where they come from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.fx import Node
from torch.fx.node import map_arg

from planner.graph.joint_graph import JointOp
from planner.graph.replay_rule import ReplayState
from planner.training_step.call import Call
from solvers.model.graph import Op, Value
from solvers.model.indices import BaseOp, ValueId


class Source(NamedTuple):
    """Where a base row of the problem comes from: operation ``op`` of captured graph ``graph``, -1 for glue;
    ``instance`` counts the executions of one graph within the step."""

    graph: int = -1
    instance: int = 0
    op: int = -1


@dataclass
class Row:
    """A base row in the making; ``again`` is its replay form."""

    source: Source
    op: Op
    call: Call | None
    output: Any
    allocates: tuple[ValueId, ...]
    again: "Again | None" = None


@dataclass
class Again:
    """The replay form of a row, its second run.

    Attributes:
        inputs, outputs: The values that it reads and makes.
        call: The call that it makes; None where the same operation runs.
        extra_bytes: Bytes that it holds besides while it runs.
        writers: The rows that write over its result, which run with it.
    """

    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    call: Call | None = None
    extra_bytes: int = 0
    writers: tuple[BaseOp, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Facts that all executions of an operation of a graph share.

    Attributes:
        recomputable: Whether it can be run a second time.
        name: Its name, for people.
        value_name: The name of its results.
        read_again: The nodes that a second run reads.
        state: The state that a second run starts from, as a generator's; None where it depends on none.
        call_again: The call of a second run; None where the same operation runs.
    """

    recomputable: bool
    name: str
    value_name: str
    read_again: Sequence[Node] = ()
    state: ReplayState | None = None
    call_again: Call | None = None

    @classmethod
    def of(cls, op: JointOp) -> "Facts":
        facts = cls(op.recomputable, f"{op.name} #{op.index}", f"{op.node.name} @ {op.module}")
        if not facts.recomputable:
            return facts
        call = op.rule.call_again(op.node)
        again = None if call is None else Call(call.target, map_arg(call.args, example))
        return replace(facts, read_again=op.read_again, state=op.rule.state(op.node), call_again=again)

    @property
    def is_run_as_before(self) -> bool:
        """Whether a second run is the same call, from no state; it may read copies of inputs."""
        return self.state is None and self.call_again is None


def example(node: Node) -> Any:
    """The result of a node without data."""
    return node.meta.get("val")


def set_costs(op: Op, seconds: float, workspace_bytes: int) -> None:
    """Give an operation in the making its costs.

    It is changed, not replaced, as nobody else has it yet: problems have tens of thousands of operations, and
    replacing them takes as long as all the rest.
    """
    op.seconds, op.workspace_bytes = seconds, workspace_bytes


def of_size(value: Value, size: int) -> Value:
    return value if value.bytes == size else value._replace(bytes=size)
