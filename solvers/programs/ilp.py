"""Single recompute as an integer program: each value is kept, or re-run once, just in time.

Elsewhere: the fixed-saved-set rematerialisation of Checkmate's "R is monotone" heuristics and of
PyTorch's min-cut partitioner, here with a memory row for every moment and re-runs placed in time
(compare Moccasin, Bartan et al. 2023, with one retention interval in each phase).

Specification. The forward phase is cut at *walls* into segments; a re-run is caused from inside its
own segment only. Free are the values that can be recomputed, are not pinned, and that the backward
phase needs, directly or for a re-run. Times are backward operations, written t.

Variables
    s[v] in {0, 1}      for every free value: kept from its first computation to its last use.
    r[o, t] in [0, 1]   for every forward operation o that computes one, and every time t at which
                        a re-run of o may be caused: o has been re-run by t. The times of o are the
                        first backward uses of its values and the times of its readers in its segment.
    K[g] >= 0           bytes kept by the segments up to g.

Constraints
    r[o, t] <= r[o, t'] for consecutive times t < t'.
    r[o, t] + s[v] >= 1                     for v of o that backward first reads at t.
    r[o, t] + s[v] >= r[o', t]              for every reader o' of v in o's segment and time t of it:
                                            what a re-run reads is kept or re-run by then.
    s[v] >= r[o', last]                     for every reader o' of v in a later segment.
    K[g] >= K[g-1] + sum of bytes(v) s[v]   over the values of g.
    fixed(t) + K[segments untouched at t] + sum over the other segments of
        bytes(v) s[v] for v read at or after t, and
        bytes(v) r[o, last time of o up to t] for v of o that backward reads at or after t
      + correction(t) <= budget             for every moment t: all times, and the highest point of
                                            the step between two of them, forward and backward.

Objective: the sum of seconds(o) r[o, last]. With s integral every r is integral by itself.

``fixed`` is what lives whatever is decided, workspace included. What the rows do not see (values
that live only inside a run of re-runs, outputs that a re-run makes besides) is found by simulation:
every answer is simulated, a row that fell short is corrected by the difference, and the program is
solved again. The simulator, not the program, says what a peak is.

:func:`solvers.reference.programs.single_recompute_model` is this specification in code.

Walls only bound the size of the program. Their spacing is swept from coarse to none at all, as far
as the time limit goes; times are thinned in large segments. Every program is warm-started from the
best answer so far, which is also what a time limit returns.

Not optimal: nothing is recomputed twice (``chain`` does), corrections are greedy, and a bound of the
program is a bound on single-recompute schedules only, so none is reported.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from solvers import sqrt_n
from solvers.model.arrays import BaseOps, PerMoment, ValueMask
from solvers.model.constraints import NO_CONSTRAINTS, Constraints
from solvers.model.cut_points import Cuts, ForwardUses, find_cuts, forward_uses, pinned_values
from solvers.model.graph import Graph
from solvers.model.incumbent import Candidate, Search
from solvers.model.indices import Position
from solvers.model.solver import solver
from solvers.programs.single_recompute import SECONDS, SingleRecompute, find_stages, write_program

NAME = "ilp"
GAP = 0.002
"""Relative gap of the recomputed seconds at which a program counts as solved."""
ABSOLUTE_GAP = 0.0002
"""The same gap as a fraction of the seconds of the step; reaching either gap is enough."""
LARGE_ABSOLUTE_GAP = 0.0005
"""The same for graphs of more than ``FINE`` forward operations."""
FINE = 300
"""Graphs of more forward operations are large: they are solved less finely."""
CORRECTIONS = 5
"""How often a program is corrected and solved again."""
WRITING_SECONDS = 3e-4
"""Seconds that writing a program takes for each forward operation."""
PRESOLVE_SECONDS = 5e-6
"""Seconds that a solver takes for each coefficient before it looks at its time limit."""
LATE_SECONDS = 1.5e-6
"""Seconds, for each coefficient, by which a solver overruns its time limit."""
MOMENTS = 2_000
"""About how many memory rows a program has at most."""
SIZES = (2_000, 8_000, 30_000)
"""Sizes of the programs tried, in re-run variables; small graphs have no walls even in the first."""


@solver(NAME, seconds=60.0)
def solve(search: Search) -> None:
    """Choose what to keep by integer programming."""
    everything = search.try_everything()
    if search.is_settled(everything):
        return
    sqrt_n.improve(search)
    if search.budget is None:
        descend(search)
    else:
        improve(search, search.budget)


@dataclass
class Programs:
    """The programs of one graph, written when first asked for and shared between budgets."""

    graph: Graph
    constraints: Constraints = NO_CONSTRAINTS

    def __post_init__(self) -> None:
        self.uses: ForwardUses = forward_uses(self.graph)
        self.pinned: ValueMask = pinned_values(self.graph, self.uses)
        self._written: dict[tuple[Position, ...], SingleRecompute] = {}

    @cached_property
    def cuts(self) -> Cuts:
        """All positions of the forward phase."""
        return find_cuts(self.graph, self.uses, self.pinned)

    def sizes(self) -> list[int]:
        """The sizes of program worth solving for this graph, ascending."""
        different: dict[tuple[Position, ...], int] = {}
        for size in SIZES:
            different.setdefault(self.walls(size), size)
        return list(different.values())

    def walls(self, size: int) -> tuple[Position, ...]:
        """Cuts, the narrowest around, that make a program of about ``size`` re-run variables."""
        length = self.graph.forward_length
        if length * length <= 2 * size:
            return ()
        width = max(8, 2 * size // length)
        walls: list[Position] = []
        position = Position(0)
        while position + 1.5 * width < length:
            window = slice(position + width // 2, position + width + width // 2)
            position = Position(window.start + int(self.cuts.bytes[window].argmin()))
            walls.append(position)
        return tuple(walls)

    def writing_seconds(self, size: int) -> float:
        """About how long it takes to write the program of that size, 0 when it is written."""
        return 0.0 if self.walls(size) in self._written else self.graph.forward_length * WRITING_SECONDS

    def program(self, size: int) -> SingleRecompute:
        """The program of about that size."""
        walls = self.walls(size)
        if walls not in self._written:
            times = max(2, min(2 * size // 100, MOMENTS // (len(walls) + 1)))
            stages = find_stages(self.graph, self.uses, self.pinned, self.constraints, list(walls), times)
            self._written[walls] = write_program(self.graph, self.uses, stages)
        return self._written[walls]


def improve(
    search: Search,
    budget: int,
    programs: Programs | None = None,
    *,
    sizes: list[int] | None = None,
    enough: float = 0.0,
) -> None:
    """Offer ``search`` the programs' answers to one budget, until one takes at most ``enough`` seconds.

    Without ``sizes``, programs of all sizes that differ are solved.
    """
    programs = programs or Programs(search.graph, search.constraints)
    sizes = programs.sizes() if sizes is None else sizes
    for n, size in enumerate(sizes):
        if search.out_of_time() or programs.writing_seconds(size) > search.seconds_left:
            return
        program = programs.program(size)
        share = None if np.isinf(search.seconds_left) else search.seconds_left / (len(sizes) - n)
        correct(search, program, budget, programs.pinned, share)
        search.tell("integer programs", (n + 1) / len(sizes))
        if search.fastest is not None and search.fastest.seconds <= enough:
            return


def descend(search: Search, programs: Programs | None = None, *, seconds: float = np.inf) -> None:
    """Look for the least peak: solve for smaller and smaller budgets below the least peak so far, each in at
    most ``seconds`` wall seconds."""
    programs = programs or Programs(search.graph, search.constraints)
    size = programs.sizes()[-1]
    low = 0
    while search.least is not None and not search.out_of_time():
        high = search.least.peak_bytes
        target = (low + high) // 2
        if target == low or high - target < 0.005 * high:
            return
        program = programs.program(size)
        most = min(search.seconds_left / 3, seconds)
        correct(search, program, target, programs.pinned, None if np.isinf(most) else most)
        if search.least.peak_bytes > target:
            low = target


def correct(
    search: Search, model: SingleRecompute, budget: int, pinned: ValueMask, time_limit: float | None
) -> None:
    """Solve, simulate, correct the rows that fell short, and solve again until the answer fits."""
    begin = search.elapsed
    large = search.graph.forward_length > FINE
    absolute_gap = (LARGE_ABSOLUTE_GAP if large else ABSOLUTE_GAP) * SECONDS
    model.correction[:] = 0.0
    for _ in range(CORRECTIONS):
        left = None if time_limit is None else time_limit - (search.elapsed - begin)
        if left is not None:
            if left <= len(model.program.index) * PRESOLVE_SECONDS:
                return
            left -= len(model.program.index) * LATE_SECONDS
        model.set_budget(budget)
        answer = model.program.solve(
            time_limit=left, gap=GAP, absolute_gap=absolute_gap, start=model.start(search.fastest)
        )
        if answer.values is None:
            return
        kept = model.kept(answer.values, model.keep < 0)
        kept[pinned & (model.keep < 0)] = True
        candidate = search.try_kept(kept)
        if candidate.peak_bytes <= budget:
            return
        simulated = peak_by_moment(search.graph, model.moments, candidate)
        excess = simulated - model.use(answer.values)
        short = simulated > budget
        model.correction[short] = np.maximum(model.correction[short] + 1, excess[short])


def peak_by_moment(graph: Graph, moments: BaseOps, candidate: Candidate) -> PerMoment:
    """The highest simulated bytes from each moment up to the next, re-runs counted to the base
    operation that they precede."""
    schedule = candidate.schedule
    first = np.full(len(graph.ops), len(schedule), dtype=np.int64)
    first[schedule[::-1]] = np.arange(len(schedule) - 1, -1, -1)
    base_steps = first[: graph.base_length]
    following = np.searchsorted(base_steps, np.arange(len(schedule)), side="left")
    owner = np.maximum(np.searchsorted(moments, following, side="right") - 1, 0)
    highest = np.zeros(len(moments))
    np.maximum.at(highest, owner, candidate.timeline.step_bytes)
    return highest
