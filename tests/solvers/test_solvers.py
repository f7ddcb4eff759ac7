"""What holds for every solver: valid schedules, budgets kept, constraints honoured."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import solvers
from solvers import SOLVERS, Constraints, Graph, GraphError, Status, check, simulate
from solvers.checkpoint_all import block_of
from solvers.model.in_flight import InFlight
from solvers.registry import found_solvers
from tests.graphs import chain, graphs, transformer


def assert_valid(name: str, graph: Graph, fraction: float | None) -> None:
    peak = simulate(graph, graph.base_schedule).peak_bytes
    budget = None if fraction is None else int(fraction * peak)
    solution = SOLVERS[name](graph, budget, time_limit=2)
    check(graph, solution.schedule)
    timeline = simulate(graph, solution.schedule)
    assert (timeline.peak_bytes, timeline.seconds) == (solution.peak_bytes, solution.seconds)
    if budget is not None:
        assert solution.feasible == (solution.peak_bytes <= budget)
    if solution.bound_seconds is not None:
        assert solution.bound_seconds <= solution.seconds + 1e-9


FRACTIONS = st.one_of(st.none(), st.floats(0.05, 1.1))


@pytest.mark.parametrize("name", SOLVERS)
@settings(deadline=None, max_examples=15)
@given(graphs(most=14), FRACTIONS)
def test_solutions_are_valid(name: str, graph: Graph, fraction: float | None) -> None:
    assert_valid(name, graph, fraction)


@pytest.mark.parametrize("name", SOLVERS)
@settings(deadline=None, max_examples=8)
@given(graphs(most=12), FRACTIONS, st.integers(1, 4), st.booleans(), st.integers(0, 2))
def test_solutions_for_micro_batches_in_flight_are_valid(
    name: str, graph: Graph, fraction: float | None, count: int, accumulating: bool, sent: int
) -> None:
    added_up = () if accumulating else (7,) * graph.base_length
    made = [v for op in graph.ops[: graph.forward_length] for v in op.outputs]
    in_flight = InFlight(count, 3, added_up, tuple(made[-sent:]) if sent else ())
    assert_valid(name, replace(graph, in_flight=in_flight), fraction)


@pytest.mark.heavy
@pytest.mark.parametrize("part", range(8))
@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(graphs(most=10), FRACTIONS, st.sampled_from(sorted(SOLVERS)))
def test_solutions_of_two_thousand_graphs_are_valid(
    part: int, graph: Graph, fraction: float | None, name: str
) -> None:
    assert_valid(name, graph, fraction)


@pytest.mark.parametrize("name", SOLVERS)
@settings(deadline=None, max_examples=8)
@given(graphs(most=12), st.integers(0, 2**20), st.floats(0.3, 1.1))
def test_constraints_are_honoured(name: str, graph: Graph, seed: int, fraction: float) -> None:
    rng = np.random.default_rng(seed)
    keep, again = rng.random((2, len(graph.values))) < 0.2
    again &= ~keep
    budget = int(fraction * simulate(graph, graph.base_schedule).peak_bytes)
    solution = SOLVERS[name](graph, budget, constraints=Constraints(keep, again), time_limit=2)
    check(graph, solution.schedule)
    ran = {v for row in solution.schedule[graph.forward_length :].tolist() for v in graph.ops[row].outputs}
    for op in graph.ops[graph.forward_length : graph.base_length]:
        for v in op.inputs:
            own = graph.recompute_row[v] >= 0 and op.region == graph.ops[graph.producer[v]].region
            assert not (own and again[v]) or v in ran


@pytest.mark.parametrize("name", SOLVERS)
def test_a_step_without_backward(name: str) -> None:
    graph = chain(1)
    assert SOLVERS[name](graph, 10**6).feasible


def test_none_proves_that_it_is_optimal() -> None:
    graph = chain(5)
    solution = SOLVERS["none"](graph, 10**6)
    assert solution.status is Status.OPTIMAL
    assert solution.gap == 0
    assert SOLVERS["none"](graph, 1).status is Status.INFEASIBLE


def test_manual_keeps_what_it_is_asked_to() -> None:
    graph = chain(20)
    keep = np.zeros(len(graph.values), dtype=bool)
    keep[[5, 10, 15]] = True
    solution = SOLVERS["manual"](graph, None, constraints=Constraints(keep=keep))
    again = set(solution.schedule[20:].tolist()) & set(range(20))
    assert again == set(range(15)) - {5, 10}


def test_contradicting_constraints_are_refused() -> None:
    with pytest.raises(GraphError, match="both kept and recomputed"):
        Constraints(np.array([True]), np.array([True]))


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("encoder.layer.3.attention.self", "encoder.layer.3"),
        ("blocks.11", "blocks.11"),
        ("0.1.2", "0"),
        ("head", None),
        ("", None),
        ("conv2d.weight", None),
    ],
)
def test_blocks_by_module_path(module: str, block: str | None) -> None:
    assert block_of(module) == block


def test_checkpointing_every_block_saves_memory() -> None:
    graph = transformer(6)
    solution = SOLVERS["checkpoint_all"](graph, None)
    assert solution.peak_bytes < 0.6 * simulate(graph, graph.base_schedule).peak_bytes


def test_a_new_solver_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/design.md, put beside the others."""
    design = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", design, re.DOTALL)
    (tmp_path / "every_second.py").write_text(example)
    monkeypatch.setattr(solvers, "__path__", [*solvers.__path__, str(tmp_path)])
    try:
        found = dict(found_solvers())
    finally:
        sys.modules.pop("solvers.every_second", None)
    assert found.keys() == SOLVERS.keys() | {"every_second"}
    graph = transformer(1)
    solution = found["every_second"](graph, None)
    check(graph, solution.schedule)
    assert solution.solver == "every_second"
    assert solution.seconds > graph.base_seconds
