"""The problem's data: what it refuses, what it derives."""

import numpy as np
import pytest

from solvers import Graph, GraphError, Op, Phase, Value
from tests.graphs import chain, random_dag, transformer, unet

ONE = (Value(1), Value(2))


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ((Op((0,), (1,)),), "uses value 0 before it is produced"),
        ((Op((), (0,)), Op((), (0,))), "produces value 0 a second time"),
        ((Op((), (5,)),), "produces value 5 of 2"),
        ((Op((), (0,), phase=Phase.BACKWARD), Op((), (1,))), "comes after a backward op"),
        ((Op((), (0,), replay=0),), "not a replay row"),
    ],
)
def test_broken_graphs_are_refused(ops: tuple[Op, ...], words: str) -> None:
    with pytest.raises(GraphError, match=words):
        Graph(ops, ONE)


def test_replay_rows_need_values_of_base_rows() -> None:
    with pytest.raises(GraphError, match="replay row 1"):
        Graph((Op((), (0,), replay=1), Op((1,), (0,))), ONE, 1)


def test_derived_tables() -> None:
    graph = Graph(
        (
            Op((), (0, 1), 1.0, 3, replay=3),
            Op((0,), (2,), 2.0, recomputable=False),
            Op((0, 2), (3,), 4.0, phase=Phase.BACKWARD),
            Op((1,), (0,), 1.5),
        ),
        tuple(Value(b) for b in (10, 20, 30, 40)),
        3,
    )
    assert graph.forward_length == 2
    assert graph.producer.tolist() == [0, 0, 1, 2]
    assert graph.consumers == ((1, 2), (), (2,), ())
    assert (graph.rerun(0), graph.rerun(1)) == (3, 1)
    assert graph.base_of.tolist() == [0, 1, 2, 0]
    assert graph.recompute_row.tolist() == [3, -1, -1, -1]
    assert graph.base_seconds == 7.0
    assert graph.input_table[0].tolist() == [0, 0, 1, 3, 4]
    np.testing.assert_array_equal(graph.base_schedule, [0, 1, 2])


@pytest.mark.parametrize("graph", [chain(5), transformer(2), unet(3), random_dag(1, 30, regions=2)])
def test_generated_graphs_run_forward_before_backward(graph: Graph) -> None:
    phases = [op.phase for op in graph.ops[: graph.base_length]]
    assert phases == sorted(phases)
    assert graph.forward_length < graph.base_length
