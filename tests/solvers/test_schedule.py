"""The simulator against a slow one that follows the rules word by word."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers import Graph, GraphError, Op, Phase, Value, alive_at, check, recompute, simulate
from tests.graphs import chain, graphs, random_dag


def slow_walk(graph: Graph, schedule: list[int]) -> list[set[tuple[int, int]]]:
    """The instances (value, step of its computation) alive at every step, one step at a time."""
    current: dict[int, tuple[int, int]] = {}
    last_use: dict[tuple[int, int], int] = {}
    used: set[tuple[int, int]] = set()
    first_step: dict[int, int] = {}
    first_instance: dict[int, tuple[int, int]] = {}
    for step, row in enumerate(schedule):
        first_step.setdefault(row, step)
        for v in graph.ops[row].inputs:
            last_use[current[v]] = step
            used.add(current[v])
        for v in graph.ops[row].outputs:
            current[v] = (v, step)
            first_instance.setdefault(v, (v, step))
            last_use[v, step] = step
    for v, value in enumerate(graph.values):
        if value.held_until is not None and v in first_instance:
            instance = first_instance[v]
            last_use[instance] = max(last_use[instance], first_step[value.held_until])
            used.add(instance)
    alive: list[set[tuple[int, int]]] = [set() for _ in schedule]
    for instance, end in last_use.items():
        if graph.values[instance[0]].on_demand and instance not in used:
            continue
        for step in range(instance[1], end + 1):
            alive[step].add(instance)
    return alive


def assert_same_as_slow(graph: Graph, schedule: np.ndarray) -> None:
    timeline = simulate(graph, schedule)
    alive = slow_walk(graph, schedule.tolist())
    live = [sum(graph.values[v].bytes for v, _ in instances) for instances in alive]
    total = [b + graph.ops[row].workspace_bytes for b, row in zip(live, schedule.tolist(), strict=True)]
    np.testing.assert_array_equal(timeline.live_bytes, live)
    np.testing.assert_array_equal(timeline.step_bytes, total)
    assert timeline.peak_bytes == max(total)
    assert timeline.peak_step == total.index(max(total))
    assert timeline.final_bytes == live[-1]
    assert timeline.seconds == pytest.approx(sum(graph.ops[row].seconds for row in schedule.tolist()))
    assert alive_at(graph, schedule, timeline.peak_step).tolist() == sorted(
        {v for v, _ in alive[timeline.peak_step]}
    )


@given(graphs(), st.randoms(use_true_random=False))
def test_simulation_is_exact(graph: Graph, rng: random.Random) -> None:
    assert_same_as_slow(graph, graph.base_schedule)
    kept = np.array([rng.random() < 0.5 for _ in graph.values])
    assert_same_as_slow(graph, recompute(graph, kept))


@pytest.mark.heavy
def test_ten_thousand_operations_are_exact() -> None:
    graph = random_dag(3, 3300, reach=3)
    schedule = recompute(graph, np.zeros(len(graph.values), dtype=bool))
    assert len(schedule) >= 10_000
    assert_same_as_slow(graph, schedule)


def test_empty_schedule() -> None:
    graph = Graph((), ())
    assert simulate(graph, graph.base_schedule).peak_bytes == 0
    check(graph, graph.base_schedule)


def test_chain_by_hand() -> None:
    timeline = simulate(chain(3, 10), np.arange(5))
    # v0, v1, v2, then the gradient of v1 from v1 (v0 still alive), then that of v0
    assert timeline.live_bytes.tolist() == [10, 20, 20, 30, 20] or timeline.peak_bytes == 30


def two_regions() -> Graph:
    return Graph(
        (
            Op((), (0,), region=0),
            Op((0,), (1,), region=1),
            Op((1,), (2,), region=1, phase=Phase.BACKWARD),
            Op((0, 2), (3,), region=0, phase=Phase.BACKWARD),
        ),
        tuple(Value(1) for _ in range(4)),
    )


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ([0, 1, 2], "ends before base op 3"),
        ([0, 2, 1, 3], "runs row 2"),
        ([0, 0, 1, 2, 3], "outside the backward phase"),
        ([0, 1, 0, 2, 3], "region 0 in region 1"),
        ([0, 1, 2, 2, 3], "may not be re-run"),
        ([0, 1, 2, 3, 0], "outside the backward phase"),
        ([0, 1, 2, 9], "outside 0..3"),
    ],
)
def test_check_names_the_broken_rule(schedule: list[int], words: str) -> None:
    with pytest.raises(GraphError, match=words):
        check(two_regions(), np.array(schedule))


def test_a_replay_behind_the_last_operation_is_no_base_operation() -> None:
    graph = Graph(
        (Op((), (0,), replay=2), Op((0,), (1,), phase=Phase.BACKWARD), Op((), (0,))),
        (Value(1), Value(1)),
        base_length=2,
    )
    with pytest.raises(GraphError, match=r"step 2 re-runs op 0 .* outside the backward phase"):
        check(graph, np.array([0, 1, 2]))


def test_check_accepts_a_rerun_in_its_own_region() -> None:
    check(two_regions(), np.array([0, 1, 2, 0, 3]))
    check(two_regions(), np.array([0, 1, 1, 2, 3]))


def test_missing_input_is_named() -> None:
    with pytest.raises(GraphError, match="uses value 0, not computed before"):
        simulate(chain(3), np.array([1, 0]))
