"""Masks and signs kept as bits, as part of the problem.

A plan has three ways for a boolean value that the backward needs: keep it as it is, keep it as bits, eight to
a byte, or make it again. Where the result of an operation is packed, a row right after its first run packs
it, and its re-run unpacks the bits; the bits exist only in schedules that unpack them. Solvers see what they
always see: values to keep, and rows that make them again.

The backward of ReLU reads ReLU's result for the signs of its elements. Where these are packed, it reads the
bits, and nothing unpacks them. While it is open where they are packed, the backward reads a value of its own,
which unpacking makes again, since ReLU's result has other readers.

After Gist (Jain et al., ISCA 2018), which encodes kept values and recomputes nothing.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from planner._torch import fake
from planner._torch.execution.mask_operators import PACK_BITS, UNPACK_BITS
from planner._torch.execution.sign_operators import PACK_SIGNS
from planner.capture.captured_step import CapturedStep
from planner.costs.devices import Device, round_bytes
from planner.costs.roofline import Costs
from planner.costs.workspace import NOT_RUN, WorkspaceMeter
from planner.graph.joint_graph import JointGraph, JointOp
from planner.graph.replay.packed import bits_of, is_packable
from planner.graph.signs import relu_before, sign_calls, signs_of
from planner.heap import collector_off
from planner.problem.build import Problem
from planner.problem.rows import Source
from planner.training_step.call import Call
from solvers.model.arrays import Schedule
from solvers.model.graph import Graph, Op, Phase, Value
from solvers.model.indices import BaseOp, RowId, ValueId, base_op, listed, numbered


@dataclass(frozen=True)
class Packing:
    """An operation of the forward whose mask, or the signs of whose result, can be kept as bits.

    Attributes:
        row: Its base row in the problem without packing.
        value: The mask, or the result.
        bytes: Size of the bits.
        pack_seconds, pack_workspace_bytes: Costs of packing.
        unpack_seconds, unpack_workspace_bytes: Costs of unpacking; for signs, of the backward.
        reader: For signs, the base row of that backward; None for a mask.
        written: The base row that writes the mask last, if it is another one than ``row``.
        host_bytes: Bytes of the host's memory that it takes, see :mod:`planner.problem.offload`.
        send_seconds, fetch_seconds: The time that a link takes to send and to fetch it.
        completed: The base row after which it must be on the host, if that is not the row that writes it.
        handed: Whether the row makes nothing: it is an input of the row's graph, ``value`` is what another
            graph made, and only this one reads it in the backward.
    """

    row: BaseOp
    value: ValueId
    bytes: int
    pack_seconds: float
    pack_workspace_bytes: int
    unpack_seconds: float
    unpack_workspace_bytes: int
    reader: BaseOp | None = None
    written: BaseOp | None = None
    host_bytes: int = 0
    send_seconds: float = 0.0
    fetch_seconds: float = 0.0
    completed: BaseOp | None = None
    handed: bool = False


@collector_off()
def find_packings(
    captured: CapturedStep, problem: Problem, device: Device, meter: WorkspaceMeter | None, costs: Costs
) -> tuple[Packing, ...]:
    """The masks and signs of a problem that can be kept as bits; on the CPU only.

    Args:
        captured: The step.
        problem: Its problem.
        device, meter, costs: As for :func:`planner.problem.build.build_problem`.
    """
    if device.kind != "cpu":
        return ()
    found = [*_masks(captured, problem), *_signs(captured, problem)]
    calls = [call for each in found for call in (each.pack, each.unpack)]
    results = [result for each in found for result in (each.bits, each.result)]
    memories = meter.measure(calls) if meter is not None else [NOT_RUN] * len(calls)
    seconds = [costs.seconds(c.func, c.args, c.kwargs, out) for c, out in zip(calls, results, strict=True)]
    return tuple(
        Packing(
            each.row,
            each.value,
            round_bytes(device, fake.storage_bytes(each.bits)),
            seconds[2 * i],
            memories[2 * i].workspace_bytes,
            seconds[2 * i + 1],
            memories[2 * i + 1].workspace_bytes,
            each.reader,
        )
        for i, each in enumerate(found)
    )


class _Found(NamedTuple):
    """A value that can be packed, and the calls for it; ``result`` is the result of unpacking."""

    row: BaseOp
    value: ValueId
    reader: BaseOp | None
    pack: Call
    bits: torch.Tensor
    unpack: Call
    result: torch.Tensor


def _masks(captured: CapturedStep, problem: Problem) -> Iterator[_Found]:
    graph = problem.graph
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
        bits = bits_of(mask)
        unpack = Call(UNPACK_BITS, (bits, list(mask.shape)), {})
        yield _Found(base, results[0], None, Call(PACK_BITS, (mask,), {}), bits, unpack, mask)


def _signs(captured: CapturedStep, problem: Problem) -> Iterator[_Found]:
    masked = [_masked_by_signs(graph.joint) for graph in captured.graphs]
    if not any(masked):
        return
    row_of = {(s.graph, s.instance, s.op): base for base, s in numbered(BaseOp, problem.sources)}
    for reader, source in numbered(BaseOp, problem.sources):
        if source.graph < 0 or source.op not in masked[source.graph]:
            continue
        relu, backward = masked[source.graph][source.op]
        row = row_of[source.graph, source.instance, relu.index]
        made = problem.graph.ops[row].outputs or problem.graph.ops[row].writes
        if made[0] not in problem.graph.ops[reader].inputs:
            continue
        pack, unpack = sign_calls(relu, backward)
        bits, gradient = signs_of(relu), backward.node.meta["val"]
        yield _Found(row, made[0], reader, pack, bits, unpack, gradient)


def _masked_by_signs(joint: JointGraph | None) -> dict[int, tuple[JointOp, JointOp]]:
    """The backwards of ReLUs in a graph that can read bits, by index: each ReLU with its backward."""
    if joint is None:
        return {}
    pairs = [(relu_before(joint, op), op) for op in joint.ops]
    return {op.index: (relu, op) for relu, op in pairs if relu is not None}


@dataclass(frozen=True)
class PackedProblem:
    """A problem in which some masks and signs are packed.

    Attributes:
        problem: The problem.
        packings: The packed masks and signs.
        forms: For each row its form ("run", "pack", "carry" or "unpack"), and the row of the problem without
            packing that it belongs to.
    """

    problem: Problem
    packings: tuple[Packing, ...]
    forms: list[tuple[str, RowId]]

    @cached_property
    def row_of(self) -> dict[tuple[str, RowId], RowId]:
        """The row of each form."""
        return {form: row for row, form in numbered(RowId, self.forms)}

    def unpacked_in(self, schedule: Schedule) -> tuple[Packing, ...]:
        """The masks, and the signs, whose bits a schedule unpacks.

        Of what is handed on only what is fetched before it is read: else it stays, and is nobody's copy.
        """
        rows = listed(RowId, schedule)
        run = set(rows)
        used = (p for p in self.packings if self.row_of["unpack", p.row] in run)
        return tuple(p for p in used if not p.handed or self._is_fetched_first(p, rows))

    def _is_fetched_first(self, packing: Packing, rows: Sequence[RowId]) -> bool:
        row = self.row_of["unpack", packing.row]
        ops = self.problem.graph.ops
        (value,) = ops[row].outputs
        return not any(value in ops[r].inputs for r in rows[: rows.index(row)])

    def follow(self, other: "PackedProblem", schedule: Schedule) -> Schedule:
        """A schedule of another problem as one of this problem, which packs what the other's unpacks."""
        rows = (self.row_of.get(other.forms[row]) for row in schedule.tolist())
        return np.array([row for row in rows if row is not None], dtype=np.int64)


