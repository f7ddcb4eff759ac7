"""Integer programs: outcomes are what they say, with HiGHS and with CBC."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from solvers.milp import Outcome, Program

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(params=["highs", "cbc"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "cbc":
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)


def knapsack() -> Program:
    program = Program()
    items = [program.variable(-worth, integer=True) for worth in (3.0, 4.0, 5.0)]
    program.row(dict(zip(items, (2.0, 3.0, 4.0), strict=True)), high=5.0)
    return program


def test_optimum() -> None:
    answer = knapsack().solve(time_limit=10)
    assert answer.outcome is Outcome.OPTIMAL
    assert answer.objective == pytest.approx(-7)
    assert answer.bound == pytest.approx(-7)
    assert answer.values is not None
    np.testing.assert_allclose(answer.values, [1, 1, 0], atol=1e-6)


def test_relaxation() -> None:
    answer = knapsack().solve(relax=True)
    assert answer.objective == pytest.approx(-7)
    program = knapsack()
    program.row({0: 1.0, 1: 1.0, 2: 1.0}, high=1.5)
    assert program.solve(relax=True).objective < program.solve().objective


def test_infeasible_has_no_values() -> None:
    program = knapsack()
    program.row({0: 1.0}, low=2.0)
    answer = program.solve()
    assert answer.outcome is Outcome.INFEASIBLE
    assert answer.values is None


def test_a_variable_in_no_row_has_a_value() -> None:
    program = knapsack()
    program.variable(1.0)
    answer = program.solve()
    assert answer.values is not None
    assert answer.values[-1] == 0


def test_a_time_limit_is_kept_and_an_unfinished_answer_is_not_called_optimal() -> None:
    # Splitting markets: some split is found at once, and that none is better is proven in ten seconds.
    generator, program = np.random.default_rng(0), Program()
    shops = [program.variable(integer=True) for _ in range(26)]
    for _ in range(4):
        sizes = generator.integers(100, size=len(shops))
        over, under = (program.variable(1.0, high=np.inf) for _ in range(2))
        terms = dict(zip(shops, map(float, sizes), strict=True)) | {over: 1.0, under: -1.0}
        program.row(terms, low=sizes.sum() // 2, high=sizes.sum() // 2)
    answer = program.solve(time_limit=0.5)
    assert answer.outcome in (Outcome.FEASIBLE, Outcome.UNKNOWN)
    assert answer.bound <= answer.objective


def test_empty_program() -> None:
    assert Program().solve().outcome is Outcome.OPTIMAL


def test_nothing_is_printed(request: pytest.FixtureRequest) -> None:
    # In a process of its own: HiGHS prints what it prints first only once, past Python's own streams.
    script = "from solvers.milp import Program; program = Program(); program.variable(-1.0, integer=True); "
    without = "import importlib.util; importlib.util.find_spec = lambda _: None; "
    if "cbc" in request.node.name:
        script = without + script
    script += "assert program.solve().objective == -1"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")


def test_presolving_ends(backend: None) -> None:
    """A program of local exchanges of a U-Net: HiGHS 1.16 went on for ever, whatever the time limit."""
    if importlib.util.find_spec("highspy") is None:
        return  # CBC's turn
    solve = (
        "import sys, numpy as np\n"
        "from solvers.milp import Program\n"
        "program = Program(**{name: array.tolist() for name, array in np.load(sys.argv[1]).items()})\n"
        "start = np.zeros(len(program.cost))\n"
        "print(program.solve(time_limit=20, gap=2e-3, absolute_gap=1e-3, start=start).outcome)\n"
    )
    file = Path(__file__).parents[1] / "programs" / "presolving_without_end.npz"
    done = subprocess.run(
        [sys.executable, "-c", solve, str(file)], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.strip() in ("optimal", "feasible")
