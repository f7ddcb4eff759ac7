"""A recording of a step with some of its alike layers left out, made into that of the whole step.

The events of a layer are those from its call to that of the next one, and those of the backwards of the nodes
made meanwhile. Where the layers in the middle of those that ran did the same, storage by storage, so do those
between them that did not run: each reads, and frees, what its neighbour did, one layer further. All that is
compared. A recording that is not so regular is not made longer.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from planner.capture.graphs.graph_call import GraphCall
from planner.heap import collector_off
from planner.training_step.recorder import Event, Recording, Storage

_ACCUMULATES = "AccumulateGrad"
AT_AN_END = 2
"""How many layers at each end of a chain may differ from those in the middle."""
_LEAST_INNER = 3
"""How many in the middle have to do the same."""


@dataclass(frozen=True)
class Layers:
    """Which layers ran, of a chain of them.

    Attributes:
        events: How many events there were when each was called, and when the last one returned.
        nodes: The number of the next autograd node at these moments.
        left_out: How many did not run.
        after: After how many of those that ran.
    """

    events: tuple[int, ...]
    nodes: tuple[int, ...]
    left_out: int
    after: int

    @property
    def ran(self) -> int:
        """How many ran."""
        return len(self.events) - 1


class IrregularError(Exception):
    """The layers do not all do the same."""


@collector_off()
def lengthened(recording: Recording, layers: Layers) -> tuple[Recording, int]:
    """The recording of the step in which no layer was left out, and how many events its forward has more.

    Raises:
        IrregularError: That cannot be told.
    """
    parts = _Parts(recording, layers)
    longer = _Longer(parts).recording()
    return longer, layers.left_out * len(parts.events["forward", layers.after])


_Part = tuple[str, int]
"""A part of the step: "before", "forward", "middle", "backward" or "end", and of a layer's its number from 1,
else 0."""
_Place = tuple[_Part, int]
"""A place in a part."""
_Given = tuple[int | None, str, int]
"""An event or a storage as the layers in the middle refer to it: how many layers further it
is, the kind of part, and its place there; or None, and its number."""


def _order(layers: int) -> list[_Part]:
    forward = [("forward", n) for n in range(1, layers + 1)]
    backward = [("backward", n) for n in range(layers, 0, -1)]
    return [("before", 0), *forward, ("middle", 0), *backward, ("end", 0)]


class _Parts:
    """The parts of a recording, and where its events and storages are in them."""

    def __init__(self, recording: Recording, layers: Layers) -> None:
        self.recording, self.layers = recording, layers
        self.event_places: list[_Place] = []
        self.storage_places: list[_Place] = []
        self.events: dict[_Part, list[Event]] = {part: [] for part in _order(layers.ran)}
        self.storages: dict[_Part, list[Storage]] = {part: [] for part in _order(layers.ran)}
        for event, part in zip(recording.events, self._part_of_each(), strict=True):
            self.event_places.append((part, len(self.events[part])))
            self.events[part].append(event)
            for storage in event.allocates:
                if storage != len(self.storage_places):
                    raise IrregularError
                self.storage_places.append((part, len(self.storages[part])))
                self.storages[part].append(recording.storages[storage])
        if len(self.storage_places) != len(recording.storages):
            raise IrregularError

    def _part_of_each(self) -> Iterator[_Part]:
        """The part that each event is in; the backwards of layers follow each other, the last first."""
        called = self.layers.events
        yield from [("before", 0)] * called[0]
        for layer, (begin, end) in enumerate(pairwise(called), 1):
            yield from [("forward", layer)] * (end - begin)
        found: list[int | None] = []
        for event in self.recording.events[called[-1] :]:
            found.append(self._layer_of(event.node, found[-1] if found else None))
        of_layers = [i for i, layer in enumerate(found) if layer is not None]
        begin, end = (of_layers[0], of_layers[-1] + 1) if of_layers else (len(found), len(found))
        backward = [layer or 0 for layer in found[begin:end]]
        if 0 in backward or backward != sorted(backward, reverse=True):
            raise IrregularError
        yield from [("middle", 0)] * begin
        yield from (("backward", layer) for layer in backward)
        yield from [("end", 0)] * (len(found) - end)

    def _layer_of(self, node: tuple[str, int] | None, before: int | None) -> int | None:
        """The layer that made a node; what accumulates a gradient runs right after what it gets that from."""
        if node is None:
            return None
        name, number = node
        if _ACCUMULATES in name:
            return before
        nodes = self.layers.nodes
        return sum(first <= number for first in nodes[:-1]) if nodes[0] <= number < nodes[-1] else None


class _Longer:
    """Makes a recording longer; see the module's docstring."""

    def __init__(self, parts: _Parts) -> None:
        self._parts, self._layers = parts, parts.layers
        self._ran, self._after = parts.layers.ran, parts.layers.after
        self._inner = range(1 + AT_AN_END, self._ran - AT_AN_END + 1)
        if {self._after, self._after + 1} - {*self._inner} or len(self._inner) < _LEAST_INNER:
            raise IrregularError
        self._order = _order(self._ran + parts.layers.left_out)
        self._of_a_layer = Counter(_executed(parts.events["forward", self._after]))
        """How often a layer runs a graph, by its index."""
        first = [part for part in _order(self._ran) if part[0] == "before" or 0 < part[1] <= self._after]
        self._before = Counter(g for p in first if p[0] != "backward" for g in _executed(parts.events[p]))
        """How often a graph has run before the layers that were left out."""
        event = storage = 0
        self._events: dict[_Part, int] = {}
        """The first event of each part of the longer recording."""
        self._storages: dict[_Part, int] = {}
        """The first storage of each."""
        for part in self._order:
            self._events[part], self._storages[part] = event, storage
            event += len(parts.events[self._ran_for(part)])
            storage += len(parts.storages[self._ran_for(part)])

    def recording(self) -> Recording:
        """The longer one."""
        parts, recording = self._parts, self._parts.recording
        events: list[Event] = []
        storages: list[Storage] = []
        inner_events = {kind: self._inner_events(kind) for kind in ("forward", "backward")}
        inner_storages = {kind: self._inner_storages(kind) for kind in ("forward", "backward")}
        first = self._storages
        for part in self._order:
            kind, layer = part
            ran, number = self._ran_for(part), self._storages[part]
            inner = ran[1] in self._inner
            of = partial(self._outer, of=ran, places=parts.storage_places, firsts=self._storages)
            for n, event in enumerate(parts.events[ran]):
                if inner:
                    refers = [
                        place if further is None else first[other, layer + further] + place
                        for further, other, place in inner_events[kind][n]
                    ]
                else:
                    refers = [of(s) for s in _refers(event)]
                made = len(event.allocates)
                allocates = tuple(range(number, number + made)) if made else ()
                number += made
                # There are tens of thousands, nearly all of them operations outside of graphs.
                if event.graph is None:
                    call, _, _, backward, _, node = event
                    events.append(Event(call, tuple(refers), allocates, backward, None, node))
                else:
                    instance = self._instance(event.graph, ran[1], layer, inner)
                    events.append(_referring(event, event.graph, refers, allocates, instance))
            for n, storage in enumerate(parts.storages[ran]):
                if inner:
                    died = _resolved(inner_storages[kind][n], layer, self._events)
                else:
                    died = self._outer(_died(storage), ran, parts.event_places, self._events)
                storages.append(Storage(storage.bytes, None if died < 0 else died, storage.kind))
        return replace(
            recording,
            events=events,
            storages=storages,
            gradients=self._gradients(recording.gradients),
            results=self._not_inner(recording.results),
            sent=self._not_inner(recording.sent),
        )

    def _ran_for(self, part: _Part) -> _Part:
        """The part that ran which one of the longer recording is like."""
        kind, layer = part
        if layer <= self._after:
            return part
        return kind, max(self._after, layer - self._layers.left_out)

    def _number(self, place: _Place, firsts: Mapping[_Part, int]) -> int:
        """The number in the longer recording of what ran."""
        (kind, layer), n = place
        return firsts[kind, layer if layer <= self._after else layer + self._layers.left_out] + n

    def _instance(self, call: GraphCall, ran: int, layer: int, inner: bool) -> int:
        """Which execution of its graph one is in the longer recording."""
        of_a_layer = self._of_a_layer[call.graph]
        if inner:
            return call.instance + (layer - ran) * of_a_layer
        later = call.instance >= self._before[call.graph]
        return call.instance + later * self._layers.left_out * of_a_layer

    # ---- the first and the last layers, and what is around all of them -----------------------------

    def _outer(self, number: int, of: _Part, places: Sequence[_Place], firsts: Mapping[_Part, int]) -> int:
        """What one outside of the inner layers refers to: of these the one next to it, at the most."""
        if number < 0:
            return number
        place = places[number]
        layer = place[0][1]
        first_ones = of[0] == "before" or 0 < of[1] < self._inner[0]
        if layer in self._inner and (of[0] == "end" or layer != self._inner[0 if first_ones else -1]):
            raise IrregularError
        return self._number(place, firsts)

    def _not_inner(self, storages: Iterable[int]) -> frozenset[int]:
        places = [self._parts.storage_places[s] for s in storages]
        if any(part[1] in self._inner for part, _ in places):
            raise IrregularError
        return frozenset(self._number(place, self._storages) for place in places)

    # ---- the layers in the middle ------------------------------------------------------------------

    def _inner_events(self, kind: str) -> list[list[_Given]]:
        """What each event of an inner layer refers to."""
        found = []
        for alike in self._side_by_side(self._parts.events, kind):
            _same([_what_ran(e) for e in alike])
            if alike[0].graph is not None:
                of_a_layer = self._of_a_layer[alike[0].graph.graph]
                _same([e.graph.instance - n * of_a_layer for n, e in enumerate(alike)])
            refers = zip(*map(_refers, alike), strict=True)
            found.append([self._given(r, self._parts.storage_places, self._storages) for r in refers])
        return found

    def _inner_storages(self, kind: str) -> list[_Given]:
        """After which event each storage of an inner layer is freed."""
        found = []
        for alike in self._side_by_side(self._parts.storages, kind):
            _same([(s.bytes, s.kind) for s in alike])
            found.append(self._given([_died(s) for s in alike], self._parts.event_places, self._events))
        return found

    def _side_by_side(self, of_parts: Mapping[_Part, Sequence[Any]], kind: str) -> Iterator[tuple[Any, ...]]:
        inner = [of_parts[kind, layer] for layer in self._inner]
        _same([len(of_layer) for of_layer in inner])
        yield from zip(*inner, strict=True)

    def _given(self, numbers: Sequence[int], places: Sequence[_Place], firsts: Mapping[_Part, int]) -> _Given:
        """What all inner layers refer to alike: the same thing, or what is as far from each of them."""
        if len(set(numbers)) == 1:
            if numbers[0] < 0:
                return None, "", numbers[0]
            if places[numbers[0]][0][1] in self._inner:
                raise IrregularError
            return None, "", self._number(places[numbers[0]], firsts)
        if min(numbers) < 0:
            raise IrregularError
        further = [
            (place[0][1] - layer, place[0][0], place[1])
            for layer, place in zip(self._inner, (places[n] for n in numbers), strict=True)
        ]
        _same(further)
        if further[0][1] not in ("forward", "backward") or abs(further[0][0]) > 1:
            raise IrregularError
        return further[0]

    def _gradients(self, gradients: frozenset[int]) -> frozenset[int]:
        places: dict[_Part, set[int]] = {}
        for storage in gradients:
            part, n = self._parts.storage_places[storage]
            places.setdefault(part, set()).add(n)
        for kind in ("forward", "backward"):
            _same([places.get((kind, layer), set()) for layer in self._inner])
        return frozenset(
            self._storages[part] + n for part in self._order for n in places.get(self._ran_for(part), ())
        )


