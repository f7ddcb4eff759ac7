"""Results that are kept in the host's memory, as part of the problem.

A result that is sent takes no byte of the device until it is fetched: it is packed into none, see
:mod:`planner.problem.encodings`. A row right after its last writer sends it; the row that would recompute it
fetches it. So a result that cannot be recomputed may be fetched too. :mod:`planner.problem.link` says when.

A graph may hand a result on to another, as the input of a block that is a region. The graph that reads it in
the backward sends it: there it is a value of its own, which that graph's backward reads.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np
import torch

from planner._torch import fake
from planner._torch.joint.aot_metadata import input_position
from planner.capture.captured_step import CapturedStep
from planner.costs.devices import Device, round_bytes
from planner.costs.roofline import Costs
from planner.costs.workspace import WorkspaceMeter
from planner.graph.joint_graph import JointGraph
from planner.graph.sent import sent_node
from planner.problem.build import Problem
from planner.problem.encodings import Packing, find_packings
from solvers.model.graph import Graph
from solvers.model.indices import BaseOp, numbered
from solvers.programs.lower_bound import Link

LEAST_BYTES = 64 << 10
"""Smaller results are not worth the two calls."""

_OTHERS = 8
"""How many times smaller other results of an operation must be: they are not made again where one is sent."""

_ALONE = 128
"""The same where the least peak is looked for."""


def find_kept_otherwise(
    captured: CapturedStep,
    problem: Problem,
    device: Device,
    meter: WorkspaceMeter | None,
    costs: Costs,
    *,
    sends: bool,
) -> tuple[Packing, ...]:
    """Find the results that can be kept as bits or, with offload, on the host.

    Args:
        captured, problem, device, meter, costs: As for :func:`planner.problem.encodings.find_packings`.
        sends: Whether results may be on the host.
    """
    packings = find_packings(captured, problem, device, meter, costs)
    return _find_sendable(captured, problem, device, packings) if sends else packings


def _find_sendable(
    captured: CapturedStep, problem: Problem, device: Device, packings: Iterable[Packing]
) -> tuple[Packing, ...]:
    """The results that the backward reads and that can be kept on the host, in the order of the forward;
    masks among ``packings`` are sent as bits."""
    graph = problem.graph
    masks = {packing.row: packing for packing in packings if packing.reader is None}
    row_of = {(s.graph, s.instance, s.op): base for base, s in numbered(BaseOp, problem.sources)}
    sendable = [{} if g.joint is None else _sendable(g.joint) for g in captured.graphs]
    found: list[Packing] = []
    differentiated = {graph.ops[row].region for row in graph.backward_ops}
    for base, source in numbered(BaseOp, problem.sources):
        if source.graph < 0 or source.op not in sendable[source.graph]:
            continue
        position, written, size = sendable[source.graph][source.op]
        op = graph.ops[base]
        handed = not op.outputs
        (value,) = op.inputs if handed else op.outputs[position : position + 1]
        regions = {graph.ops[r].region for r in graph.consumers[value] if r >= graph.forward_length}
        if handed and (op.region not in differentiated or regions - {op.region}):
            continue  # it stays for others in any case
        if not handed and op.region not in regions:
            continue
        mask, bits = masks.get(base), 0
        if mask is None:
            mask = Packing(base, value, round_bytes(device, size), 0.0, 0, 0.0, 0)
        else:  # whose bits are on the device while it is packed, and unpacked
            bits = mask.bytes
        last = row_of[source.graph, source.instance, written]
        found.append(
            replace(
                mask,
                bytes=0,
                host_bytes=mask.bytes,
                pack_workspace_bytes=mask.pack_workspace_bytes + bits,
                unpack_workspace_bytes=mask.unpack_workspace_bytes + bits,
                send_seconds=mask.bytes / device.to_host,
                fetch_seconds=mask.bytes / device.from_host,
                written=None if last == base else last,
                handed=handed,
            )
        )
    return tuple(found)


def _sendable(joint: JointGraph) -> dict[int, tuple[int, int, int]]:
    """The operations whose results can be sent: which one of them, what writes it last, and its bytes."""
    found = {}
    for op in joint.ops[: joint.forward_length]:
        node = sent_node(joint, op)
        if node is None:
            continue
        size = fake.storage_bytes(node.meta["val"])
        if op.is_input:
            found[op.index] = 0, op.index, size
            continue
        others = sum(joint.storage_bytes[storage] for storage in op.allocates) - size
        if size >= LEAST_BYTES and _OTHERS * others <= size:
            position = op.allocates.index(joint.storage_of[node])
            found[op.index] = position, joint.op_of.get(node, op.index), size
    return found


def name_handed_on(captured: CapturedStep) -> None:
    """Make operations of the inputs of graphs that may be sent: what the step makes and hands on to one graph
    only, once."""
    calls = [e.graph for e in captured.compiled.events if e.graph is not None and not e.graph.backward]
    readers = Counter(storage for call in calls for storage in call.arguments)
    handed: dict[int, set[int]] = {}
    for call in calls:
        joint = captured.graphs[call.graph].joint
        if joint is None:
            continue
        for primal, storage in zip(joint.primals, call.arguments, strict=True):
            position = input_position(primal)
            value = primal.meta.get("val")
            if storage < 0 or readers[storage] > 1 or position is None or not isinstance(value, torch.Tensor):
                continue
            if fake.storage_bytes(value) >= LEAST_BYTES:
                handed.setdefault(call.graph, set()).add(position)
    for index, positions in handed.items():
        graph = captured.graphs[index]
        before = graph.joint
        assert before is not None
        graph.joint = replace(before, handed=frozenset(positions))
        graph.joint.to_copy = before.to_copy
        graph.spec = replace(graph.spec, handed_inputs=graph.joint.handed)


def within_host_budget(packings: Iterable[Packing], budget: int | None) -> list[Packing]:
    """The packings that fit the host's memory together, taken in the order of the forward: the first ones are
    kept longest."""
    kept, total = [], 0
    for packing in packings:
        if budget is None or total + packing.host_bytes <= budget:
            kept.append(packing)
            total += packing.host_bytes
    return kept


def link_of(graph: Graph, packings: Iterable[Packing], device: Device, share: float = 1.0) -> Link:
    """The link of a device, at a share of its bytes per second, for results that can be sent."""
    sizes = [0] * len(graph.values)
    for packing in packings:
        sizes[packing.value] = packing.host_bytes
    return Link(share * device.to_host, share * device.from_host, sizes)


def alone_in_size(graph: Graph, packings: Iterable[Packing]) -> list[Packing]:
    """The packings whose operation leaves nothing else on the device that is large."""
    values = graph.values

    def others(packing: Packing) -> int:
        made = (v for v in graph.ops[packing.row].outputs if v != packing.value and not values[v].on_demand)
        return sum(values[v].bytes for v in made)

    return [p for p in packings if _ALONE * others(p) <= values[p.value].bytes]


def beside_compute(graph: Graph, packings: Collection[Packing], share: float = 1.0) -> list[Packing]:
    """The packings of most seconds to recompute for their bytes, as many as a link carries beside the step.

    Results that a graph makes after a moment have to be sent by the end of its forward. Results that its
    backward reads before a moment have to be fetched after the beginning of the backward.

    Args:
        graph: The problem in which nothing is sent.
        packings: The results that can be sent.
        share: The share of the step's time in which the link carries them.
    """
    region = graph.region[: graph.base_length]
    begin = share * np.concatenate(([0.0], np.cumsum(graph.seconds[: graph.base_length])))
    halves: dict[tuple[int, bool], slice] = {}  # the rows of each graph's forward and backward
    for row in graph.base_ops:
        half = int(region[row]), row >= graph.forward_length
        halves[half] = slice(halves[half].start if half in halves else row, row + 1)
    left = np.zeros(graph.base_length)  # seconds of the link, from each row on, or until it
    for (_, backward), rows in halves.items():
        left[rows] = begin[rows] - begin[rows.start] if backward else begin[rows.stop] - begin[1:][rows]
    chosen = set()

    def worth(packing: Packing) -> float:
        op = graph.ops[packing.row]
        return (
            graph.ops[graph.rerun(packing.row)].seconds / packing.host_bytes if op.recomputable else math.inf
        )

    for packing in sorted(packings, key=worth, reverse=True):
        own = int(region[packing.row])
        first, last = halves[own, False].start, halves[own, True].stop
        made = packing.row if packing.written is None else packing.written
        reads = [r for r in graph.consumers[packing.value] if r >= graph.forward_length and region[r] == own]
        to_send, to_fetch = left[first : made + 1], left[min(reads, default=last - 1) : last]
        if to_send.min() >= packing.send_seconds and to_fetch.min() >= packing.fetch_seconds:
            to_send -= packing.send_seconds
            to_fetch -= packing.fetch_seconds
            chosen.add(packing.row)
    return [packing for packing in packings if packing.row in chosen]
