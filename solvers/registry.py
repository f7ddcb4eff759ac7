"""The solvers by name."""

from solvers import checkpoint_all, manual, portfolio, store_all
from solvers.chains import lower_sets, rotor, sqrt_n
from solvers.model.solver import Solve
from solvers.programs import exact_ilp, ilp

SOLVERS: dict[str, Solve] = {
    portfolio.NAME: portfolio.solve,
    store_all.NAME: store_all.solve,
    checkpoint_all.NAME: checkpoint_all.solve,
    manual.NAME: manual.solve,
    rotor.NAME: rotor.solve,
    exact_ilp.NAME: exact_ilp.solve,
    ilp.NAME: ilp.solve,
    lower_sets.NAME: lower_sets.solve,
    sqrt_n.NAME: sqrt_n.solve,
}
