"""Frontiers of memory and time: model x budget x solver, beside what other methods reach.

    python benchmarks/frontier.py [--models gpt,unet] [--quick] [--solvers auto,ilp] [--budgets 20]
                                  [--time-limit 20] [--auto-seconds 60] [--solver-seconds 120]
                                  [--peer-seconds 300] [--out DIR] [--redraw] [--json]

Every model is captured once; every method is judged on that graph by the same simulator: dynamic
peak of one step with workspace zero, and *overhead*, the extra seconds over the schedule that
recomputes nothing, in the roofline cost model of the device "cpu" (max(flops / 125e9,
bytes / 10e9) + 2e-6 seconds an operation, views free). The peers: PyTorch's min-cut partitioner
with ``activation_memory_budget``, Chen's every k-th cut, checkpointing every block, Kusumoto's lower
sets, and rotor's chains. The solver ``chain`` (rotor with several options a block and local polish)
counts as a peer where auto must not be worse, but not in the median.

Writes one JSON file and one plot a model into ``--out``, a document of all files found there beside it
(``DIR.md``), and prints tables; with ``--json`` only JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.frontiers import peers, report
from benchmarks.frontiers.peers import Point, frontier
from benchmarks.models import MODELS, build
from planner.capture.capture import capture
from planner.costs.devices import find_device
from planner.problem.build import build_problem
from planner.training_step.step import Step
from solvers import portfolio
from solvers.model.schedule import simulate
from solvers.model.solution import Solution
from solvers.programs.lower_bound import holds_for_every_order, lower_bound
from solvers.registry import SOLVERS

MIB = 2**20
GOALS: dict[str, list[tuple[float, float]]] = {
    "gpt": [(83.9, 4.0), (69.9, 7.2), (55.9, 11.4), (55.93, 11.4), (41.9, 16.5), (34.3, 21.5)],
    "resnet": [(120.3, 5.7), (95.9, 12.4), (84.6, 16.8), (77.1, 27.0)],
    "unet": [(49.0, 8.4), (46.4, 9.5), (40.4, 12.0)],
}
"""Goals of the project at full size: dynamic peak in MiB (gpt: 55.93 is 40 %), most overhead in percent."""
LEAST_GOALS = {"gpt": 33.6, "unet": 34.4}
"""Peaks in MiB to be reached at any overhead, or to be proven out of reach."""
PEER_SOLVERS = ("checkpoint_all", "lower_sets", "chain")
"""Solvers that implement other people's methods: they count as peers too."""
DEFAULT_SOLVERS = ("auto", "ilp", "sqrt_n", *PEER_SOLVERS)
TOLERANCE = 1e-6
"""Overheads closer than this are equal."""


@dataclass
class Settings:
    """What a run does; see the command's options."""

    solvers: Sequence[str] = DEFAULT_SOLVERS
    budgets: int = 20
    time_limit: float = 20.0
    auto_seconds: float | None = None
    solver_seconds: float = 120.0
    peer_seconds: float = 300.0
    ratios: Sequence[float] = peers.RATIOS
    small: bool = False


@dataclass
class Result:
    """One model's part of the benchmark, as it is written to JSON; bytes are of the dynamic peak."""

    model: str
    description: str
    torch: str
    operations: int
    forward_operations: int
    graphs: int
    eager_peak_bytes: int
    peak_bytes: int
    seconds: float
    capture_seconds: float
    settings: dict[str, Any] = field(default_factory=dict)
    one: dict[str, Any] = field(default_factory=dict)
    sweep: dict[str, Any] = field(default_factory=dict)
    least: dict[str, Any] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    verdict: dict[str, Any] = field(default_factory=dict)
    goals: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


