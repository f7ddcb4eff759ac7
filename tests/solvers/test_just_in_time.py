"""Just-in-time recomputation."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers import Graph, check, recompute, simulate
from tests.graphs import chain, graphs


@given(graphs(), st.randoms(use_true_random=False))
def test_schedules_are_valid_and_rerun_each_operation_at_most_once(graph: Graph, rng: random.Random) -> None:
    kept = np.array([rng.random() < 0.5 for _ in graph.values])
    schedule = recompute(graph, kept)
    check(graph, schedule)
    base = graph.base_of[schedule]
    assert np.bincount(base, minlength=graph.base_length).max() <= 2


@given(graphs())
def test_keeping_everything_changes_nothing(graph: Graph) -> None:
    schedule = recompute(graph, np.ones(len(graph.values), dtype=bool))
    np.testing.assert_array_equal(schedule, graph.base_schedule)


@given(graphs(), st.randoms(use_true_random=False))
def test_kept_values_cost_nothing_to_read(graph: Graph, rng: random.Random) -> None:
    kept = np.array([rng.random() < 0.5 for _ in graph.values])
    more = kept | np.array([rng.random() < 0.3 for _ in graph.values])
    assert (
        simulate(graph, recompute(graph, more)).seconds
        <= simulate(graph, recompute(graph, kept)).seconds + 1e-9
    )


@given(graphs())
def test_what_is_forgotten_is_recomputed_again(graph: Graph) -> None:
    nothing = np.zeros(len(graph.values), dtype=bool)
    table = graph.walk_table
    schedule = recompute(graph, nothing, forget=lambda rows: [v for row in rows for v in table.outputs[row]])
    check(graph, schedule)
    assert len(schedule) >= len(recompute(graph, nothing))


def test_constant_memory_on_a_chain() -> None:
    graph = chain(50)
    table = graph.walk_table
    schedule = recompute(
        graph,
        np.zeros(50 * 2 - 1, dtype=bool),
        forget=lambda rows: [v for row in rows for v in table.outputs[row]],
    )
    assert simulate(graph, schedule).peak_bytes <= 400


def test_a_long_chain_needs_no_recursion() -> None:
    graph = chain(30_000)
    kept = np.zeros(len(graph.values), dtype=bool)
    assert len(recompute(graph, kept)) == pytest.approx(3 * 30_000, abs=5)
