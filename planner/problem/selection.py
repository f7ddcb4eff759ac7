"""The user's ``keep=``, ``recompute=`` and ``checkpoints=``: names or patterns of modules and operators."""

import difflib
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

import numpy as np

from planner._torch.operators import COLLECTIVES
from planner.errors import PlannerError
from planner.problem.blocks import names_of, told_to_recompute
from solvers.model.arrays import ValueMask
from solvers.model.constraints import Constraints
from solvers.model.graph import Graph, Op
from solvers.model.indices import BaseOp, ValueId

_DROPOUT = "aten.native_dropout.default"
_OF_DROPOUT = frozenset({"planner.draw_mask.default", "planner.masked_product.default"})
"""The two operators that dropout is split into on the CPU; users select them by ``_DROPOUT``."""


class SelectionError(PlannerError, ValueError):
    """A name or pattern matches nothing in the captured forward, or contradicts another."""


def select(
    graph: Graph,
    *,
    keep: Sequence[str] = (),
    recompute: Sequence[str] = (),
    checkpoints: Sequence[str] = (),
    modules: Collection[str] = (),
    also_kept: Sequence[ValueId] = (),
) -> Constraints:
    """Constraints on the values of a graph.

    Args:
        graph: The problem; its forward operations carry operator names and module paths.
        keep: The results of matching operations are always kept. So are results of collectives, in which
            ranks take part together, unless ``recompute`` or a block selects them or they are overwritten.
        recompute: The results of matching operations are always recomputed. So are values inside of blocks
            that ``@planner.recompute`` decorates, and values that the step overwrites.
        checkpoints: The last result of every matching module is always kept. If nested modules match, as
            "layers.*" matches layers.0 and layers.0.linear, the outermost counts.
        modules: The names of all of the model's modules, for messages.
        also_kept: Values that are kept beside.

    Raises:
        SelectionError: A pattern matches nothing, or a value is to be kept and recomputed, or kept and
            overwritten.
    """
    kept = [v for op in _matching(graph, keep, "keep", modules) for v in _results(graph.ops[op])]
    kept += also_kept
    for pattern in [checkpoints] if isinstance(checkpoints, str) else checkpoints:
        matching = _matching(graph, [pattern], "checkpoints", modules)
        last = {_matched(graph.ops[i], pattern): i for i in sorted(matching)}
        kept += [v for op in last.values() for v in _results(graph.ops[op])]
    again = [v for op in _matching(graph, recompute, "recompute", modules) for v in _results(graph.ops[op])]
    again += told_to_recompute(graph)
    again += _overwritten(graph, kept)
    kept += sorted(set(_of_collectives(graph)).difference(again))
    if both := sorted(set(kept).intersection(again)):
        op = graph.ops[graph.producer[both[0]]]
        raise SelectionError(
            f"the result of {_operator(op)} in {op.module or 'the model'} is to be kept, by keep= or "
            "checkpoints=, and recomputed, by recompute= or @planner.recompute: leave it out of one of them"
        )
    return Constraints(_marked(graph, kept), _marked(graph, again))


def _matching(graph: Graph, patterns: Iterable[str], argument: str, modules: Collection[str]) -> list[BaseOp]:
    forward = graph.forward_ops
    found: list[BaseOp] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = [i for i in forward if _matches(graph.ops[i], pattern)]
        if not matching:
            if (idle := next((m for m in modules if fnmatchcase(m, pattern)), None)) is not None:
                raise SelectionError(
                    f"{argument}= names {pattern!r}, and no operation of the captured forward is of {idle}: "
                    "it computes nothing that takes memory, is not called, or runs the same graph as an "
                    "earlier layer, whose name stands for both"
                )
            names = {graph.ops[i].module for i in forward} | {_operator(graph.ops[i]) for i in forward}
            names |= {_DROPOUT} if names & _OF_DROPOUT else set()
            names |= {name for i in forward for name in names_of(graph.ops[i])}
            near = difflib.get_close_matches(pattern, sorted(names), n=3, cutoff=0.4)
            hint = f"; near to it are {', '.join(near)}" if near else ""
            raise SelectionError(
                f"{argument}= names {pattern!r}, but no module or operator of the forward matches{hint}"
            )
        found += matching
    return found


def _matches(op: Op, pattern: str) -> bool:
    names = [op.module, _operator(op)]
    if names[1] in _OF_DROPOUT:
        names.append(_DROPOUT)
    names += names_of(op)
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*") for name in names)


def _results(op: Op) -> tuple[ValueId, ...]:
    """The values that hold the results of an operation: its own, or another's that it writes into."""
    return op.outputs + op.writes


def _of_collectives(graph: Graph) -> list[ValueId]:
    ops = [graph.ops[i] for i in graph.forward_ops]
    return [v for op in ops if _operator(op).partition(".")[0] in COLLECTIVES for v in op.outputs]


def _overwritten(graph: Graph, kept: Collection[ValueId]) -> list[ValueId]:
    """The values that the step changes in place before the backward, which can run again."""
    changed = [v for v in graph.value_ids if graph.values[v].overwritten and graph.recompute_row[v] >= 0]
    if both := sorted(set(changed) & set(kept)):
        op = graph.ops[graph.producer[both[0]]]
        raise SelectionError(
            f"the result of {_operator(op)} in {op.module or 'the model'} is to be kept, and the step "
            "changes it in place before the backward: it can only be made again. Leave it out of keep= and "
            "checkpoints=, or change a copy (y = y + 1, not y += 1)"
        )
    return changed


def _matched(op: Op, pattern: str) -> str:
    """The outermost module around an operation that matches; the operation's own where none does."""
    parts = op.module.split(".")
    around = [".".join(parts[: n + 1]) for n in range(len(parts))]
    around += [f"{name} of {op.blocks}" for name in names_of(op) if fnmatchcase(name, pattern)]
    return next((module for module in around if fnmatchcase(module.partition(" ")[0], pattern)), op.module)


def _operator(op: Op) -> str:
    return op.name.split(" ")[0]


def _marked(graph: Graph, values: Sequence[ValueId]) -> ValueMask | None:
    if not values:
        return None
    marked = np.zeros(len(graph.values), dtype=bool)
    marked[list(values)] = True
    return marked