def packed(problem: Problem, packings: Iterable[Packing], *, if_unpacked: bool = False) -> PackedProblem:
    """The problem in which some masks and signs are packed.

    Args:
        problem: The problem without packing.
        packings: The masks and signs.
        if_unpacked: Whether it is still open which of them a schedule packs. Then each unpacking counts the
            time of packing as well, and packing counts none.
    """
    chosen: dict[RowId, Packing] = {packing.row: packing for packing in packings}
    masks = {row for row, packing in chosen.items() if packing.reader is None}
    readers = {p.reader: p for p in chosen.values() if p.reader is not None}
    graph = problem.graph
    forms: list[tuple[str, RowId]] = []
    packed_after: dict[RowId, list[RowId]] = {}
    for row, p in chosen.items():
        after = next(r for r in (p.completed, p.written, row) if r is not None)
        packed_after.setdefault(after, []).append(row)
    for base in graph.base_ops:
        forms.append(("run", base))
        for row in packed_after.get(base, ()):
            forms += [("carry", row)] if if_unpacked and row not in masks else []
            forms.append(("pack", row))
    base_length = len(forms)
    replaced = {graph.ops[row].replay for row in masks}
    forms += [("run", row) for row in graph.row_ids[graph.base_length :] if row not in replaced]
    forms += [("unpack", row) for row in chosen if if_unpacked or row in masks]
    row_of = {form: row for row, form in numbered(RowId, forms)}
    values = [
        v if v.held_until is None else v._replace(held_until=base_op(row_of["run", v.held_until]))
        for v in graph.values
    ]
    bits: dict[RowId, ValueId] = {}
    unpacked: dict[RowId, ValueId] = {}
    for row, packing in chosen.items():
        name = values[packing.value].name
        bits[row] = ValueId(len(values))
        values.append(Value(packing.bytes, f"{name} as bits", on_demand=True))
        unpacked[row] = packing.value
        if packing.handed:
            unpacked[row] = ValueId(len(values))
            values.append(Value(values[packing.value].bytes, f"{name}, handed on", on_demand=True))
        if if_unpacked and row not in masks:
            unpacked[row] = ValueId(len(values))
            values.append(Value(values[packing.value].bytes, f"{name} by its signs", on_demand=True))
    handed = {(graph.ops[p.row].region, p.value): unpacked[p.row] for p in chosen.values() if p.handed}
    ops: list[Op] = []
    for form, row in forms:
        op = graph.ops[row]
        if form == "run":
            again = None if op.replay is None else row_of.get(("run", op.replay))
            replay = row_of.get(("unpack", row), again) if row in masks else again
            op = replace(op, replay=replay, recomputable=op.recomputable or row in masks)
            if row in chosen and chosen[base_op(row)].handed:
                op = replace(op, outputs=(unpacked[base_op(row)],))
            elif handed and row >= graph.forward_length:
                op = replace(op, inputs=tuple(handed.get((op.region, v), v) for v in op.inputs))
            reads = readers.get(base_op(row)) if row < graph.base_length else None
            ops.append(op if reads is None else _reading(op, reads, bits, unpacked, if_unpacked))
            continue
        packing = chosen[row]
        pack_seconds = 0.0 if if_unpacked else packing.pack_seconds
        first = Op(
            (packing.value,),
            (bits[row],),
            seconds=pack_seconds,
            workspace_bytes=packing.pack_workspace_bytes,
            phase=Phase.FORWARD,
            recomputable=False,
            region=op.region,
            name=f"{PACK_BITS if row in masks else PACK_SIGNS} of {op.name}",
            module=op.module,
        )
        if form == "pack":
            ops.append(first)
        elif form == "carry":
            outputs, replay = (unpacked[row],), row_of["unpack", row]
            ops.append(
                replace(
                    first, outputs=outputs, seconds=0.0, workspace_bytes=0, recomputable=True, replay=replay
                )
            )
        else:
            seconds, workspace = packing.unpack_seconds, packing.unpack_workspace_bytes
            if packing.reader is not None:  # the reader unpacks the bits itself, in its own time
                seconds, workspace = max(0.0, seconds - graph.ops[packing.reader].seconds), 0
            ops.append(
                replace(
                    op,
                    inputs=(bits[row],),
                    outputs=(unpacked[row],),
                    writes=(),
                    seconds=seconds + packing.pack_seconds - pack_seconds,
                    workspace_bytes=workspace,
                    replay=None,
                )
            )
    sources = [problem.sources[row] if form == "run" else Source() for form, row in forms[:base_length]]
    made = replace(
        problem,
        graph=Graph(tuple(ops), tuple(values), base_length),
        sources=sources,
        packed=frozenset(problem.sources[p.row if p.reader is None else p.reader] for p in chosen.values()),
        host_bytes=sum(p.host_bytes for p in chosen.values()),
        completed={
            problem.sources[p.row]: problem.sources[p.completed]
            for p in chosen.values()
            if p.completed is not None
        },
    )
    return PackedProblem(made, tuple(chosen.values()), forms)


