"""Blocks of the forward phase and their costs: the input of ``chain``.

A block lies between two cuts. It has several *options*: sets of values to keep of it when its
forward runs, from nothing to everything, found by pricing kept bytes (the Lagrangian form of the
single-recompute program: no memory rows, a price a byte, which makes it a minimum cut). What an
option needs when the backward of its block comes is read off a simulation of the whole step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from solvers.model.arrays import BlockPerOp, BlockPerValue, PerBlock, PerBlockSeconds, ValueMask
from solvers.model.constraints import Constraints
from solvers.model.cut_points import Cuts, ForwardUses
from solvers.model.graph import Graph
from solvers.model.indices import BaseOp, Position, ValueId, listed
from solvers.model.just_in_time import recompute
from solvers.model.schedule import lifetimes, simulate
from solvers.programs.single_recompute import SECONDS, find_stages, write_program


@dataclass(frozen=True)
class Blocks:
    """Blocks 0 to n-1 and their options.

    Attributes:
        walls: Position at which each block but the first begins.
        of_value: The block that each value is computed in; -1 for values of no forward operation.
        forward_seconds: Seconds of running each block forward again.
        forward_bytes: Peak of doing so, beyond what crosses into it.
        start_bytes: Bytes that the backward phase itself holds when the backward of a block begins.
        boundary: ``boundary[i, j]``: bytes that cross into block j and not into block i < j.
        options: For each option the values that it keeps, bool; the first keeps nothing.
        option_bytes: ``[option, block]``: bytes kept, what crosses into the next block left out.
        option_seconds: Seconds of re-runs that the backward of the block then makes.
        option_peak: Peak of its backward, beyond what earlier blocks keep.
    """

    walls: list[Position]
    of_value: BlockPerValue
    forward_seconds: PerBlockSeconds
    forward_bytes: PerBlock
    start_bytes: PerBlock
    boundary: PerBlock
    options: list[ValueMask]
    option_bytes: PerBlock
    option_seconds: PerBlockSeconds
    option_peak: PerBlock

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.walls) + 1


def find_blocks(
    graph: Graph,
    uses: ForwardUses,
    cuts: Cuts,
    pinned: ValueMask,
    constraints: Constraints,
    walls: list[Position],
    *,
    prices: int = 6,
    stop: Callable[[], bool] = lambda: False,
) -> Blocks:
    """Cut the forward phase at ``walls`` and evaluate the blocks' options by simulation; no more
    options are looked for when ``stop`` says so."""
    edges = np.array(walls, dtype=np.int64)
    count = len(walls) + 1
    forward = (graph.producer >= 0) & (graph.producer < graph.forward_length)
    of_value = np.where(forward, np.searchsorted(edges, graph.producer, side="right"), -1)
    of_op = np.searchsorted(edges, np.arange(graph.forward_length), side="right")
    boundary = boundary_bytes(graph, cuts, walls)
    always = constraints.apply(pinned | cuts.kept_at(walls))
    options = priced_options(graph, uses, pinned, constraints, cuts, walls, prices, stop)
    everything = constraints.apply(np.ones(len(graph.values), dtype=bool))
    options = [constraints.apply(always.copy()), *options, everything]
    active_block = block_of_backward(graph, of_value)
    table = [evaluate(graph, kept, always, of_value, active_block, count) for kept in options]
    may = np.array([graph.ops[i].recomputable for i in graph.forward_ops], dtype=np.float64)
    rerun = np.array([graph.rerun(i) for i in graph.forward_ops], dtype=np.int64)
    seconds = np.bincount(of_op, graph.seconds[rerun] * may, minlength=count).astype(np.float64, copy=False)
    return Blocks(
        walls,
        of_value,
        seconds,
        forward_peaks(graph, uses, cuts, of_op, count),
        start_bytes(graph, active_block, count),
        boundary,
        options,
        np.array([t[0] for t in table]),
        np.array([t[1] for t in table]),
        np.array([t[2] for t in table]),
    )


def boundary_bytes(graph: Graph, cuts: Cuts, walls: list[Position]) -> PerBlock:
    """``[i, j]``: bytes that cross into block j and not into block i < j, int64."""
    crosses = np.zeros((len(walls) + 1, len(graph.values)))
    for n, wall in enumerate(walls):
        crosses[n + 1, cuts.crossing(wall)] = 1.0
    shared = (crosses * graph.bytes) @ crosses.T
    result: PerBlock = np.triu(shared.diagonal() - shared, 1).astype(np.int64)
    return result


def priced_options(
    graph: Graph,
    uses: ForwardUses,
    pinned: ValueMask,
    constraints: Constraints,
    cuts: Cuts,
    walls: list[Position],
    prices: int,
    stop: Callable[[], bool],
) -> list[ValueMask]:
    """The values to keep at each of several prices a byte; values that cross a wall are free."""
    if stop():
        return []
    stages = find_stages(graph, uses, pinned, constraints, walls, 1)
    model = write_program(graph, uses, stages, memory=False)
    boundary = cuts.kept_at(walls)
    decided = np.flatnonzero(model.keep >= 0)
    if not len(decided):
        return []
    paid = decided[~boundary[decided]]
    total = max(1.0, float(graph.bytes[paid].sum()))
    found: list[ValueMask] = []
    for price in np.geomspace(0.05, 2.0, prices) * SECONDS / total:
        if stop():
            break
        for v in listed(ValueId, paid):
            model.program.cost[int(model.keep[v])] = price * float(graph.bytes[v])
        answer = model.program.solve(relax=True)
        if answer.values is not None:
            kept = model.kept(answer.values, model.keep < 0)
            kept = constraints.apply(kept & ((model.keep >= 0) | pinned) | boundary)
            if not any(np.array_equal(kept, other) for other in found):
                found.append(kept)
    return found


def block_of_backward(graph: Graph, of_value: BlockPerValue) -> BlockPerOp:
    """The block that runs at each base operation; the number of blocks before backward."""
    active_block = np.full(graph.base_length, int(of_value.max(initial=0)), dtype=np.int64)
    for i in graph.backward_ops:
        read = [of_value[v] for v in graph.walk_table.inputs[i] if of_value[v] >= 0]
        if read:
            active_block[i] = max(read)
    active_block[: graph.forward_length] = of_value.max(initial=0) + 1
    np.minimum.accumulate(active_block, out=active_block)
    return active_block


def evaluate(
    graph: Graph,
    kept: ValueMask,
    always: ValueMask,
    of_value: BlockPerValue,
    active_block: BlockPerOp,
    count: int,
) -> tuple[PerBlock, PerBlockSeconds, PerBlock]:
    """(bytes kept, seconds re-run, backward peak) of every block when all take this option."""
    schedule = recompute(graph, kept)
    lives = lifetimes(graph, schedule)
    timeline = simulate(graph, schedule)
    first = np.full(len(graph.ops), len(schedule), dtype=np.int64)
    first[schedule[::-1]] = np.arange(len(schedule) - 1, -1, -1)
    following = np.searchsorted(first[: graph.base_length], np.arange(len(schedule)), side="left")
    step_block = active_block[np.minimum(following, graph.base_length - 1)]
    backward = np.arange(len(schedule)) >= graph.forward_length
    begin = np.array([np.argmax(backward & (step_block <= b)) for b in range(count)], dtype=np.int64)
    inner = (lives.start < graph.forward_length) & (of_value[lives.value] >= 0)
    inner &= lives.used & (lives.end >= graph.forward_length)
    loose = inner & (graph.recompute_row[lives.value] >= 0)
    until = np.minimum(lives.end, begin[of_value[lives.value]] - 1)
    outside = np.zeros(len(schedule) + 1, dtype=np.int64)
    counted = loose & (until >= graph.forward_length)
    size = graph.bytes[lives.value]
    np.add.at(outside, np.full(int(counted.sum()), graph.forward_length), size[counted])
    np.subtract.at(outside, until[counted] + 1, size[counted])
    local = timeline.step_bytes - np.cumsum(outside[:-1])
    peak = np.zeros(count, dtype=np.int64)
    np.maximum.at(peak, step_block[backward], local[backward])
    own = loose & ~always[lives.value]
    kept_bytes = np.zeros(count, dtype=np.int64)
    np.add.at(kept_bytes, of_value[lives.value[own]], size[own])
    again = backward & ((schedule < graph.forward_length) | (schedule >= graph.base_length))
    base = graph.base_of[schedule[again]]
    seconds = np.zeros(count)
    owner = np.array(
        [max((of_value[v] for v in graph.ops[i].outputs), default=0) for i in listed(BaseOp, base)],
        dtype=np.int64,
    )
    np.add.at(seconds, owner, graph.seconds[schedule[again]])
    return kept_bytes, seconds, peak


def forward_peaks(graph: Graph, uses: ForwardUses, cuts: Cuts, of_op: BlockPerOp, count: int) -> PerBlock:
    """Peak of running each block forward when nothing of it is kept, beyond what crosses into it."""
    forward = cuts.start >= 0
    change = np.zeros(graph.forward_length + 1, dtype=np.int64)
    np.add.at(change, graph.producer[forward], graph.bytes[forward])
    np.subtract.at(change, uses.last_rerun[forward] + 1, graph.bytes[forward])
    live = np.cumsum(change[:-1]) + graph.workspace_bytes[: graph.forward_length]
    peak = np.zeros(count, dtype=np.int64)
    np.maximum.at(peak, of_op, live)
    first = np.searchsorted(of_op, np.arange(count), side="left")
    peak -= cuts.bytes[np.minimum(first, len(cuts.bytes) - 1)]
    np.maximum(peak, 0, out=peak)
    return peak


def start_bytes(graph: Graph, active_block: BlockPerOp, count: int) -> PerBlock:
    """Bytes of backward values (gradients) alive when the backward of each block begins."""
    values = np.flatnonzero(graph.producer >= graph.forward_length)
    lives = lifetimes(graph, graph.base_schedule)
    chosen = np.isin(lives.value, values)
    change = np.zeros(graph.base_length + 1, dtype=np.int64)
    np.add.at(change, lives.start[chosen], graph.bytes[lives.value[chosen]])
    np.subtract.at(change, lives.end[chosen] + 1, graph.bytes[lives.value[chosen]])
    live = np.cumsum(change[:-1])
    result = np.zeros(count, dtype=np.int64)
    for b in range(count):
        at = int(np.argmax(active_block <= b)) if (active_block <= b).any() else graph.base_length - 1
        result[b] = live[max(0, at - 1)]
    return result
