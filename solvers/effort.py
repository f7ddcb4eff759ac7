"""Settings of the portfolio: how much it tries before it answers."""

from dataclasses import dataclass
from typing import Literal

from solvers.model.graph import Graph
from solvers.programs import ilp
from solvers.programs.neighbourhood import STRETCHES, has_layers

Effort = Literal["fast", "best"]
"""Answers in seconds, or as good as they get: see ``EFFORTS``."""


@dataclass(frozen=True)
class PortfolioSettings:
    """How much the portfolio tries, and when it stops. A graph is *large* if it has more forward operations
    than ``ilp.FINE``. Distances to the bound are relative to the seconds of the step.

    Attributes:
        exact_slots: Graphs of no more slots (forward times backward operations) are solved exactly as well.
        exact_seconds: The process seconds that the exact program gets each time.
        seconds: Wall seconds for one budget where none are given.
        sweep_seconds: Wall seconds for each budget of a sweep at most.
        last_start: The share of a time limit after which nothing is begun any more: what has begun ends
            within the rest.
        met: A schedule this close to the bound ends the search.
        small_twice_beyond, small_programs_beyond: Graphs that are not large and nearer to the bound than this
            are done without recomputing twice, and without programs with walls.
        large_twice_beyond, large_programs_beyond: The same of large graphs.
        optimal_gap: A schedule with no larger a gap is called optimal.
        near: Nearer to the bound than this, segments of about equal bytes are not tried, nor trades; nor is
            recomputing twice tried in more than one way on large graphs.
        far: Farther from the bound than this, lower sets are tried as well.
        other_form: Where masks may be kept as bits, the problems with and without are not both solved if the
            answer to one is this near to the bound of the other.
        program_share, program_seconds, program_least_share: On large graphs each kind of program gets this
            share of the time limit, but no more process seconds than the second, unless the third, a share
            as well, is more: answers on a fast machine should not wait for the limit, and a long limit
            should be of use.
        small_program_seconds: The process seconds that each kind of program gets on small graphs.
        walled_programs: Programs with walls get this many times as long: they are solved at several sizes.
        hopeless: The slow methods do not run where the quick ones' answer is slower than that of another form
            of the same step by more than this share of its seconds.
        parts_beyond: Graphs that are nearer to the bound than this are done without a search part by part
            (:mod:`solvers.programs.neighbourhood`).
        longest_in_stretches: So are those with more forward operations that are not of layers, each a
            captured graph.
        parts_enough: A search part by part ends this near to the bound.
        parts_stretches: How many forward operations it looks at together at most, where they are no layers.
        parts_work, parts_nodes: The most iterations of the simplex method for all programs of this search,
            and the most nodes of the tree of each. 10,000 iterations take one to two seconds.
        usual_length: Larger graphs get more process seconds, in proportion to their forward operations.
        least_share: The share of a time limit that the forms of least peak get.
        nearly_fits: A budget that nothing is found for is tried once more with the best effort if the least
            that is found is at most this many times as large.
        below_least: Whether budgets just below the least peak that was found are tried as well.
        least_rounds: The most such budgets.
        least_failures: For the least peak at some extra time: the number of smaller budgets in a row that are
            not met, after which no more are tried.
        small_trading_share, large_trading_share: The share of the time left that local improvement gets.
        polishing_rounds: How often local improvement goes over an answer at most.
    """

    exact_slots: int = 500
    exact_seconds: float = float("inf")
    seconds: float = 60.0
    sweep_seconds: float = 30.0
    last_start: float = 0.95
    met: float = 1e-6
    small_twice_beyond: float = 0.0
    small_programs_beyond: float = 0.0
    large_twice_beyond: float = 2e-4
    large_programs_beyond: float = 2e-3
    optimal_gap: float = 1e-6
    near: float = 2e-3
    far: float = 1e-2
    other_form: float = 1e-6
    program_share: float = 1 / 8
    program_seconds: float = 0.5
    program_least_share: float = 1 / 120
    small_program_seconds: float = 6.0
    walled_programs: float = 3.0
    hopeless: float = float("inf")
    parts_beyond: float = 0.0
    longest_in_stretches: float = float("inf")
    parts_enough: float = 0.0
    parts_stretches: tuple[int, ...] = STRETCHES
    parts_work: int = 400_000
    parts_nodes: int = 20
    usual_length: int = 4_000
    least_share: float = 0.5
    nearly_fits: float = 0.0
    below_least: bool = True
    least_rounds: int = 5
    least_failures: float = float("inf")
    small_trading_share: float = 1 / 100
    large_trading_share: float = 1 / 200
    polishing_rounds: int = 3

    def parts_pay(self, graph: Graph, distance: float) -> bool:
        """Whether an answer this far from the bound is improved part by part; that of micro-batches in
        flight never is."""
        if graph.in_flight is not None or distance <= self.parts_beyond:
            return False
        return graph.forward_length <= self.longest_in_stretches or has_layers(graph)

    def patience(self, forward_length: int, time_limit: float) -> float:
        """The process seconds that each kind of program gets."""
        if forward_length <= ilp.FINE:
            return min(time_limit, self.small_program_seconds)
        most = self.program_seconds * max(1.0, forward_length / self.usual_length)
        return max(min(self.program_share * time_limit, most), self.program_least_share * time_limit)


EFFORTS: dict[Effort, PortfolioSettings] = {
    "best": PortfolioSettings(),
    "fast": PortfolioSettings(
        exact_seconds=1.0,
        small_program_seconds=1.0,
        nearly_fits=1.1,
        below_least=False,
        least_failures=3,
        other_form=2e-3,
        met=5e-4,
        small_twice_beyond=6e-3,
        small_programs_beyond=1e-2,
        large_twice_beyond=6e-3,
        large_programs_beyond=1e-2,
        hopeless=2e-3,
        parts_beyond=5e-3,
        longest_in_stretches=1000,
        parts_enough=2e-3,
        parts_stretches=STRETCHES[:1],
        parts_work=20_000,
        parts_nodes=1,
    ),
}
"""``benchmarks/effort.py`` measures what each costs and brings."""
