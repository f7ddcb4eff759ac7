"""Bytes that other micro-batches hold while a step runs: a pipeline's forwards run ahead of its backwards.

The step is one micro-batch's. Every other micro-batch between its forward and its backward holds the same
values that this one holds across the end of its forward. A schedule decides how many bytes these are, so they
count wherever schedules are judged.
"""

from dataclasses import dataclass

import numpy as np

from solvers.model.arrays import PerStep, Schedule
from solvers.model.indices import ValueId


@dataclass(frozen=True, slots=True)
class InFlight:
    """How many micro-batches have had their forward when the first backward begins.

    Attributes:
        count: How many, this one included.
        left_bytes: Bytes that each leaves after its backward, apart from gradients that are added up.
        added_up: For each base operation the bytes by which the gradients of all parameters, left by an
            earlier micro-batch, exceed those that this one has left so far; empty where gradients are
            resident, as more micro-batches follow than are in flight.
        sent: The values that go to the next stage, which the others hold until all have had their forward,
            whether a backward reads them or not.
    """

    count: int
    left_bytes: int = 0
    added_up: tuple[int, ...] = ()
    sent: tuple[ValueId, ...] = ()

    @property
    def others(self) -> int:
        """Micro-batches besides this one."""
        return self.count - 1

    def beside(
        self, crossing_bytes: int, schedule: Schedule, forward_length: int, sent_bytes: int
    ) -> PerStep:
        """Bytes that other micro-batches hold at most at each step of a schedule.

        Args:
            crossing_bytes: Bytes that one micro-batch holds between its forward and its backward.
            schedule: Rows in the order in which they run.
            forward_length: How many of them are the forward.
            sent_bytes: Bytes that one micro-batch sends, apart from those that it holds until its backward
                in any case.
        """
        waiting = self.others * crossing_bytes
        found: PerStep = np.full(len(schedule), waiting, dtype=np.int64)
        found[:forward_length] += self.others * sent_bytes
        if not self.added_up:
            return found + self.left_bytes
        if not self.others:
            return found
        length = len(self.added_up)
        first = np.full(length, len(schedule), dtype=np.int64)
        base = schedule < length
        first[schedule[base][::-1]] = np.flatnonzero(base)[::-1]
        following = np.searchsorted(np.minimum.accumulate(first[::-1])[::-1], np.arange(len(schedule)))
        gradients = np.array(self.added_up, dtype=np.int64)[np.minimum(following, length - 1)]
        # The second backward, or the last: what is between them is between theirs.
        second = (self.others - 1) * crossing_bytes + self.left_bytes
        last = self.others * self.left_bytes
        backward = np.maximum(waiting, gradients + max(second, last))
        found[forward_length:] = backward[forward_length:]
        return found