class Run:
    """All methods on one model; ``schedules`` keeps every point with its schedule."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.settings = settings
        begin = time.process_time()
        module, args, kwargs = build(name, small=settings.small)
        self.captured = capture(module, Step(args, kwargs))
        self.problem = build_problem(self.captured, find_device("cpu"), None)
        graph = self.graph = self.problem.graph
        self.result = Result(
            name,
            MODELS[name][0] + (" (small version)" if settings.small else ""),
            torch.__version__,
            graph.base_length,
            graph.forward_length,
            len(self.captured.graphs),
            self.problem.eager.peak_bytes,
            simulate(graph, graph.base_schedule).peak_bytes,
            graph.base_seconds,
            round(time.process_time() - begin, 2),
        )
        self.result.settings = {**asdict(settings), "knapsacks": peers.KNAPSACKS}
        self.schedules: list[Point] = []
        self.bounds: list[tuple[int, float]] = []
        self.add(peers.judge(graph, graph.base_schedule, "none", ""), None)

    # ---- the parts of a run --------------------------------------------------------------------------

    def all_parts(self) -> Result:
        """Run everything and return the record."""
        self.auto()
        self.others()
        self.peers()
        self.judge()
        return self.result

    def auto(self) -> None:
        """The portfolio: least peak, one budget by itself, and a sweep."""
        graph, limit = self.graph, self.settings.auto_seconds
        tell(f"{self.result.model}: least peak")
        least, process = timed(lambda: portfolio.solve(graph, None, time_limit=limit))
        self.solved(least, "least", None)
        self.result.least = {**self._figures(least), "process_seconds": process}
        tell(f"{self.result.model}: one budget")
        half = (self.result.peak_bytes + least.peak_bytes) // 2
        one, process = timed(lambda: portfolio.solve(graph, half, time_limit=limit))
        self.solved(one, "alone", half)
        self.result.one = {
            **self._figures(one),
            "budget_bytes": half,
            "gap": one.gap,
            "process_seconds": process,
        }
        tell(f"{self.result.model}: sweep of {self.settings.budgets}")
        self.budgets = [
            int(b) for b in np.linspace(self.result.peak_bytes, least.peak_bytes, self.settings.budgets)
        ]
        overheads, process = self._sweep(self.budgets, "sweep")
        rises = [
            b
            for b, now, before in zip(self.budgets[1:], overheads[1:], overheads, strict=False)
            if now < before - TOLERANCE
        ]
        self.result.sweep = {
            "budgets": len(self.budgets),
            "process_seconds": process,
            "monotone": not rises,
            "not_monotone_at_bytes": rises,
        }

    def _sweep(self, budgets: Sequence[int], setting: str) -> tuple[list[float], float]:
        each = self.settings.auto_seconds
        limit = None if each is None else each * len(budgets)
        solutions, process = timed(lambda: portfolio.sweep(self.graph, budgets, time_limit=limit))
        for budget, solution in zip(budgets, solutions, strict=True):
            self.solved(solution, setting, budget)
        return [self.overhead(s.seconds) if s.feasible else float("inf") for s in solutions], process

    def others(self) -> None:
        """The other solvers at the same budgets, and for the least peak."""
        for name in self.settings.solvers:
            if name in ("auto", "none", "manual", "exact"):
                continue
            tell(f"{self.result.model}: {name}")
            begin = time.perf_counter()
            budgets: list[int | None] = [None, *self.budgets[1::2], *self.budgets[2::2]]
            for n, budget in enumerate(budgets[:1] if name == "checkpoint_all" else budgets):
                if time.perf_counter() - begin > self.settings.solver_seconds:
                    self.result.missing.append(f"{name}: {len(budgets) - n} of {len(budgets)} budgets")
                    break
                limit = self.settings.time_limit
                solution = SOLVERS[name](self.graph, budget, time_limit=limit)
                self.solved(solution, "least" if budget is None else "budget", budget)

    def peers(self) -> None:
        """Chen's spacings, rotor's chains and PyTorch's partitioner."""
        tell(f"{self.result.model}: chen, rotor")
        for point in [*peers.chen(self.graph), *peers.rotor(self.graph)]:
            self.add(point, None)
        tell(f"{self.result.model}: torch's partitioner")
        ratios = self.settings.ratios
        points = peers.torch_points(
            self.captured, self.problem, ratios=ratios, time_limit=self.settings.peer_seconds
        )
        for point in points:
            self.add(point, None)
        for knapsack in peers.KNAPSACKS:
            done = len({p.setting for p in points if p.method == f"torch {knapsack}"})
            if done < len(ratios):
                self.result.missing.append(f"torch {knapsack}: {len(ratios) - done} of {len(ratios)} ratios")

    def judge(self) -> None:
        """Sweep over every peak that a peer reaches without being beaten by another, and the goals."""
        rivals = [
            p
            for p in self.schedules
            if p.method.startswith("torch ") or p.method in ("chen", "rotor", *PEER_SOLVERS)
        ]
        best = frontier(rivals)
        published = frontier([p for p in rivals if p.method != "chain"])
        goals = [] if self.settings.small else GOALS.get(self.result.model, [])
        least_goal = None if self.settings.small else LEAST_GOALS.get(self.result.model)
        wanted = sorted({p.peak_bytes for p in (*best, *published)} | {int(m * MIB) for m, _ in goals})
        wanted += [int(least_goal * MIB)] if least_goal is not None else []
        tell(f"{self.result.model}: {len(wanted)} peaks of peers and goals")
        if "auto" in self.settings.solvers:
            self._sweep(wanted, "peer's peak")
        compared = [self._compared(p) for p in best]
        lost = [c for c in compared if is_lost(c)]
        methods = sorted({p.method for p in rivals})
        self.result.verdict = {
            "compared": compared,
            "lost": lost,
            "median_reduction": median_reduction([self._compared(p) for p in published]),
            "most_possible": median_reduction([self._compared(p) for p in published], "bound"),
            "by_method": {m: self._against([r for r in rivals if r.method == m]) for m in methods},
        }
        for mib, percent in goals:
            reached, bound = self.auto_overhead(int(mib * MIB)), self.least_overhead(int(mib * MIB))
            moment = lower_bound(self.graph, int(mib * MIB)).moment
            self.result.goals.append(
                {"mib": mib, "most": percent / 100, "overhead": reached, "bound": bound,
                 "every_order": moment >= 0 and holds_for_every_order(self.graph, moment),
                 "reached": reached is not None and reached <= percent / 100 + TOLERANCE}
            )  # fmt: skip
        if least_goal is not None:
            reached = self.auto_overhead(int(least_goal * MIB))
            impossible = reached is None and not np.isfinite(
                lower_bound(self.graph, int(least_goal * MIB)).seconds
            )
            self.result.goals.append(
                {"mib": least_goal, "most": None, "overhead": reached, "proven_impossible": impossible,
                 "reached": reached is not None or impossible}
            )  # fmt: skip

    # ---- bookkeeping -----------------------------------------------------------------------------------

    def overhead(self, seconds: float) -> float:
        """Extra seconds relative to the schedule that recomputes nothing."""
        return seconds / self.graph.base_seconds - 1

    def auto_overhead(self, peak_bytes: int) -> float | None:
        """Least overhead of the portfolio's schedules within a peak; None where none fits."""
        fitting = [p.seconds for p in self.schedules if p.method == "auto" and p.peak_bytes <= peak_bytes]
        return self.overhead(min(fitting)) if fitting else None

    def least_overhead(self, peak_bytes: int) -> float:
        """What no schedule within a peak undercuts: a proof for a larger budget holds for it too."""
        proven = [seconds for budget, seconds in self.bounds if budget >= peak_bytes]
        return max([0.0, *map(self.overhead, proven)])

    def solved(self, solution: Solution, setting: str, budget: int | None) -> None:
        """Record a solver's answer; an infeasible one counts as the least peak that it is."""
        point = peers.judge(self.graph, solution.schedule, solution.solver, setting)
        if not point.valid:
            raise RuntimeError(f"{solution.solver} returned a schedule that breaks the rules")
        if solution.feasible and solution.bound_seconds is not None and budget is not None:
            self.bounds.append((budget, solution.bound_seconds))
        self.add(point, budget, solve_seconds=solution.solve_seconds, gap=solution.gap)

    def add(self, point: Point, budget: int | None, **more: Any) -> None:
        """Record a point."""
        self.schedules.append(point)
        record = asdict(point) | {"budget_bytes": budget, "overhead": self.overhead(point.seconds)} | more
        record["reruns"] = len(point.schedule) - self.graph.base_length
        self.result.points.append(
            {k: rounded(v) for k, v in record.items() if k not in ("schedule", "seconds")}
        )

    def _figures(self, solution: Solution) -> dict[str, Any]:
        return {"peak_bytes": solution.peak_bytes, "overhead": self.overhead(solution.seconds)}

    def _against(self, points: list[Point]) -> dict[str, Any]:
        own = [self._compared(p) for p in frontier(points)]
        lost = sum(is_lost(c) for c in own)
        return {"points": len(own), "median_reduction": median_reduction(own), "lost": lost}

    def _compared(self, point: Point) -> dict[str, Any]:
        return {
            "method": point.method,
            "setting": point.setting,
            "peak_bytes": point.peak_bytes,
            "overhead": self.overhead(point.seconds),
            "auto": self.auto_overhead(point.peak_bytes),
            "bound": self.least_overhead(point.peak_bytes),
        }