def _executed(events: Iterable[Event]) -> list[int]:
    return [event.graph.graph for event in events if event.graph is not None and not event.graph.backward]


def _what_ran(event: Event) -> tuple[object, ...]:
    """All of an event but the storages that it refers to, and which execution of a graph it is."""
    call: GraphCall | None = event.graph
    node = None if event.node is None else event.node[0]
    operation = event.call, event.backward, node, len(event.reads), len(event.allocates)
    if call is None:
        return operation
    released = tuple(a in call.released for a in call.arguments)
    counts = call.allocating, len(call.arguments), len(call.outputs)
    return *operation, call.graph, call.backward, *counts, released


def _refers(event: Event) -> tuple[int, ...]:
    """The storages that an event refers to but for those that it allocates."""
    call: GraphCall | None = event.graph
    return event.reads if call is None else (*event.reads, *call.arguments, *call.outputs, call.token)


def _referring(
    event: Event, call: GraphCall, refers: Sequence[int], allocates: tuple[int, ...], instance: int
) -> Event:
    """The execution of a graph with others in the place of what :func:`_refers` returned."""
    reads = tuple(refers[: len(event.reads)])
    arguments = tuple(refers[len(reads) : len(reads) + len(call.arguments)])
    *outputs, token = refers[len(reads) + len(arguments) :]
    renamed = zip(arguments, call.arguments, strict=True)
    released = frozenset(new for new, old in renamed if old in call.released)
    other = replace(
        call, instance=instance, arguments=arguments, outputs=tuple(outputs), released=released, token=token
    )
    return event._replace(reads=reads, allocates=allocates, graph=other)


def _resolved(given: _Given, layer: int, firsts: Mapping[_Part, int]) -> int:
    further, kind, n = given
    return n if further is None else firsts[kind, layer + further] + n


def _died(storage: Storage) -> int:
    return -1 if storage.died_after is None else storage.died_after


def _same(things: Sequence[object]) -> None:
    if any(thing != things[0] for thing in things[1:]):
        raise IrregularError
