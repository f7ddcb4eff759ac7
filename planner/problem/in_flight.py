"""Micro-batches in flight: the memory that they hold beside the step of one of them, planned or not."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from planner.capture.captured_step import CapturedStep
from planner.costs.eager_timeline import EagerTimeline
from solvers.model.graph import GLUE_REGION, Graph, Phase
from solvers.model.in_flight import InFlight
from solvers.model.indices import BaseOp, Step, ValueId, base_op, numbered

_ONES = "aten.ones_like.default"


def with_others(
    graph: Graph, captured: CapturedStep, value_of: Mapping[int, ValueId], count: int
) -> tuple[Graph, int]:
    """The solvers' graph of one micro-batch among others, and the bytes that all of them leave.

    Args:
        graph: The graph of one alone.
        captured: The step.
        value_of: The value of each recorded storage.
        count: How many are in flight.
    """
    recording = captured.compiled
    graph = _backward_begins_with_its_gradients(graph)
    sent = tuple(sorted({value_of[s] for s in recording.sent if s in value_of}))
    kept = [s for s, storage in enumerate(recording.storages) if storage.died_after is None and s in value_of]
    final = {value_of[s] for s in kept}
    gradients = {value_of[s] for s in kept if s in recording.gradients}
    outputs = {value_of[s] for s in kept if s in recording.results}
    left = sum(graph.values[v].bytes for v in final - gradients - outputs)
    if captured.gradients:  # earlier micro-batches have made the gradients
        return replace(graph, in_flight=InFlight(count, left, sent=sent)), left
    last_of: dict[int, BaseOp] = {}
    for i, op in numbered(BaseOp, graph.ops[: graph.base_length]):
        last_of[op.region] = i
    total = sum(graph.values[v].bytes for v in gradients)
    more = np.full(graph.base_length, total, dtype=np.int64)
    for v in gradients:
        maker = base_op(int(graph.producer[v]))
        region = graph.ops[maker].region
        more[(maker if region == GLUE_REGION else last_of[region]) + 1 :] -= graph.values[v].bytes
    return replace(graph, in_flight=InFlight(count, left, tuple(more.tolist()), sent)), total + count * left


def _backward_begins_with_its_gradients(graph: Graph) -> Graph:
    """Make the first gradients, ones that stand for the loss's or the next stage's, part of the backward."""
    ops, place = list(graph.ops), graph.forward_length - 1
    while place >= 0 and ops[place].name == _ONES:
        ops[place] = replace(ops[place], phase=Phase.BACKWARD)
        place -= 1
    return replace(graph, ops=tuple(ops))


def unplanned_with_others(captured: CapturedStep, eager: EagerTimeline, count: int) -> EagerTimeline:
    """The timeline of the unplanned step of one micro-batch among others.

    Args:
        captured: The step.
        eager: The timeline of the unplanned step, alone.
        count: How many are in flight.
    """
    recording, accumulating = captured.eager, bool(captured.gradients)
    events, storages, size = recording.events, recording.storages, eager.sizes
    length = len(events)
    forward = next((i for i, event in enumerate(events) if event.backward), length)
    while forward and (call := events[forward - 1].call) is not None:
        if str(recording.calls[call].func) != _ONES:
            break
        forward -= 1

    made = {storage: i for i, event in enumerate(events) for storage in event.allocates}
    died = {s: length if storages[s].died_after is None else int(storages[s].died_after or 0) for s in made}
    crossing = sum(size[s] for s, begin in made.items() if begin < forward <= died[s])
    sent = sum(size[s] for s in recording.sent if died[s] < forward)
    left = sum(
        size[s] for s in made if died[s] == length and s not in recording.gradients | recording.results
    )
    gradients = [s for s in made if s in recording.gradients and died[s] == length]
    total = sum(size[s] for s in gradients)
    more = np.full(length, total, dtype=np.int64)
    for storage in gradients:
        begin = made[storage]
        after = next((i for i in range(begin, length) if events[i].node != events[begin].node), length)
        more[after:] -= size[storage]
    in_flight = InFlight(count, left, () if accumulating else tuple(more.tolist()))
    beside = in_flight.beside(crossing, np.arange(length), forward, sent)
    step = eager.step_bytes + beside
    return replace(
        eager,
        live_bytes=eager.live_bytes + beside,
        step_bytes=step,
        peak_bytes=int(step.max(initial=0)),
        peak_step=Step(int(step.argmax())) if length else Step(0),
        final_bytes=left if accumulating else total + count * left,
    )