def is_lost(compared: dict[str, Any]) -> bool:
    """Whether a peer is better at this peak."""
    return compared["auto"] is None or compared["auto"] > compared["overhead"] + TOLERANCE


def median_reduction(compared: Sequence[dict[str, Any]], by: str = "auto") -> float | None:
    """Median of 1 - auto's overhead (or the bound) / the peer's, where the peer has any and auto fits."""
    cuts = [
        1 - c[by] / c["overhead"] for c in compared if c["auto"] is not None and c["overhead"] > TOLERANCE
    ]
    return float(np.median(cuts)) if cuts else None


def timed(action: Any) -> tuple[Any, float]:
    """What an action returns and the process seconds that it took."""
    begin = time.process_time()
    result = action()
    return result, round(time.process_time() - begin, 3)


def rounded(value: Any) -> Any:
    """Seconds and overheads with six digits: JSON for people."""
    return round(value, 6) if isinstance(value, float) else value


def tell(text: str) -> None:
    """Progress goes to stderr."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated: " + ", ".join(MODELS))
    parser.add_argument("--solvers", default=",".join(DEFAULT_SOLVERS), help="comma-separated")
    parser.add_argument("--budgets", type=int, default=20, help="budgets of the sweep")
    parser.add_argument("--time-limit", type=float, default=20.0, help="wall seconds a budget and solver")
    parser.add_argument("--auto-seconds", type=float, help="the same for auto; its own limits when not given")
    parser.add_argument(
        "--solver-seconds", type=float, default=120.0, help="wall seconds a solver, all budgets"
    )
    parser.add_argument("--peer-seconds", type=float, default=300.0, help="wall seconds of the partitioner")
    parser.add_argument("--out", type=Path, default=Path("docs/results/frontier"))
    parser.add_argument("--quick", action="store_true", help="small versions, five budgets, three ratios")
    parser.add_argument(
        "--redraw", action="store_true", help="only plots and document, of the JSON files there"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    if options.redraw:
        for path in sorted(options.out.glob("*.json")):
            report.write(options.out, json.loads(path.read_text()))
        return
    names, solvers_ = options.models.split(","), options.solvers.split(",")
    for name in solvers_:
        if name not in SOLVERS:
            parser.error(f"no solver {name!r}; expected some of {', '.join(SOLVERS)}")
    for name in names:
        if name not in MODELS:
            parser.error(f"no model {name!r}; expected some of {', '.join(MODELS)}")
    # PyTorch compiles a line of code that nests as deep as a graph has inputs.
    sys.setrecursionlimit(10_000)
    settings = Settings(
        solvers_,
        options.budgets,
        options.time_limit,
        options.auto_seconds,
        options.solver_seconds,
        options.peer_seconds,
    )
    if options.quick:
        settings.small, settings.budgets, settings.ratios = True, min(5, options.budgets), (1.0, 0.5, 0.0)
    results = []
    for name in names:
        result = asdict(Run(name, settings).all_parts())
        results.append(result)
        report.write(options.out, result)
        if not options.json:
            report.show(result)
    if options.json:
        json.dump(results, sys.stdout, indent=1)
        return
    report.show_verdict(results)


if __name__ == "__main__":
    main()
