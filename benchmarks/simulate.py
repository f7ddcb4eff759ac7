"""How long the simulator takes for 10,000 operations: the claim is 10 milliseconds.

python benchmarks/simulate.py
"""

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from solvers import simulate
from tests.graphs import random_dag


def best_milliseconds(forward_length: int, repeats: int = 20) -> tuple[int, float]:
    """Number of operations of a random graph and the best time of simulating it."""
    graph = random_dag(0, forward_length)
    simulate(graph, graph.base_schedule)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        simulate(graph, graph.base_schedule)
        times.append(time.perf_counter() - begin)
    return graph.base_length, 1000 * float(np.min(times))


def main() -> None:
    """Print a line a size."""
    for forward_length in (400, 4_000, 40_000):
        length, milliseconds = best_milliseconds(forward_length)
        print(f"{length:8d} ops {milliseconds:8.2f} ms")


if __name__ == "__main__":
    main()
