"""The user's blocks of code in a problem, and their wishes for the plan: see ``planner/blocks``."""

from solvers.model.graph import Graph, Op
from solvers.model.indices import BaseOp, ValueId, numbered

_RECOMPUTED, _SWITCHED_OFF = "recompute", "off"


def told_to_recompute(graph: Graph) -> list[ValueId]:
    """The values inside of blocks that the user wants recomputed.

    A value that anything outside of its block reads is not among them. Of nested blocks the outermost counts.
    """
    owner = [_outermost(op) for op in graph.ops[: graph.forward_length]]
    values = []
    for i, op in numbered(BaseOp, graph.ops[: graph.forward_length]):
        if owner[i] is None:
            continue
        for value in op.outputs:
            # The block does not compute a generator's state, which a replay needs.
            if graph.values[value].on_demand or graph.is_held_beyond_forward(value):
                continue
            readers = [r for r in graph.consumers[value] if r < graph.forward_length]
            if all(owner[r] == owner[i] for r in readers):
                values.append(value)
    return values


def names_of(op: Op) -> list[str]:
    """The names of an operation by the blocks that it is in, as ``layers.0.attention``."""
    parts = op.module.split(".")
    around = ["", *(".".join(parts[: n + 1]) + "." for n in range(len(parts)))] if op.module else [""]
    named = [name for _, _, name in map(_read, op.blocks) if name]
    return [f"{module}{name}" for name in named for module in around]


def _outermost(op: Op) -> tuple[int, str] | None:
    for number, kind, _ in map(_read, op.blocks):
        if kind == _SWITCHED_OFF:
            return None
        if kind == _RECOMPUTED:
            return op.region, number
    return None


def _read(mark: str) -> tuple[str, str, str]:
    number, kind, name = mark.split(" ", 2)
    return number, kind, name
