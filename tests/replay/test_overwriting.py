"""Which results are written over operands, whatever the plan makes again."""

from dataclasses import replace

import pytest

from planner.replay.overwriting import overwrite
from solvers.model.graph import Op, Phase
from solvers.model.indices import RowId, ValueId, base_op

pytestmark = pytest.mark.any_torch

SAVED, OTHER, RESULT, LATER = map(ValueId, range(4))


def _rows() -> list[Op]:
    """A forward that saves a value; a node reads it, its result gets a row of its own, another row is the
    last to hold it."""
    return [
        Op((), (SAVED,), recomputable=True, name="makes what is saved"),
        Op((), (OTHER,), recomputable=True, name="makes another"),
        Op((SAVED,), (RESULT,), phase=Phase.BACKWARD, name="the node"),
        Op((), (), phase=Phase.BACKWARD, name="result of the node"),
        Op((RESULT, SAVED), (LATER,), phase=Phase.BACKWARD, name="frees what is saved"),
        Op((LATER, OTHER), (), phase=Phase.BACKWARD, name="reads another"),
    ]


HELD = {base_op(2): (base_op(4), SAVED)}


def test_a_result_takes_the_place_of_what_nothing_reads_later() -> None:
    rows = _rows()
    assert overwrite(rows, len(rows), HELD) == HELD
    assert (rows[2].outputs, rows[3].outputs) == ((), (RESULT,))
    assert rows[4].inputs == (RESULT,)  # by then the result has the memory


def test_what_a_later_row_reads_is_not_written_over() -> None:
    rows = _rows()
    rows[5] = replace(rows[5], inputs=(*rows[5].inputs, SAVED))
    before = rows.copy()
    assert overwrite(rows, len(rows), HELD) == {}
    assert rows == before


@pytest.mark.parametrize("only_again", [False, True])
def test_what_a_later_re_run_reads_is_not_written_over(only_again: bool) -> None:
    rows = _rows()
    reads = replace(
        rows[1], inputs=(SAVED,)
    )  # for the last row, the call that makes its operand may run again
    if only_again:
        rows[1] = replace(rows[1], replay=RowId(len(rows)))
        rows.append(reads)
    else:
        rows[1] = reads
    before = rows.copy()
    assert overwrite(rows, 6, HELD) == {}
    assert rows == before
