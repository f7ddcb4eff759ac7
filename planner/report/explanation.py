"""Why a plan treats a module as it does: what it keeps and re-runs, and what keeping more would take.

Every figure is the simulator's. A plan says what its operations read and make, so a schedule that keeps more
than the plan can be simulated as the plan itself was.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from planner.errors import PlannerError
from planner.planfile.plan import PlanRecord
from planner.planfile.simulated import simulated
from planner.report.explanation_text import Explanation, Keeping, Moment, Rerun
from planner.report.undroppable import droppable
from solvers.model.arrays import PerStep, Schedule
from solvers.model.graph import Graph
from solvers.model.indices import BaseOp, Step, listed, numbered
from solvers.model.schedule import alive_at, lifetimes, simulate

_MOST_TRIES = 60


class UnknownModule(PlannerError, ValueError):
    """The plan has no operation of a module of that name."""


def explain(plan: PlanRecord, module: str = "") -> Explanation:
    """Explain what a plan does with a module.

    Args:
        plan: The plan.
        module: Its name, as `named_modules()` has it; empty: the whole model.

    Raises:
        UnknownModule: The plan has no operation of it; names like it are given.
        PlanFileError: The plan does not say what its operations read, as those of earlier releases.
    """
    return Explainer(plan).module(module)


class Explainer:
    """Explains modules of one plan; simulates the plan once.

    Args:
        plan: The plan.

    Raises:
        PlanFileError: As of :func:`explain`.
    """

    def __init__(self, plan: PlanRecord) -> None:
        self.simulated = simulated(plan)
        graph = self.simulated.graph
        self._base = graph.base_of[self.simulated.schedule]
        self._peak = self.simulated.timeline.peak_step

    @cached_property
    def binding(self) -> Moment:
        """The plan's peak."""
        return self.moment(self.simulated.schedule, self._peak, self.simulated.timeline.step_bytes)

    def module(self, module: str) -> Explanation:
        """Explain a module; as :func:`explain`."""
        sim, graph = self.simulated, self.simulated.graph
        rows = self._rows_of(module)
        kept, kept_bytes = self._kept(rows)
        reruns = self._reruns(rows)
        again = set(rows).intersection(self._base[sim.reruns].tolist())
        room = sim.room_bytes
        keeping = more = None
        chosen: tuple[str, ...] = ()
        if again:
            keeping = self.keeping(again, room)
            if sim.plan.target.budget_bytes is not None:
                larger = sim.room(int(sim.plan.target.budget_bytes * 1.1))
                more, chosen = self._most_that_fits(again, larger)
        less_bytes, less_steps, less_module = self._with_less(kept)
        alive = alive_at(graph, sim.schedule, self._peak)
        of_module = np.isin(graph.producer[alive], self._all_rows_of(module))
        fixed = [row for row in rows if not graph.ops[row].recomputable]
        return Explanation(
            module=module,
            operations=len(rows),
            kept_operations=len(kept),
            kept_bytes=kept_bytes,
            freed_operations=len(set(rows) - set(kept) - again),
            fixed_operations=len(fixed),
            reruns=tuple(reruns),
            rerun_seconds=sum(rerun.seconds for rerun in reruns),
            plan_rerun_seconds=float(graph.seconds[sim.schedule[sim.reruns]].sum()),
            step_seconds=sim.timeline.seconds,
            binding=self.binding,
            binding_module_bytes=int(graph.bytes[alive][of_module].sum()),
            room_bytes=room,
            keeping=keeping,
            more=more,
            more_operations=chosen,
            less_bytes=less_bytes,
            less_steps=less_steps,
            less_module_bytes=less_module,
        )

    def without(self, rows: Iterable[BaseOp]) -> Schedule:
        """The schedule without the re-runs of some operations, and without those that only these needed."""
        sim, graph = self.simulated, self.simulated.graph
        left = ~(sim.reruns & np.isin(self._base, np.fromiter(rows, dtype=np.int64)))
        while True:
            schedule = sim.schedule[left]
            lives = lifetimes(graph, schedule)
            used = np.zeros(len(schedule), dtype=bool)
            used[lives.start[lives.used]] = True
            # A re-run whose results nothing reads was needed by the ones taken out.
            idle = sim.reruns[left] & ~used
            if not idle.any():
                return schedule
            left[np.flatnonzero(left)[idle]] = False

    def keeping(self, rows: Iterable[BaseOp], room_bytes: int | None) -> Keeping:
        """What the plan would take if it did not re-run operations of the forward.

        Args:
            rows: The operations.
            room_bytes: The dynamic peak that is allowed; None for any.
        """
        sim, graph = self.simulated, self.simulated.graph
        schedule = self.without(rows)
        timeline = simulate(graph, schedule)
        # The place of the plan's peak in this schedule: the same operation or, where that was a re-run that
        # is taken out, the next one.
        row, done = int(sim.schedule[self._peak]), int((~sim.reruns[: self._peak + 1]).sum())
        base_steps = np.flatnonzero(~self.simulated.reruns_of(schedule))
        first, last = (int(base_steps[done - 1]) if done else -1), len(schedule) - 1
        if not sim.reruns[self._peak]:
            place = first
        else:
            last = int(base_steps[done]) if done < len(base_steps) else last
            same = [i for i in range(first + 1, last) if schedule[i] == row]
            place = same[0] if same else last
        return Keeping(
            operations=len(set(self._base[sim.reruns].tolist()))
            - len(set(graph.base_of[schedule[self.simulated.reruns_of(schedule)]].tolist())),
            extra_bytes=int(timeline.step_bytes[place]) - sim.timeline.peak_bytes,
            peak_bytes=timeline.peak_bytes,
            peak=self.moment(schedule, timeline.peak_step, timeline.step_bytes),
            saved_seconds=sim.timeline.seconds - timeline.seconds,
            fits=None if room_bytes is None else timeline.peak_bytes <= room_bytes,
        )

    def moment(self, schedule: Schedule, step: Step, step_bytes: PerStep) -> Moment:
        """A step of a schedule in words."""
        row = int(schedule[step])
        record = self.simulated.record(row)
        again = bool(self.simulated.reruns_of(schedule)[step])
        phase = "recomputation" if again else record.phase
        line = self.simulated.line(row)
        return Moment(step, len(schedule), record.name, record.module, line, phase, int(step_bytes[step]))

    def _rows_of(self, module: str) -> list[BaseOp]:
        found = [row for row in self._all_rows_of(module) if row < self.simulated.graph.forward_length]
        if not found:
            raise UnknownModule(self._unknown(module))
        return found

    def _all_rows_of(self, module: str) -> list[BaseOp]:
        inside = f"{module}."
        ops = self.simulated.graph.ops[: self.simulated.graph.base_length]
        return [
            i
            for i, op in numbered(BaseOp, ops)
            if not module or op.module == module or op.module.startswith(inside)
        ]

    def _unknown(self, module: str) -> str:
        names = {op.module for op in self.simulated.graph.ops}
        names |= {".".join(n.split(".")[:i]) for n in names for i in range(1, n.count(".") + 1)}
        close = difflib.get_close_matches(module, sorted(names - {""}), n=3, cutoff=0.4)
        like = f"; like it: {', '.join(close)}" if close else ""
        return (
            f"the plan has no operation of a module {module!r}{like}. Names are those of named_modules(); "
            "`planner show` lists them"
        )

    def _kept(self, rows: Sequence[BaseOp]) -> tuple[list[BaseOp], int]:
        sim, graph = self.simulated, self.simulated.graph
        lives = sim.lives
        outlive = (lives.start < graph.forward_length) & (lives.end >= graph.forward_length) & lives.used
        values = lives.value[outlive]
        values = values[np.isin(graph.producer[values], rows)]
        return sorted(set(listed(BaseOp, graph.producer[values]))), int(graph.bytes[values].sum())

    def _reruns(self, rows: Sequence[BaseOp]) -> list[Rerun]:
        sim, graph = self.simulated, self.simulated.graph
        steps: dict[BaseOp, list[Step]] = {}
        wanted, base_of = set(rows), listed(BaseOp, self._base)
        for step in listed(Step, np.flatnonzero(sim.reruns)):
            base = base_of[step]
            if base in wanted:
                steps.setdefault(base, []).append(step)
        found = []
        for base, when in sorted(steps.items()):
            record = sim.record(base)
            makes = graph.ops[graph.rerun(base)].outputs
            size = int(graph.bytes[list(makes)].sum())
            seconds = float(graph.seconds[sim.schedule[when]].sum())
            found.append(Rerun(record.name, record.module, sim.line(base), size, seconds, tuple(when)))
        return found

    def _most_that_fits(self, again: set[BaseOp], room: int) -> tuple[Keeping | None, tuple[str, ...]]:
        """The re-runs that a larger budget could spare: all of them, or piece after piece.

        Pieces that save most time for a byte come first.
        """
        whole = self.keeping(again, room)
        if whole.fits:
            return whole, ("all of it",)
        graph = self.simulated.graph
        pieces: dict[str, set[BaseOp]] = {}
        times = Counter(self._base[self.simulated.reruns].tolist())
        for row in again:
            pieces.setdefault(graph.ops[row].module or "(the model)", set()).add(row)
        if len(pieces) == 1:
            pieces = {f"{graph.ops[row].name} (operation {row})": {row} for row in sorted(again)}
        chosen: list[str] = []
        together: set[BaseOp] = set()
        best: Keeping | None = None
        ranked = sorted(pieces, key=lambda name: -seconds_per_byte(graph, pieces[name], times))
        for name in ranked[:_MOST_TRIES]:
            tried = self.keeping(together | pieces[name], room)
            if tried.fits:
                together |= pieces[name]
                chosen.append(name)
                best = tried
        return best, tuple(chosen)

    def _with_less(self, kept: Sequence[int]) -> tuple[int | None, int, int]:
        sim, graph = self.simulated, self.simulated.graph
        budget = sim.plan.target.budget_bytes
        if budget is None:
            return None, 0, 0
        room = sim.room(int(budget * 0.9))
        over = sim.timeline.step_bytes > room
        alive = droppable(sim)
        mine = alive[np.isin(graph.producer[alive], kept)]
        return (
            max(sim.timeline.peak_bytes - room, 0),
            int(over.sum()),
            int(graph.bytes[mine].sum()),
        )


def seconds_per_byte(graph: Graph, operations: Iterable[BaseOp], times: Mapping[int, int]) -> float:
    """The time that keeping the results of operations saves, for each byte of them.

    Args:
        graph: The problem.
        operations: Operations of the forward.
        times: How often the plan re-runs each.
    """
    reruns = [(graph.rerun(op), times[op]) for op in operations]
    size = sum(int(graph.bytes[list(graph.ops[row].outputs)].sum()) for row, _ in reruns)
    return float(sum(graph.seconds[row] * count for row, count in reruns)) / max(size, 1)
