"""The calls of a recorded forward that can run again in the backward, whatever a plan says.

A re-run must read what the first run read: nothing writes its operands afterwards, and the unit of
``fully_shard`` whose parameters it reads is gathered. A call runs again together with the calls that write
over its results. An operand that the forward writes over later is made right before the call, for it alone:
so the copy that autograd keeps of the operand of an activation in place can run again.
"""

from bisect import bisect_left

from planner.parallel.units import ROOT
from planner.replay.calls import can_run_again, draws
from planner.replay.recorder import Saved
from planner.training_step.recorder import Event

CROSSES_UNITS = "units hand it to one another"


class Repeatable:
    """Says of each event of a recording whether it can run again.

    Attributes:
        writers: By storage, the events that write it after the one that made it.
    """

    def __init__(self, events: list[Event], saved: Saved) -> None:
        self._events, self._saved = events, saved
        self._maker: dict[int, int] = {}  # by storage: the event that made it
        self.writers: dict[int, list[int]] = {}
        # By identity of a storage from before the step: the last event that writes it.
        self._last_outside_write = self._find_writers()
        self._changed = {s for s, writers in self.writers.items() if writers[-1] >= saved.forward_events}
        self._kept = self._find_kept()

    def _find_writers(self) -> dict[int, int]:
        last_outside_write: dict[int, int] = {}
        for index, (event, call) in enumerate(zip(self._events, self._saved.details, strict=True)):
            for storage in event.allocates:
                self._maker[storage] = index
            for storage in call.written:
                if storage >= 0 and self._maker.get(storage) != index:
                    self.writers.setdefault(storage, []).append(index)
            for key in (*call.outside_written, *call.statistics):
                last_outside_write[key] = index
        for key, noticed in self._saved.outside_unseen.items():
            last_outside_write[key] = max(last_outside_write.get(key, -1), noticed)
        return last_outside_write

    def _find_kept(self) -> dict[int, str]:
        """The storages that must be kept for when and where nodes ask for them, each with the reason."""
        saved = self._saved
        in_forward = "the forward itself asks for it"
        kept = {
            saved.saves[number].storage: in_forward
            for number, at in saved.unpacked
            if at < saved.forward_events
        }
        rows = [i for i, call in enumerate(saved.details) if self._events[i].allocates or call.written]
        units: dict[int, set[int]] = {}  # by row: the units whose nodes ask between the row before and it
        for number, at in saved.unpacked:
            units.setdefault(bisect_left(rows, at), set()).add(saved.saves[number].unit)
        for save in saved.saves:
            if any(saved.details[w].position >= save.begun for w in self.writers.get(save.storage, ())):
                kept.setdefault(save.storage, "autograd saves it before a call writes over it")
            mixed = any(len(units[bisect_left(rows, at)]) > 1 for at in save.unpacked)
            if len(save.unpacked) > 1:
                kept.setdefault(save.storage, "a node asks for it twice")
            elif mixed or not save.gathered or self._crosses(save.storage, save.unit):
                kept.setdefault(save.storage, CROSSES_UNITS)
        for call in saved.details:
            if call.position >= 0:
                crossing = (s for s in call.operands if self._crosses(s, call.unit))
                kept.update((s, CROSSES_UNITS) for s in crossing if s not in kept)
        return kept

    def _crosses(self, storage: int, unit: int) -> bool:
        """Whether a storage was made in another unit, not in the root."""
        maker = self._maker.get(storage)
        return maker is not None and self._saved.details[maker].unit not in (unit, ROOT)

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
            if storage in self._saved.own_counters:
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
                    return (
                        f"{self._saved.operators[self._saved.details[writer].position]} writes over it: {why}"
                    )
        return None

    def _reads_earlier(self, writer: int, index: int, own: int) -> bool:
        """Whether a writer of a call's result reads, beside ``own``, only storages made before that call: the
        two run again as one, in its place."""
        operands = self._saved.details[writer].operands
        return all(storage == own or self._maker.get(storage, -1) < index for storage in operands)

    def read_before_writes(self, index: int) -> dict[int, int]:
        """The storages that a call reads and the forward writes over later, with the calls that make them:
        those run again right before it."""
        call = self._saved.details[index]
        found: dict[int, int] = {}
        for storage in call.operands:
            writers, maker = self.writers.get(storage, ()), self._maker.get(storage, -1)
            if (
                maker >= 0
                and writers
                and index < writers[0]
                and self._saved.details[writers[0]].position >= 0
                and storage in self._saved.details[maker].results
                and self._saved.details[maker].unit == call.unit
                and storage not in self._saved.unseen
                and storage not in self._saved.own_counters
                and self._why_not_alone(maker, frozenset(self._events[maker].allocates), {}) is None
                and not draws(self._saved.operators[self._saved.details[maker].position])
            ):
                found[storage] = maker
        return found

    def _why_not_alone(self, index: int, own: frozenset[int], made_before: dict[int, int]) -> str | None:
        call = self._saved.details[index]
        if call.position < 0:
            return "it is no call of the forward"
        func = self._saved.operators[call.position]
        if not can_run_again(func):
            return "the operator is not run twice"
        if call.why_not is not None:
            return call.why_not
        if call.outside_written or any(storage not in own for storage in call.written):
            return "it writes what was there before"
        unit_of = self._saved.unit_of
        if any(unit_of.get(key, ROOT) not in (call.unit, ROOT) for key in call.outside_read):
            return "it reads parameters of another unit"
        # A re-run must read what the first run read.
        for storage in set(call.operands).difference(own, made_before, (-1,)):
            if self._last_write(storage) > index:
                return "what it reads is written afterwards"
        last, of_one_call = self._last_outside_write, self._saved.of_one_call
        # A buffer that was written before is written again where a second call comes before the backward.
        if any(k in last and (last[k] > index or k not in of_one_call) for k in call.outside_read):
            return "a parameter, buffer or input that it reads is written by the forward"
        return None

    def _last_write(self, storage: int) -> int:
        return max(self.writers.get(storage, (-1,))[-1], self._saved.unseen.get(storage, -1))
