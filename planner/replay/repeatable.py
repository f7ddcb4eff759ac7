"""Which calls of a recorded forward can run again in the backward, whatever a plan says.

What runs again must read what it read: nothing writes that afterwards, and the unit of ``fully_shard`` that
gathers it is gathered then. A call runs again together with the calls that write over its results.
"""

from bisect import bisect_left

from planner.replay.calls import can_run_again
from planner.replay.recorder import Saved
from planner.replay.units import ROOT
from planner.training_step.recorder import Event


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

    def _find_kept(self) -> set[int]:
        """The storages that are not made again whatever makes them, for when and where they are asked for."""
        saved = self._saved
        kept = {saved.saves[number].storage for number, at in saved.unpacked if at < saved.forward_events}
        rows = [i for i, made in enumerate(saved.made) if self._events[i].allocates or made.written]
        units: dict[int, set[int]] = {}  # by row: those whose nodes ask before it, and behind the one before
        for number, at in saved.unpacked:
            units.setdefault(bisect_left(rows, at), set()).add(saved.saves[number].unit)
        for save in saved.saves:
            mixed = any(len(units[bisect_left(rows, at)]) > 1 for at in save.unpacked)
            if len(save.unpacked) > 1 or mixed or not save.gathered or self._crosses(save.storage, save.unit):
                kept.add(save.storage)
        for made in saved.made:
            if made.position >= 0:
                kept.update(s for s in made.operands if self._crosses(s, made.unit))
        return kept

    def _crosses(self, storage: int, unit: int) -> bool:
        """Whether a unit has a storage of another one, not of the root."""
        maker = self._maker.get(storage)
        return maker is not None and self._saved.made[maker].unit not in (unit, ROOT)

    def may_run_again(self, index: int) -> bool:
        """Whether a call, with the calls that write over its results, can run again in the backward."""
        event = self._events[index]
        if not event.allocates or not self._repeatable(index, frozenset(event.allocates)):
            return False
        return all(
            storage not in self._changed
            and storage not in self._saved.unsure
            and storage not in self._kept
            and storage not in self._saved.unseen
            and all(
                self._repeatable(w, frozenset((storage,))) and self._reads_earlier(w, index, storage)
                for w in self.writers.get(storage, ())
            )
            for storage in event.allocates
        )

    def _reads_earlier(self, writer: int, index: int, own: int) -> bool:
        """Whether a call that writes over the result of another reads only what was there before that one:
        solvers run calls again in the order of the forward, and the two run as one."""
        operands = self._saved.made[writer].operands
        return all(storage == own or self._maker.get(storage, -1) < index for storage in operands)

    def _repeatable(self, index: int, own: frozenset[int]) -> bool:
        made = self._saved.made[index]
        if made.position < 0:
            return False
        func = self._saved.operators[made.position]
        if not can_run_again(func) or made.there_written:
            return False
        if any(storage not in own for storage in made.written):
            return False
        unit_of = self._saved.unit_of
        if any(unit_of.get(key, ROOT) not in (made.unit, ROOT) for key in made.there_read):
            return False
        # What it reads must be what it read: nothing writes it afterwards.
        for storage in made.operands:
            if storage >= 0 and storage not in own and self._last_write(storage) > index:
                return False
        return all(self._last_there.get(key, -1) <= index for key in made.there_read)

    def _last_write(self, storage: int) -> int:
        return max(self.writers.get(storage, (-1,))[-1], self._saved.unseen.get(storage, -1))