def _reading(
    op: Op, packing: Packing, bits: dict[RowId, ValueId], unpacked: dict[RowId, ValueId], if_unpacked: bool
) -> Op:
    """The backward of a ReLU, reading bits or, while that is open, the value in place of ReLU's result."""
    read = unpacked[packing.row] if if_unpacked else bits[packing.row]
    inputs = tuple(read if v == packing.value else v for v in op.inputs)
    if if_unpacked:
        return replace(op, inputs=inputs)
    workspace = packing.unpack_workspace_bytes
    return replace(op, inputs=inputs, seconds=packing.unpack_seconds, workspace_bytes=workspace)


Name = tuple[int, int, int]
"""The name of an operation: its graph, the execution of that, and its index there."""


def packed_as(
    problem: Problem,
    packings: Iterable[Packing],
    operations: Collection[Name],
    completed: Mapping[Name, Name] = MappingProxyType({}),
) -> PackedProblem | None:
    """The problem that packs the results of some operations; None where it packs none.

    Args:
        problem, packings: As for :func:`packed`.
        operations: Those operations.
        completed: For operations whose results are sent, the later ones after which they are on the host.
    """

    def name(row: RowId) -> Name:
        source = problem.sources[row]
        return source.graph, source.instance, source.op

    wanted = [p for p in packings if name(p.row if p.reader is None else p.reader) in operations]
    row_of = {name(row): row for row in problem.graph.base_ops}
    later = [replace(p, completed=row_of.get(completed.get(name(p.row), (-1, -1, -1)))) for p in wanted]
    return packed(problem, later) if wanted else None
