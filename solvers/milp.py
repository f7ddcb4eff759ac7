"""Mixed-integer linear programs: built row by row, solved by HiGHS, or by CBC where there is no HiGHS.

HiGHS is fed arrays directly (a model of 100,000 coefficients in milliseconds); CBC goes through
PuLP. After a time limit PuLP's status still says "Optimal" and after "Infeasible" CBC leaves
fractions behind: only ``sol_status`` is trusted here, and values are read only with a solution. Where
neither solver runs, a program has no solution and a warning is logged: callers keep the answers they have.
"""

import functools
import importlib.util
import logging
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solvers.model.arrays import PerVariable
from solvers.model.indices import ProgramRow, Variable

logger = logging.getLogger(__name__)

_GRID = 2.0**30


class Outcome(StrEnum):
    """How a program ended."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Answer:
    """The result of a program: ``values`` and ``objective`` of the best point, if there is one,
    ``bound``, below which the solver proved that no point lies (-inf when it proved nothing), and how many
    ``iterations`` of the simplex method that took: None where the solver does not say."""

    outcome: Outcome
    values: PerVariable | None
    objective: float
    bound: float
    iterations: int | None = None


@dataclass
class Program:
    """Minimise ``cost @ x`` subject to ``low <= x <= high``, rows ``a @ x >= bound``, some integer.

    Attributes:
        cost, low, high: The cost of each variable, and its bounds.
        integer: Whether each variable is integer.
        row_start: For each row where its terms begin in ``index`` and ``coefficient``, then where the last
            ends.
        row_low, row_high: The bounds of each row.
        index: The variable of each term.
        coefficient: The factor of each term.
    """

    cost: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_start: list[int] = field(default_factory=lambda: [0])
    row_low: list[float] = field(default_factory=list)
    row_high: list[float] = field(default_factory=list)
    index: list[Variable] = field(default_factory=list)
    coefficient: list[float] = field(default_factory=list)

    def variable(
        self, cost: float = 0.0, *, low: float = 0.0, high: float = 1.0, integer: bool = False
    ) -> Variable:
        """Add a variable and return it."""
        self.cost.append(cost)
        self.low.append(low)
        self.high.append(high)
        self.integer.append(integer)
        return Variable(len(self.cost) - 1)

    def row(self, terms: dict[Variable, float], low: float = -np.inf, high: float = np.inf) -> ProgramRow:
        """Add ``low <= sum of coefficient * variable <= high`` and return the row."""
        self.index += terms.keys()
        self.coefficient += terms.values()
        self.row_start.append(len(self.index))
        self.row_low.append(low)
        self.row_high.append(high)
        return ProgramRow(len(self.row_low) - 1)

    def solve(
        self,
        *,
        time_limit: float | None = None,
        gap: float = 0.0,
        absolute_gap: float = 0.0,
        start: PerVariable | None = None,
        relax: bool = False,
        presolve: bool = True,
        nodes: int | None = None,
    ) -> Answer:
        """Solve within ``time_limit`` wall seconds to the relative ``gap`` or to ``absolute_gap``.

        Args:
            start: A point to start from, NaN where unknown.
            relax: Drop integrality. Relaxed programs are not presolved: that takes several times as long as
                solving them.
            presolve: Presolve an integer program; where a loose gap is enough, it is faster without.
            nodes: Most nodes of the tree. Unlike seconds, they are the same on every machine. With a limit,
                only ``start`` is improved: the root is solved once, and no smaller programs are solved for
                other points.
        """
        if not self.cost:
            return Answer(Outcome.OPTIMAL, np.zeros(0), 0.0, 0.0)
        if importlib.util.find_spec("highspy") is not None:
            return _highs(self, time_limit, gap, absolute_gap, start, relax, presolve and not relax, nodes)
        return _cbc(self, time_limit, gap, relax, nodes)


_THOROUGH = ("mip_allow_restart", "mip_heuristic_run_rens", "mip_heuristic_run_root_reduced_cost")
"""HiGHS's options that take two thirds of the time at the root of a tree."""


@functools.cache
def _quiet_solver() -> Any:
    import highspy

    class Quiet(highspy.Highs):
        """Without callbacks: from HiGHS 1.16 on, setting them prints a banner that nothing switches off."""

        def enableCallbacks(self) -> None:  # noqa: N802
            pass

    return Quiet


