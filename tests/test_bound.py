"""The lower bound: true, and met where it can be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import Graph, portfolio, recompute, simulate
from solvers.bound import lower_bound
from tests.graphs import chain, graphs, transformer


@settings(deadline=None)
@given(graphs(most=20), st.integers(0, 2**20))
def test_no_schedule_is_below_the_bound(graph: Graph, seed: int) -> None:
    kept = np.random.default_rng(seed).random(len(graph.values)) < 0.6
    timeline = simulate(graph, recompute(graph, kept))
    assert lower_bound(graph, timeline.peak_bytes).seconds <= timeline.seconds + 1e-6


@settings(deadline=None)
@given(graphs(most=20))
def test_falls_with_the_budget(graph: Graph) -> None:
    peak = simulate(graph, graph.base_schedule).peak_bytes
    bounds = [lower_bound(graph, int(f * peak)).seconds for f in (0.4, 0.6, 0.8, 1.0)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == graph.base_seconds


def test_is_infinite_where_the_step_itself_does_not_fit() -> None:
    bound = lower_bound(chain(10), 150)
    assert np.isinf(bound.seconds)
    assert bound.moment >= 10


@pytest.mark.parametrize("fraction", [0.8, 0.6])
def test_is_sharp_on_a_transformer(fraction: float) -> None:
    graph = transformer(6)
    budget = int(fraction * simulate(graph, graph.base_schedule).peak_bytes)
    solution = portfolio.solve(graph, budget, time_limit=10)
    assert solution.gap is not None
    assert solution.gap <= 0.02
