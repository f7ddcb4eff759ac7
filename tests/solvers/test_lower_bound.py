"""The lower bound: true, and met where it can be."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import Graph, portfolio, recompute, simulate
from solvers.model.cut_points import forward_uses
from solvers.model.schedule import crosses, lifetimes
from solvers.programs.lower_bound import (
    Link,
    at_more_moments,
    bound_at,
    holds_for_every_order,
    lower_bound,
)
from tests.graphs import Forward, chain, graphs, random_dag, training_graph, transformer

pytestmark = pytest.mark.usefixtures("no_hurry")


@settings(deadline=None)
@given(graphs(most=20), st.integers(0, 2**20))
def test_no_schedule_is_below_the_bound(graph: Graph, seed: int) -> None:
    kept = np.random.default_rng(seed).random(len(graph.values)) < 0.6
    timeline = simulate(graph, recompute(graph, kept))
    assert lower_bound(graph, timeline.peak_bytes).seconds <= timeline.seconds + 1e-6


@settings(deadline=None)
@given(graphs(most=20), st.integers(0, 2**20), st.sampled_from([3.0, 30.0, 300.0]))
def test_no_schedule_that_sends_is_below_the_bound_of_its_link(graph: Graph, seed: int, rate: float) -> None:
    """Results are sent one after the other once they are made, and fetched as late as they can be, beside
    a step that waits for nothing; in between they are gone."""
    draw = np.random.default_rng(seed)
    schedule = recompute(graph, draw.random(len(graph.values)) < 0.8)
    lives, timeline = lifetimes(graph, schedule), simulate(graph, schedule)
    ends, held, gone = np.cumsum(graph.seconds[schedule]), timeline.step_bytes.copy(), []
    sizes = [value.bytes if draw.random() < 0.7 else 0 for value in graph.values]
    out, back = 0.0, timeline.seconds
    for v, made in zip(lives.value[crosses(graph, lives)], lives.start[crosses(graph, lives)], strict=True):
        reads = [n for n, row in enumerate(schedule) if v in graph.ops[row].inputs and n > made]
        first = next((n for n in reads if n >= graph.forward_length), None)
        if first is not None and graph.values[v].held_until is None and draw.random() < 0.7:
            out = max(out, ends[made]) + sizes[v] / rate
            gone.append((first, out, max([made, *(n for n in reads if n < graph.forward_length)]), v))
    for first, sent, last, v in sorted(gone, reverse=True):
        back = min(back, ends[first - 1]) - sizes[v] / rate
        steps = np.arange(last + 1, first)
        held[steps[(ends[steps - 1] >= sent) & (ends[steps] <= back)]] -= sizes[v]
    bound = lower_bound(graph, int(held.max()), link=Link(rate, rate, sizes))
    assert bound.seconds <= timeline.seconds + 1e-6


@pytest.mark.parametrize(("rate", "more"), [(25, 4), (50, 2), (100, 0)])
def test_what_a_link_carries_is_not_run_again(rate: int, more: int) -> None:
    """Of ten results of 100 bytes six must be gone: in the nine seconds behind the first a link carries as
    many whole ones as it can, and each of the others takes a second."""
    graph = chain(10)
    link = Link(rate, rate, [value.bytes for value in graph.values])
    assert lower_bound(graph, 400, link=link).seconds == pytest.approx(graph.base_seconds + more)


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


@settings(deadline=None)
@given(graphs(most=20), st.integers(0, 2**20))
def test_no_schedule_is_below_what_more_moments_prove(graph: Graph, seed: int) -> None:
    kept = np.random.default_rng(seed).random(len(graph.values)) < 0.6
    timeline = simulate(graph, recompute(graph, kept))
    first = lower_bound(graph, timeline.peak_bytes, moments=1, integer_seconds=0.0)
    more = at_more_moments(graph, timeline.peak_bytes, first, 60.0)
    assert first.seconds <= more.seconds <= timeline.seconds + 1e-6


def test_more_moments_prove_more() -> None:
    for seed in range(40):
        graph = random_dag(seed, 30)
        budget = int(0.6 * simulate(graph, graph.base_schedule).peak_bytes)
        first = lower_bound(graph, budget, moments=1, integer_seconds=0.0)
        if at_more_moments(graph, budget, first, 60.0).seconds > first.seconds * 1.01:
            return
    pytest.fail("more moments prove nothing on 40 graphs")


def test_larger_programs_are_solved_where_a_step_is_many_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solvers.programs.lower_bound.MOST_VARIABLES", 0)
    for regions, solved in ((1, False), (4, True)):
        graph = random_dag(1, 30, regions=regions)
        budget = int(0.7 * simulate(graph, graph.base_schedule).peak_bytes)
        assert (lower_bound(graph, budget, integer_seconds=0.0).seconds > graph.base_seconds) is solved


def reordered(graph: Graph, seed: int) -> tuple[Graph, np.ndarray]:
    """The graph with its backward operations in another order, and where each operation is now."""
    rng = np.random.default_rng(seed)
    order = list(range(graph.forward_length))
    made = {v for op in graph.ops[: graph.forward_length] for v in op.outputs}
    left = list(range(graph.forward_length, graph.base_length))
    while left:
        ready = [i for i in left if made.issuperset(graph.ops[i].inputs)]
        order.append(int(rng.choice(ready)))
        left.remove(order[-1])
        made.update(graph.ops[order[-1]].outputs)
    assert graph.base_length == len(graph.ops)
    return Graph(tuple(graph.ops[i] for i in order), graph.values), np.argsort(order)


def test_holds_for_every_order() -> None:
    branches = [Forward((0 if i in (1, 5) else i - 1,), (100 + i,), 1.0 + i) for i in range(1, 9)]
    plain = training_graph([Forward((), (50,)), *branches, Forward((4, 8), (90,)), Forward((9,), (4,))])
    n = plain.forward_length
    loss, first = plain.ops[n - 1 : n + 1]
    first = replace(first, inputs=(*first.inputs, *loss.outputs))
    graph = Graph((*plain.ops[:n], first, *plain.ops[n + 1 :]), plain.values)
    budget = int(0.7 * simulate(graph, graph.base_schedule).peak_bytes)
    bound = bound_at(graph, forward_uses(graph), budget, n, None, integer=True)
    assert graph.base_seconds < bound < np.inf
    assert holds_for_every_order(graph, n)
    assert not holds_for_every_order(plain, n)  # there the loss may be computed later
    assert not holds_for_every_order(graph, n + 3)  # of one branch, before or behind the other
    seconds = set()
    for seed in range(5):
        other, place = reordered(graph, seed)
        assert place[n] == n
        again = bound_at(other, forward_uses(other), budget, n, None, integer=True)
        assert again == pytest.approx(bound, rel=1e-6)
        seconds.add(portfolio.solve(other, budget, time_limit=5).seconds)
    assert min(seconds) >= bound - 1e-6


def test_counts_what_an_earlier_graph_returned_as_held() -> None:
    """No other graph can compute it again, and its own backward comes later."""
    last = [i % 4 == 3 for i in range(16)]
    one, several = (
        training_graph(
            [
                Forward(
                    (i - 1,) if i else (), (400 if last[i] else 100,), 0.1 if last[i] else 1.0, region=graph
                )
                for i, graph in enumerate(graphs)
            ]
        )
        for graphs in ([0] * 16, [i // 4 for i in range(16)])
    )
    budget = 2100
    solution = portfolio.solve(several, budget, time_limit=10)
    bounds = [lower_bound(graph, budget).seconds for graph in (one, several)]
    assert bounds[0] + 4 < bounds[1] <= solution.seconds
