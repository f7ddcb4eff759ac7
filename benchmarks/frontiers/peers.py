"""What other methods make of the same graph in the same cost model.

PyTorch's min-cut partitioner is run on a copy of the captured joint graph; its forward and backward
graphs, whose nodes keep their names, are read back as a schedule of the solvers' rows and simulated
like any other. Each of its answers is judged in up to three forms, and keeps the best:

* *own*: exactly its program: its order, its re-runs, and what it computes in the backward only;
* *checked*: the same re-runs, with forward operations where they were captured;
* *just in time*: what it saves, with everything else re-run right before it is needed.
"""

import contextlib
import dataclasses
import importlib.util
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch._functorch.config as functorch_config
from torch._functorch import partitioners
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule

from planner.capture.captured_step import CapturedStep
from planner.graph.joint_graph import JointGraph
from planner.problem.build import Problem
from solvers.chains import rotor as rotor_
from solvers.chains.blocks import find_blocks
from solvers.model.constraints import NO_CONSTRAINTS
from solvers.model.cut_points import find_cuts, forward_uses, pinned_values
from solvers.model.graph import Graph, GraphError
from solvers.model.incumbent import Search
from solvers.model.just_in_time import recompute
from solvers.model.schedule import check, simulate
from solvers.sqrt_n import families, weights

KNAPSACKS = ("dp", "greedy", "ilp") if importlib.util.find_spec("scipy") else ("dp", "greedy")
"""Solvers of the partitioner; its ilp is SciPy's."""
RATIOS = tuple(round(1 - i / 10, 1) for i in range(11))
MOST_CHEN = 80
"""Most spacings that are tried on one graph."""


@dataclass(frozen=True)
class Point:
    """One simulated answer.

    Attributes:
        method: Who gave it: ``torch dp``, ``chen``, the name of a solver.
        setting: What was asked of it.
        peak_bytes, seconds: Simulated.
        solve_seconds: Wall seconds that it took.
        valid: Whether the schedule obeys all rules of :func:`solvers.model.schedule.check`.
        schedule: Rows of the graph.
    """

    method: str
    setting: str
    peak_bytes: int
    seconds: float
    solve_seconds: float = 0.0
    valid: bool = True
    schedule: np.ndarray = field(
        default_factory=lambda: np.zeros(0, dtype=np.int64), repr=False, compare=False
    )


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both peak and seconds, by falling peak."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, p.seconds)):
        if not best or point.seconds < best[-1].seconds * (1 - 1e-12):
            best.append(point)
    return best[::-1]


def chen(graph: Graph) -> list[Point]:
    """Keep the value at every k-th articulation point, for all k (at most ``MOST_CHEN`` of them)."""
    uses = forward_uses(graph)
    pinned = pinned_values(graph, uses)
    cuts = find_cuts(graph, uses, pinned)
    places = np.flatnonzero(cuts.articulation)
    if not len(places):
        return []
    spacings = np.unique(np.geomspace(1, len(places), MOST_CHEN).astype(int))
    if len(places) <= MOST_CHEN:
        spacings = np.arange(1, len(places) + 1)
    points = []
    for k in spacings.tolist():
        begin = time.perf_counter()
        walls = places[k - 1 :: k].tolist()
        kept = pinned | cuts.kept_at(walls)
        last = kept | ((graph.producer >= walls[-1]) & (graph.producer < graph.forward_length))
        options = [judge(graph, recompute(graph, k_), "chen", f"every {k}") for k_ in (kept, last)]
        points += [
            dataclasses.replace(p, solve_seconds=time.perf_counter() - begin) for p in frontier(options)
        ]
    return points


