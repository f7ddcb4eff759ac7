"""Results that are kept in the host's memory, as part of the problem.

One that is sent takes no byte of the device until it is fetched, so it is packed into none, see
:mod:`planner.problem.encodings`: a row right behind its last writer sends it, and where it would run again it
is fetched. So what cannot be made again may be fetched too. :mod:`planner.problem.link` says when.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np

from planner._torch import fake
from planner.capture.captured_step import CapturedStep
from planner.costs.devices import Device, round_bytes
from planner.graph.joint_graph import JointGraph
from planner.graph.sent import sent_node
from planner.problem.build import Problem
from planner.problem.encodings import Packing
from solvers.model.graph import Graph, Phase
from solvers.model.indices import BaseOp, numbered

LEAST_BYTES = 64 << 10
"""Smaller results are not worth the two calls."""

_OTHERS = 8
"""How many times smaller other results of an operation must be: they are not made again where one is sent."""

_ALONE = 128
"""The same where the least peak is looked for."""


def find_sendable(
    captured: CapturedStep, problem: Problem, device: Device, packings: Iterable[Packing]
) -> tuple[Packing, ...]:
    """The results that the backward reads and that can be kept on the host, in the order of the forward.

    Args:
        captured: The step.
        problem: Its problem.
        device: It says what its link carries.
        packings: What can be kept as bits; masks among these are sent as bits.
    """
    graph = problem.graph
    masks = {packing.row: packing for packing in packings if packing.reader is None}
    row_of = {(s.graph, s.instance, s.op): base for base, s in numbered(BaseOp, problem.sources)}
    sendable = [{} if g.joint is None else _sendable(g.joint) for g in captured.graphs]
    found: list[Packing] = []
    for base, source in numbered(BaseOp, problem.sources):
        if source.graph < 0 or source.op not in sendable[source.graph]:
            continue
        position, written, size = sendable[source.graph][source.op]
        value = graph.ops[base].outputs[position]
        if not any(graph.ops[reader].phase is Phase.BACKWARD for reader in graph.consumers[value]):
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
        others = sum(joint.storage_bytes[storage] for storage in op.allocates) - size
        if size >= LEAST_BYTES and _OTHERS * others <= size:
            position = op.allocates.index(joint.storage_of[node])
            found[op.index] = position, joint.op_of.get(node, op.index), size
    return found


def within_host_budget(packings: Iterable[Packing], budget: int | None) -> list[Packing]:
    """Those that fit the host's memory together, the first of the forward first: they are kept longest."""
    kept, total = [], 0
    for packing in packings:
        if budget is None or total + packing.host_bytes <= budget:
            kept.append(packing)
            total += packing.host_bytes
    return kept


def alone_in_size(graph: Graph, packings: Iterable[Packing]) -> list[Packing]:
    """Those beside which nothing large of the same operation stays on the device."""
    values = graph.values

    def others(packing: Packing) -> int:
        made = (v for v in graph.ops[packing.row].outputs if v != packing.value and not values[v].on_demand)
        return sum(values[v].bytes for v in made)

    return [p for p in packings if _ALONE * others(p) <= values[p.value].bytes]


def beside_compute(graph: Graph, packings: Collection[Packing], share: float = 1.0) -> list[Packing]:
    """Those that take longest to make again for their bytes, as many as a link carries beside the step.

    Whatever is made from a moment on must be sent by the end of the forward, and what is read until a moment
    be fetched from the end of the forward on.

    Args:
        graph: The problem in which nothing is sent.
        packings: What can be sent.
        share: The share of that time in which the link carries it.
    """
    length = graph.forward_length
    begin = share * np.concatenate(([0.0], np.cumsum(graph.seconds[: graph.base_length])))
    to_send, to_fetch = begin[length] - begin[1 : length + 1], begin[length:-1] - begin[length]
    chosen = set()

    def worth(packing: Packing) -> float:
        op = graph.ops[packing.row]
        return (
            graph.ops[graph.rerun(packing.row)].seconds / packing.host_bytes if op.recomputable else math.inf
        )

    for packing in sorted(packings, key=worth, reverse=True):
        made = packing.row if packing.written is None else packing.written
        read = min(row for row in graph.consumers[packing.value] if row >= length) - length
        if (
            to_send[: made + 1].min() >= packing.send_seconds
            and to_fetch[read:].min() >= packing.fetch_seconds
        ):
            to_send[: made + 1] -= packing.send_seconds
            to_fetch[read:] -= packing.fetch_seconds
            chosen.add(packing.row)
    return [packing for packing in packings if packing.row in chosen]
