"""Masks kept as bits, as part of the problem.

A boolean value that backward needs has three forms: kept as it is, kept as bits, eight to a byte, or made
again. Where the result of an operation is packed, its re-run unpacks the bits, and a row right after its
first run packs them; the bits are there only in schedules that unpack them. Solvers see what they always see:
values to keep, and rows that make them again.

After Gist (Jain et al., ISCA 2018), which encodes what is kept and recomputes nothing.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planner._torch.execution.mask_operators import PACK_BITS, UNPACK_BITS
from planner.capture.captured_step import CapturedStep
from planner.costs.devices import Device, round_bytes
from planner.costs.roofline import Costs
from planner.costs.workspace import NOT_RUN, WorkspaceMeter
from planner.graph.replay.packed import bits_of, is_packable
from planner.problem.build import Problem, Source
from planner.training_step.call import Call
from solvers.model.arrays import Schedule
from solvers.model.graph import Graph, Op, Phase, Value
from solvers.model.indices import BaseOp, RowId, ValueId, base_op, listed, numbered


@dataclass(frozen=True)
class Packing:
    """An operation of the forward whose mask can be kept as bits.

    Attributes:
        row: Its base row in the problem without packing.
        value: The mask.
        bytes: Size of the bits.
        pack_seconds, pack_workspace_bytes: Of packing.
        unpack_seconds, unpack_workspace_bytes: Of unpacking.
    """

    row: BaseOp
    value: ValueId
    bytes: int
    pack_seconds: float
    pack_workspace_bytes: int
    unpack_seconds: float
    unpack_workspace_bytes: int


def find_packings(
    captured: CapturedStep, problem: Problem, device: Device, meter: WorkspaceMeter | None, costs: Costs
) -> tuple[Packing, ...]:
    """The masks of a problem that can be kept as bits; on the CPU only.

    Args:
        captured: The step.
        problem: Its problem.
        device, meter, costs: As for :func:`planner.problem.build.build_problem`.
    """
    if device.kind != "cpu":
        return ()
    graph = problem.graph
    found: list[tuple[BaseOp, ValueId]] = []
    calls: list[Call] = []
    again = np.unique(graph.recompute_row[graph.recompute_row >= 0])
    for base in listed(BaseOp, graph.base_of[again]):
        source, op = problem.sources[base], graph.ops[base]
        joint = captured.graphs[source.graph].joint if source.graph >= 0 else None
        results = [v for v in op.outputs if not graph.values[v].on_demand]
        if joint is None or len(results) != 1:
            continue
        made = joint.ops[source.op]
        if made.writers or not is_packable(made.node):
            continue
        mask = made.node.meta["val"]
        found.append((base, results[0]))
        calls += [Call(PACK_BITS, (mask,), {}), Call(UNPACK_BITS, (bits_of(mask), list(mask.shape)), {})]
    memories = meter.measure(calls) if meter is not None else [NOT_RUN] * len(calls)
    results_of = [out for c in calls[::2] for out in (bits_of(c.args[0]), c.args[0])]
    seconds = [costs.seconds(c.func, c.args, c.kwargs, out) for c, out in zip(calls, results_of, strict=True)]
    return tuple(
        Packing(
            row,
            value,
            round_bytes(device, (graph.values[value].bytes + 7) // 8),
            seconds[2 * i],
            memories[2 * i].workspace_bytes,
            seconds[2 * i + 1],
            memories[2 * i + 1].workspace_bytes,
        )
        for i, (row, value) in enumerate(found)
    )


@dataclass(frozen=True)
class PackedProblem:
    """A problem in which some masks are packed.

    Attributes:
        problem: The problem.
        packings: The masks that are.
        forms: For each row what it is: a form, and the row without packing that it is a form of.
    """

    problem: Problem
    packings: tuple[Packing, ...]
    forms: list[tuple[str, RowId]]

    @cached_property
    def row_of(self) -> dict[tuple[str, RowId], RowId]:
        """The row of each form."""
        return {form: row for row, form in numbered(RowId, self.forms)}

    def unpacked_in(self, schedule: Schedule) -> tuple[Packing, ...]:
        """The masks whose bits a schedule unpacks."""
        run = set(schedule.tolist())
        return tuple(p for p in self.packings if self.row_of["unpack", p.row] in run)

    def follow(self, other: "PackedProblem", schedule: Schedule) -> Schedule:
        """The same schedule as one of this problem, which packs what a schedule of the other unpacks."""
        rows = (self.row_of.get(other.forms[row]) for row in schedule.tolist())
        return np.array([row for row in rows if row is not None], dtype=np.int64)


def packed(problem: Problem, packings: Iterable[Packing], *, if_unpacked: bool = False) -> PackedProblem:
    """The problem in which some masks are packed.

    Args:
        problem: The problem without packing.
        packings: The masks.
        if_unpacked: Each unpacking counts the time of packing as well, and packing counts none: what
            schedules take of which it is not decided yet what they pack.
    """
    chosen: dict[RowId, Packing] = {packing.row: packing for packing in packings}
    graph = problem.graph
    forms: list[tuple[str, RowId]] = [
        form
        for row in graph.base_ops
        for form in ([("run", row), ("pack", row)] if row in chosen else [("run", row)])
    ]
    base_length = len(forms)
    replaced = {graph.ops[row].replay for row in chosen}
    forms += [("run", row) for row in graph.row_ids[graph.base_length :] if row not in replaced]
    forms += [("unpack", row) for row in chosen]
    row_of = {form: row for row, form in numbered(RowId, forms)}
    values = [
        v if v.held_until is None else replace(v, held_until=base_op(row_of["run", v.held_until]))
        for v in graph.values
    ]
    bits: dict[RowId, ValueId] = {}
    for packing in chosen.values():
        bits[packing.row] = ValueId(len(values))
        values.append(Value(packing.bytes, f"{values[packing.value].name} as bits", on_demand=True))
    ops: list[Op] = []
    for form, row in forms:
        op = graph.ops[row]
        if form == "run":
            again = None if op.replay is None else row_of.get(("run", op.replay))
            replay = row_of.get(("unpack", row), again)
            ops.append(replace(op, replay=replay))
            continue
        packing = chosen[row]
        pack_seconds = 0.0 if if_unpacked else packing.pack_seconds
        if form == "pack":
            ops.append(
                Op(
                    (packing.value,),
                    (bits[row],),
                    seconds=pack_seconds,
                    workspace_bytes=packing.pack_workspace_bytes,
                    phase=Phase.FORWARD,
                    recomputable=False,
                    region=op.region,
                    name=f"{PACK_BITS} of {op.name}",
                    module=op.module,
                )
            )
        else:
            ops.append(
                replace(
                    op,
                    inputs=(bits[row],),
                    outputs=(packing.value,),
                    seconds=packing.unpack_seconds + packing.pack_seconds - pack_seconds,
                    workspace_bytes=packing.unpack_workspace_bytes,
                    replay=None,
                )
            )
    sources = [problem.sources[row] if form == "run" else Source() for form, row in forms[:base_length]]
    made = replace(
        problem,
        graph=Graph(tuple(ops), tuple(values), base_length),
        sources=sources,
        packed=frozenset(problem.sources[row] for row in chosen),
    )
    return PackedProblem(made, tuple(chosen.values()), forms)


def packed_as(
    problem: Problem, packings: Iterable[Packing], operations: Collection[tuple[int, int, int]]
) -> Problem:
    """The problem that packs the masks of some operations, named by graph, execution and index there."""
    sources = ((p, problem.sources[p.row]) for p in packings)
    wanted = [p for p, source in sources if (source.graph, source.instance, source.op) in operations]
    return packed(problem, wanted).problem if wanted else problem