def rotor(graph: Graph) -> list[Point]:
    """The chain dynamic program as published in 2019: of each block everything is kept or nothing.

    Blocks lie between articulation points (or the narrowest cuts); one table gives all points.
    """
    begin = time.perf_counter()
    uses = forward_uses(graph)
    pinned = pinned_values(graph, uses)
    cuts = find_cuts(graph, uses, pinned)
    needed = (uses.last_backward >= 0) & ~pinned
    positions = families(cuts)
    walls = rotor_.choose_walls(weights(graph, needed), positions[0], 48) if positions else []
    if not walls:
        return []
    blocks = find_blocks(graph, uses, cuts, pinned, NO_CONSTRAINTS, walls, prices=0)
    search = Search("rotor", graph, None)
    most = search.try_kept(np.ones(len(graph.values), dtype=bool)).peak_bytes
    table = rotor_.fill(blocks, most)
    whole = table.seconds[0, -1]
    fine = np.flatnonzero(np.isfinite(whole))
    distinct = fine[np.concatenate(([True], np.diff(whole[fine]) < 0))] if len(fine) else fine
    points = []
    for slots in distinct[:: max(1, len(distinct) // 12)].tolist():
        retained = rotor_.plan(blocks, cuts, table, slots)
        if retained is not None:
            schedule = rotor_.judge(search, blocks, cuts, pinned, retained).schedule
            points.append(judge(graph, schedule, "rotor", f"slot {slots}"))
    taken = (time.perf_counter() - begin) / max(1, len(points))
    return [dataclasses.replace(p, solve_seconds=taken) for p in points]


def judge(graph: Graph, schedule: np.ndarray, method: str, setting: str) -> Point:
    """Simulate a schedule and check it.

    Raises:
        GraphError: If a step reads what is not there.
    """
    timeline = simulate(graph, schedule)
    try:
        check(graph, schedule)
        valid = True
    except GraphError:
        valid = False
    return Point(method, setting, timeline.peak_bytes, timeline.seconds, 0.0, valid, schedule)


# ---- PyTorch's partitioner ------------------------------------------------------------------------------


def torch_points(
    captured: CapturedStep,
    problem: Problem,
    *,
    knapsacks: Sequence[str] = KNAPSACKS,
    ratios: Sequence[float] = RATIOS,
    time_limit: float | None = None,
) -> list[Point]:
    """The partitioner's answers to several memory ratios, each the same for all graphs of the step.

    Args:
        captured, problem: The step.
        knapsacks: Values of ``activation_memory_budget_solver``.
        ratios: Values of ``activation_memory_budget``.
        time_limit: Wall seconds after which no further ratio is tried.
    """
    started = time.perf_counter()
    reader = _Reader(captured, problem)
    copies = {i: _copy(g.joint) for i, g in enumerate(captured.graphs) if g.joint is not None}
    points: list[Point] = []
    with _each_cut_once():
        # The knapsacks share the time, so that a time limit leaves every one of them some ratios.
        for ratio in _spread(ratios):
            for knapsack in knapsacks:
                if time_limit is not None and time.perf_counter() - started > time_limit:
                    return points
                begin = time.perf_counter()
                halves = {}
                for i, copied in copies.items():
                    joint = captured.graphs[i].joint
                    assert joint is not None
                    halves[i] = partition(copied, joint.forward_outputs, knapsack, ratio)
                taken = time.perf_counter() - begin
                options = reader.judge(halves, f"torch {knapsack}", f"ratio {ratio:g}")
                points += [dataclasses.replace(p, solve_seconds=taken) for p in options]
    return points


def _spread(ratios: Sequence[float]) -> list[float]:
    ends = [r for r in (1.0, 0.0) if r in ratios]
    inner = [r for r in ratios if r not in ends]
    return [*ends, *inner[::2], *inner[1::2]]


@dataclass(frozen=True)
class Partition:
    """One half-and-half: names of the nodes of each half in order, and of what is saved in between."""

    forward: list[str]
    backward: list[str]
    saved: list[str]


class _Reader:
    """Reads partitions as schedules of the problem's rows."""

    def __init__(self, captured: CapturedStep, problem: Problem) -> None:
        self.captured, self.problem = captured, problem
        self.graph = problem.graph
        self.row_of = {(s.graph, s.op): r for r, s in enumerate(problem.sources) if s.instance == 0}
        self.value_of: dict[tuple[int, int], int] = {}
        self.by_name: dict[tuple[int, str], int] = {}
        for index, captured_graph in enumerate(captured.graphs):
            joint = captured_graph.joint
            for op in joint.ops if joint is not None else ():
                self.by_name[index, op.node.name] = op.index
                outputs = self.graph.ops[self.row_of[index, op.index]].outputs
                for storage, value in zip(op.allocates, outputs, strict=False):
                    self.value_of[index, storage] = value

    def judge(self, halves: dict[int, Partition], method: str, setting: str) -> list[Point]:
        """The forms of one answer that are not beaten by another form."""
        points = [judge(self.graph, recompute(self.graph, self._kept(halves)), method, setting)]
        for deferring in (True, False):
            with contextlib.suppress(GraphError):
                points.append(judge(self.graph, self._own(halves, deferring), method, setting))
        return frontier(points)

    def _ops(self, index: int, names: Sequence[str]) -> list[int]:
        return [self.by_name[index, n] for n in names if (index, n) in self.by_name]

    def _kept(self, halves: dict[int, Partition]) -> np.ndarray:
        kept = self.graph.recompute_row < 0
        for index, half in halves.items():
            joint = self.captured.graphs[index].joint
            assert joint is not None
            nodes = {n.name: n for n in joint.graph.nodes}
            for name in half.saved:
                for storage in joint.storages_of(nodes[name]):
                    if (index, storage) in self.value_of:
                        kept[self.value_of[index, storage]] = True
        return kept

    def _own(self, halves: dict[int, Partition], deferring: bool) -> np.ndarray:
        graph, sources = self.graph, self.problem.sources
        in_forward = {i: set(self._ops(i, h.forward)) for i, h in halves.items()}
        in_backward = {i: self._ops(i, h.backward) for i, h in halves.items()}
        late = {i: set(ops) - in_forward[i] for i, ops in in_backward.items()}
        held = set(graph.held_table[0].tolist())
        steps: list[int] = []
        done: set[int] = set()
        opened: set[int] = set()

        def run(row: int) -> None:
            steps.append(graph.rerun(row) if row in done else row)
            done.add(row)

        for row in range(graph.base_length):
            source = sources[row]
            index = source.graph
            if index not in halves or source.instance:
                run(row)
            elif row < graph.forward_length:
                if not (deferring and source.op in late[index] and not held & set(graph.ops[row].outputs)):
                    run(row)
            elif index not in opened:
                opened.add(index)
                early = in_forward[index] - set(in_backward[index])
                for op in [*sorted(early), *in_backward[index]]:
                    again = self.row_of[index, op]
                    if again >= graph.forward_length or op not in early:
                        run(again)
                joint = self.captured.graphs[index].joint
                assert joint is not None
                for op in range(joint.forward_length, len(joint.ops)):
                    if self.row_of[index, op] not in done:
                        run(self.row_of[index, op])
        return _hold_to_the_end(graph, steps)


def _hold_to_the_end(graph: Graph, steps: list[int]) -> np.ndarray:
    """Gradients are held until the last captured operation: that one stays last."""
    last = graph.base_length - 1
    if steps[-1] != last:
        steps = [s for s in steps if s != last] + [last]
    return np.array(steps, dtype=np.int64)


# ---- private PyTorch: the partitioner, seen with torch 2.13 --------------------------------------------


def partition(copied: GraphModule, forward_outputs: int, knapsack: str, ratio: float) -> Partition:
    """Run the min-cut partitioner on a copy of a joint graph, which it may change.

    Duplicate operations stay (``cse`` off): every method is judged on the same operations.
    """
    settings = {
        "activation_memory_budget": ratio,
        "activation_memory_budget_solver": knapsack,
        "cse": False,
    }
    with functorch_config.patch(settings):
        forward, backward = partitioners.min_cut_rematerialization_partition(
            copied, None, num_fwd_outputs=forward_outputs
        )

    def called(half: GraphModule) -> list[str]:
        return [n.name for n in half.graph.nodes if n.op == "call_function"]

    given = [n.name for n in backward.graph.nodes if n.op == "placeholder" and "tangents" not in n.name]
    return Partition(called(forward), called(backward), given)


def _copy(joint: JointGraph) -> GraphModule:
    graph = FxGraph()
    names: dict[Any, Any] = {}
    result = graph.graph_copy(joint.graph, names)
    output = graph.output(result)
    output.meta = dict(joint.graph.output_node().meta)
    for old, new in names.items():
        if old.name != new.name:
            raise RuntimeError(f"node {old.name} is called {new.name} in the copy")
    return GraphModule(joint.module, graph)


@contextlib.contextmanager
def _each_cut_once() -> Iterator[None]:
    """The partitioner solves the same cuts and counts the same operations for every ratio: remember them."""
    cut, runtime = partitioners.solve_min_cut, partitioners.estimate_runtime
    cuts: dict[Any, Any] = {}
    runtimes: dict[Any, float] = {}

    def solve_min_cut(graph: FxGraph, info: Any, options: Any, dont_ban: Any = None) -> Any:
        key = (id(graph), dataclasses.astuple(options), frozenset(dont_ban or ()))
        if key not in cuts:
            cuts[key] = cut(graph, info, options, dont_ban)
        saved, banned = cuts[key]
        return list(saved), type(banned)(banned)

    def estimate_runtime(node: Any) -> float:
        if node not in runtimes:
            runtimes[node] = runtime(node)
        return runtimes[node]

    partitioners.solve_min_cut, partitioners.estimate_runtime = solve_min_cut, estimate_runtime
    try:
        with torch.no_grad():
            yield
    finally:
        partitioners.solve_min_cut, partitioners.estimate_runtime = cut, runtime
