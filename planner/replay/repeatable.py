"""Which calls of a recorded forward can run again in the backward, whatever a plan says.

What runs again must read what it read: nothing writes that afterwards, and the unit of ``fully_shard`` that
gathers it is gathered then. A call runs again together with the calls that write over its results. What it
reads before that is written over is made right before it, for it alone: so runs the copy again that autograd
keeps of what an activation in place writes.
"""

from bisect import bisect_left

from planner.replay.calls import can_run_again, draws
from planner.replay.recorder import Saved
from planner.replay.units import ROOT
from planner.training_step.recorder import Event

ELSEWHERE = "units hand it to one another"


class Repeatable:
    """What a step that saves tensors allows to run again.

    Attributes:
        writers: By storage, the events that write it after the one that made it.
    """

    def __init__(self, events: list[Event], saved: Saved) -> None:
        self._events, self._saved = events, saved
        self._maker: dict[int, int] = {}  # by storage: the event that made it
        self.writers: dict[int, list[int]] = {}
        self._last_there = self._find_writers()  # by identity of what was there: the last event to write it
        self._changed = {s for s, writers in self.writers.items() if writers[-1] >= saved.forward_events}
        self._kept = self._find_kept()

    def _find_writers(self) -> dict[int, int]:
        last_there: dict[int, int] = {}
        for index, (event, made) in enumerate(zip(self._events, self._saved.made, strict=True)):
            for storage in event.allocates:
                self._maker[storage] = index
            for storage in made.written:
                if storage >= 0 and self._maker.get(storage) != index:
                    self.writers.setdefault(storage, []).append(index)
            for key in (*made.there_written, *made.statistics):
                last_there[key] = index
        for key, noticed in self._saved.there_unseen.items():
            last_there[key] = max(last_there.get(key, -1), noticed)
        return last_there

    def _find_kept(self) -> dict[int, str]:
        """The storages that are not made again whatever makes them, and why: for when and where they are
        asked for."""
        saved = self._saved
        early = "the forward itself asks for it"
        kept = {
            saved.saves[number].storage: early for number, at in saved.unpacked if at < saved.forward_events
        }
        rows = [i for i, made in enumerate(saved.made) if self._events[i].allocates or made.written]
        units: dict[int, set[int]] = {}  # by row: those whose nodes ask before it, and behind the one before
        for number, at in saved.unpacked:
            units.setdefault(bisect_left(rows, at), set()).add(saved.saves[number].unit)
        for save in saved.saves:
            if any(saved.made[w].position >= save.begun for w in self.writers.get(save.storage, ())):
                kept.setdefault(save.storage, "autograd saves it before a call writes over it")
            mixed = any(len(units[bisect_left(rows, at)]) > 1 for at in save.unpacked)
            if len(save.unpacked) > 1:
                kept.setdefault(save.storage, "a node asks for it twice")
            elif mixed or not save.gathered or self._crosses(save.storage, save.unit):
                kept.setdefault(save.storage, ELSEWHERE)
        for made in saved.made:
            if made.position >= 0:
                crossing = (s for s in made.operands if self._crosses(s, made.unit))
                kept.update((s, ELSEWHERE) for s in crossing if s not in kept)
        return kept

    def _crosses(self, storage: int, unit: int) -> bool:
        """Whether a unit has a storage of another one, not of the root."""
        maker = self._maker.get(storage)
        return maker is not None and self._saved.made[maker].unit not in (unit, ROOT)

    def may_run_again(self, index: int) -> bool:
        """Whether a call, with the calls that write over its results, can run again in the backward."""
        return self.why_not(index) is None

    def why_not(self, index: int) -> str | None:
        """Why a call, with the calls that write over its results, cannot run again; None where it can."""
        allocates = self._events[index].allocates
        if not allocates:
            return "it makes nothing"
        if why := self._why_not_alone(index, frozenset(allocates), self.read_before_writes(index)):
            return why
        for storage in allocates:
            if storage in self._changed:
                return "the backward writes over its result"
            if storage in self._saved.unsure:
                return "a tensor of its result counts writes by itself"
            if storage in self._kept:
                return self._kept[storage]
            if storage in self._saved.unseen:
                return "no operator wrote over its result"
            for writer in self.writers.get(storage, ()):
                why = self._why_not_alone(writer, frozenset((storage,)), {})
                if why is None and not self._reads_earlier(writer, index, storage):
                    why = "it reads what is made later"
                if why is not None:
                    return f"{self._saved.operators[self._saved.made[writer].position]} writes over it: {why}"
        return None

    def _reads_earlier(self, writer: int, index: int, own: int) -> bool:
        """Whether a call that writes over the result of another reads only what was there before that one:
        solvers run calls again in the order of the forward, and the two run as one."""
        operands = self._saved.made[writer].operands
        return all(storage == own or self._maker.get(storage, -1) < index for storage in operands)

    def read_before_writes(self, index: int) -> dict[int, int]:
        """The storages that a call reads before the forward writes over them, and the calls that make these:
        where the call runs again, they run again right before it."""
        made = self._saved.made[index]
        found: dict[int, int] = {}
        for storage in made.operands:
            writers, maker = self.writers.get(storage, ()), self._maker.get(storage, -1)
            if (
                maker >= 0
                and writers
                and index < writers[0]
                and self._saved.made[writers[0]].position >= 0
                and storage in self._saved.made[maker].results
                and self._saved.made[maker].unit == made.unit
                and storage not in self._saved.unseen
                and storage not in self._saved.unsure
                and self._why_not_alone(maker, frozenset(self._events[maker].allocates), {}) is None
                and not draws(self._saved.operators[self._saved.made[maker].position])
            ):
                found[storage] = maker
        return found

    def _why_not_alone(self, index: int, own: frozenset[int], made_before: dict[int, int]) -> str | None:
        made = self._saved.made[index]
        if made.position < 0:
            return "it is no call of the forward"
        func = self._saved.operators[made.position]
        if not can_run_again(func):
            return "the operator is not run twice"
        if made.generator:
            return "it draws from a generator that it was handed"
        if made.there_written or any(storage not in own for storage in made.written):
            return "it writes what was there before"
        unit_of = self._saved.unit_of
        if any(unit_of.get(key, ROOT) not in (made.unit, ROOT) for key in made.there_read):
            return "it reads parameters of another unit"
        # What it reads must be what it read: nothing writes it afterwards.
        for storage in set(made.operands).difference(own, made_before, (-1,)):
            if self._last_write(storage) > index:
                return "what it reads is written afterwards"
        if any(self._last_there.get(key, -1) > index for key in made.there_read):
            return "a parameter, buffer or input that it reads is written afterwards"
        return None

    def _last_write(self, storage: int) -> int:
        return max(self.writers.get(storage, (-1,))[-1], self._saved.unseen.get(storage, -1))
