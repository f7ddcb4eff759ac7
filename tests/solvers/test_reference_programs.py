"""The programs that solvers write as arrays are those that are specified as PuLP models."""

import numpy as np
import pytest

from solvers import Graph, simulate
from solvers.milp import Outcome
from solvers.model.constraints import NO_CONSTRAINTS, Constraints
from solvers.model.cut_points import forward_uses, pinned_values
from solvers.programs import exact_ilp
from solvers.programs.single_recompute import SECONDS, find_stages, write_program
from solvers.reference.programs import exact_model, single_recompute_model
from tests.graphs import random_dag, transformer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SINGLE: list[tuple[Graph, list[int], int]] = [
    *((random_dag(seed, 10 + seed, regions=1 + seed % 2), [], 40) for seed in range(6)),
    (random_dag(7, 24), [8, 15], 40),  # walls
    (random_dag(0, 18, plain=True, reach=3), [4, 8, 12], 40),
    (random_dag(8, 20), [9], 3),  # thinned times
    (transformer(1), [7], 40),
]


@pytest.mark.parametrize("case", range(len(SINGLE)))
@pytest.mark.parametrize("fraction", [0.75, 0.9])
def test_the_single_recompute_program_is_its_specification(case: int, fraction: float) -> None:
    graph, walls, times = SINGLE[case]
    uses = forward_uses(graph)
    stages = find_stages(graph, uses, pinned_values(graph, uses), NO_CONSTRAINTS, walls, times)
    model = write_program(graph, uses, stages)
    budget = int(fraction * simulate(graph, graph.base_schedule).peak_bytes)
    model.set_budget(budget)
    answer = model.program.solve(time_limit=30)
    expected = single_recompute_model(graph, uses, stages, model.moments.tolist(), budget).least_seconds()
    if expected is None:
        assert answer.outcome is Outcome.INFEASIBLE
    else:
        assert answer.outcome is Outcome.OPTIMAL
        assert answer.objective / SECONDS * graph.base_seconds == pytest.approx(expected, rel=1e-5, abs=1e-6)


def _constrained(graph: Graph) -> Constraints:
    keep = np.zeros(len(graph.values), dtype=bool)
    recompute = keep.copy()
    keep[0], recompute[1] = True, True
    return Constraints(keep, recompute)


@pytest.mark.parametrize("seed", [1, 12, 16, 18, 20, 21, 23])
@pytest.mark.parametrize("constrained", [False, True])
def test_the_exact_program_is_its_specification(seed: int, constrained: bool) -> None:
    graph = random_dag(seed, 6, regions=1 + seed % 2, plain=seed % 3 == 0, reach=2)
    constraints = _constrained(graph) if constrained else NO_CONSTRAINTS
    budget = int(0.93 * simulate(graph, graph.base_schedule).peak_bytes)
    solution = exact_ilp.solve(graph, budget, constraints=constraints)
    expected = exact_model(graph, budget, constraints).least_seconds()
    if expected is None:
        assert not solution.feasible
    else:
        assert solution.seconds == pytest.approx(expected, rel=1e-5)
