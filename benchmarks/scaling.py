"""Solve time and host memory against the size of the graph.

    python benchmarks/scaling.py [--kinds chain,transformer,random] [--sizes 100,1000,10000,20000]
                                 [--solvers auto,ilp] [--time-limit 60] [--budget 0.6] [--out FILE] [--json]

Synthetic training graphs of about so many operations, forward and backward together, solved for a
share of the peak that they have when nothing is recomputed. Every solve runs in a process of its
own, so that its peak memory is known, and is ended at ten times its time limit.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from solvers.model.graph import Graph
from solvers.model.schedule import check, simulate
from solvers.registry import SOLVERS
from tests import graphs

SIZES = (100, 300, 1_000, 3_000, 10_000, 20_000)
DEFAULT_SOLVERS = ("auto", "ilp", "chain", "lower_sets", "sqrt_n")
KINDS: dict[str, Callable[[int], Graph]] = {
    "chain": lambda ops: graphs.chain(ops // 2),
    "transformer": lambda ops: graphs.transformer(max(1, ops // 27)),
    "random": lambda ops: graphs.random_dag(0, int(ops / 2.6), plain=True),
}
"""Kinds of graphs, made for a number of operations."""


@dataclass(frozen=True)
class Measurement:
    """One solve.

    Attributes:
        kind, operations: The graph, operations of forward and backward.
        solver, status: Who solved it and how well; ``stopped`` when it was ended.
        peak: Share of the peak when nothing is recomputed.
        overhead: Extra seconds over recomputing nothing, as a fraction.
        wall_seconds, process_seconds: Time of the solve.
        host_bytes: Growth of the process's peak memory.
        valid: Whether the schedule obeys all rules.
    """

    kind: str
    operations: int
    solver: str
    status: str
    peak: float = 0.0
    overhead: float = 0.0
    wall_seconds: float = 0.0
    process_seconds: float = 0.0
    host_bytes: int = 0
    valid: bool = False


def measure(kind: str, graph: Graph, solver: str, budget: float, time_limit: float) -> Measurement:
    """Solve in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_solve, args=(sender, kind, graph, solver, budget, time_limit))
    process.start()
    sender.close()
    result = Measurement(kind, graph.base_length, solver, "stopped", wall_seconds=10 * time_limit)
    try:
        if receiver.poll(10 * time_limit):
            result = receiver.recv()
    except EOFError:
        result = Measurement(kind, graph.base_length, solver, "failed")
    process.kill()
    process.join()
    return result


def _solve(
    sender: Connection, kind: str, graph: Graph, solver: str, budget: float, time_limit: float
) -> None:
    base = simulate(graph, graph.base_schedule).peak_bytes
    memory = host_bytes()
    wall, process = time.perf_counter(), time.process_time()
    solution = SOLVERS[solver](graph, int(base * budget), time_limit=time_limit)
    wall, process = time.perf_counter() - wall, time.process_time() - process
    used = host_bytes() - memory
    check(graph, solution.schedule)
    timeline = simulate(graph, solution.schedule)
    sender.send(
        Measurement(
            kind,
            graph.base_length,
            solver,
            str(solution.status),
            round(timeline.peak_bytes / base, 4),
            round(timeline.seconds / graph.base_seconds - 1, 6),
            round(wall, 3),
            round(process, 3),
            used,
            True,
        )
    )


def host_bytes() -> int:
    """Peak memory of this process and its children so far."""
    usage = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return 1024 * max(usage)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--solvers", default=",".join(DEFAULT_SOLVERS))
    parser.add_argument(
        "--budget", type=float, default=0.6, help="share of the peak when nothing is recomputed"
    )
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--out", type=Path, help="file to write JSON to, and a document beside it (.md)")
    parser.add_argument("--quick", action="store_true", help="up to 1,000 operations, 5 seconds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    sizes = [int(s) for s in options.sizes.split(",")]
    limit = options.time_limit
    if options.quick:
        sizes, limit = [s for s in sizes if s <= 1_000], min(limit, 5.0)
    results = []
    for kind in options.kinds.split(","):
        for size in sizes:
            graph = KINDS[kind](size)
            for solver in options.solvers.split(","):
                print(f"{kind} {graph.base_length} {solver}", file=sys.stderr, flush=True)
                results.append(measure(kind, graph, solver, options.budget, limit))
    text = json.dumps([asdict(r) for r in results], indent=1)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
        options.out.with_suffix(".md").write_text("\n".join(document(options.out, results, limit)) + "\n")
    if options.json:
        print(text)
    else:
        show(results, limit)


HEADINGS = ("graph", "ops", "solver", "status", "peak", "overhead", "wall s", "process s", "memory")


def cells(r: Measurement, time_limit: float) -> list[str]:
    """A measurement as a row of the table."""
    late = " (late)" if r.wall_seconds > time_limit + 1 else ""
    return [
        r.kind,
        f"{r.operations:,}",
        r.solver,
        r.status,
        f"{100 * r.peak:.1f} %",
        f"{100 * r.overhead:.2f} %",
        f"{r.wall_seconds:.2f}{late}",
        f"{r.process_seconds:.2f}",
        f"{r.host_bytes / 2**20:.0f} MiB",
    ]


def show(results: Sequence[Measurement], time_limit: float) -> None:
    """Print the table."""
    table = Table(title=f"time limit {time_limit:g} s")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("graph", "solver", "status") else "right")
    for r in results:
        table.add_row(*cells(r, time_limit))
    Console().print(table)


def document(out: Path, results: Sequence[Measurement], time_limit: float) -> Iterator[str]:
    """The lines of a document with the table."""
    yield "# Solve time and memory against the size of the graph\n"
    solvers = ",".join(dict.fromkeys(r.solver for r in results))
    options = f"--solvers {solvers} --time-limit {time_limit:g} --out {out}"
    yield (
        f"Made by `python benchmarks/scaling.py {options}`; the same numbers are in "
        f"[{out.name}]({out.name}). Synthetic training graphs, each solved for a share of the peak that it "
        "has when nothing is recomputed. "
        "*memory* is the growth of the process's peak memory while it solved; a solve that ends more than a "
        "second behind its time limit is called late.\n"
    )
    yield f"| {' | '.join(HEADINGS)} |"
    yield "|---" * len(HEADINGS) + "|"
    for r in results:
        yield f"| {' | '.join(cells(r, time_limit))} |"


if __name__ == "__main__":
    main()