def _highs(
    program: Program,
    time_limit: float | None,
    gap: float,
    absolute_gap: float,
    start: PerVariable | None,
    relax: bool,
    presolve: bool,
    nodes: int | None,
) -> Answer:
    import highspy

    solver: Any = _quiet_solver()()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_rel_gap", gap)
    solver.setOptionValue("mip_abs_gap", max(1e-6, absolute_gap))
    if not presolve:
        solver.setOptionValue("presolve", "off")
    if nodes is not None:
        solver.setOptionValue("mip_max_nodes", nodes)
        for name in _THOROUGH:
            solver.setOptionValue(name, False)  # HiGHS before 1.11 ignores those that it does not know
    if time_limit is not None:
        solver.setOptionValue("time_limit", max(0.01, time_limit))
    model: Any = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(program.cost), len(program.row_low)
    model.col_cost_ = np.array(program.cost)
    model.col_lower_, model.col_upper_ = np.array(program.low), np.array(program.high)
    model.row_lower_, model.row_upper_ = _on_grid(program.row_low), _on_grid(program.row_high)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.array(program.row_start)
    model.a_matrix_.index_ = np.array(program.index)
    model.a_matrix_.value_ = _on_grid(program.coefficient)
    if not relax and any(program.integer):
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[i] for i in program.integer]
    solver.passModel(model)
    if start is not None:
        known = np.flatnonzero(~np.isnan(start)).astype(np.int32)
        solver.setSolution(len(known), known, start[known])
    solver.run()
    info, status = solver.getInfo(), solver.getModelStatus()
    mip = not relax and any(program.integer)
    optimal = status == highspy.HighsModelStatus.kOptimal
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return Answer(Outcome.INFEASIBLE, None, np.inf, np.inf, info.simplex_iteration_count)
    bound = info.mip_dual_bound if mip else (info.objective_function_value if optimal else -np.inf)
    if info.primal_solution_status != 2:
        return Answer(Outcome.UNKNOWN, None, np.inf, bound, info.simplex_iteration_count)
    values = np.array(solver.getSolution().col_value)
    outcome = Outcome.OPTIMAL if optimal else Outcome.FEASIBLE
    return Answer(outcome, values, info.objective_function_value, bound, info.simplex_iteration_count)


def _on_grid(numbers: list[float]) -> NDArray[np.float64]:
    """Numbers as multiples of a billionth, so that sums of them are exact.

    HiGHS 1.16's presolving (``strengthenInequalities``) may never end where only rounding is left of an
    inequality, and it looks at no time limit.
    """
    found = np.array(numbers, dtype=np.float64)
    finite = np.isfinite(found)
    found[finite] = np.round(found[finite] * _GRID) / _GRID
    return found


@functools.cache
def _warn_of_no_solver(reason: str) -> None:
    logger.warning(
        "no integer program can be solved: HiGHS is not installed and CBC does not run (%s). Answers are "
        "worse without: pip install highspy",
        reason,
    )


def _cbc(program: Program, time_limit: float | None, gap: float, relax: bool, nodes: int | None) -> Answer:
    import pulp

    problem = pulp.LpProblem("program", pulp.LpMinimize)
    variables = [
        pulp.LpVariable(
            f"x{i}",
            low,
            None if np.isinf(high) else high,
            "Integer" if integer and not relax else "Continuous",
        )
        for i, (low, high, integer) in enumerate(zip(program.low, program.high, program.integer, strict=True))
    ]
    problem += pulp.lpSum(c * x for c, x in zip(program.cost, variables, strict=True))
    for i, (low, high) in enumerate(zip(program.row_low, program.row_high, strict=True)):
        entries = range(program.row_start[i], program.row_start[i + 1])
        left = pulp.lpSum(program.coefficient[e] * variables[program.index[e]] for e in entries)
        if not np.isinf(low):
            problem += left >= low
        if not np.isinf(high):
            problem += left <= high
    solver = pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit, gapRel=gap or None, threads=1, maxNodes=nodes)
    try:
        problem.solve(solver)
    except pulp.PulpSolverError as error:
        _warn_of_no_solver(str(error))
        return Answer(Outcome.UNKNOWN, None, np.inf, -np.inf)
    if problem.sol_status == pulp.LpSolutionInfeasible:
        return Answer(Outcome.INFEASIBLE, None, np.inf, np.inf)
    optimal = problem.sol_status == pulp.LpSolutionOptimal
    if not optimal and problem.sol_status != pulp.LpSolutionIntegerFeasible:
        return Answer(Outcome.UNKNOWN, None, np.inf, -np.inf)
    values = np.array([x.varValue or 0.0 for x in variables])
    objective = float(np.dot(program.cost, values))
    bound = objective - gap * abs(objective) if optimal else -np.inf
    return Answer(Outcome.OPTIMAL if optimal else Outcome.FEASIBLE, values, objective, bound)
