"""Planning for Inductor: schedules are judged by the programs that Inductor emits for them.

A solver knows operations one by one, and what Inductor fuses and reorders takes other bytes. So each
schedule that is found is lowered, without compiling it, and the peak of its programs is what counts. The
solver is asked again with what its allowance was off by, until the programs fit the budget, or no attempt is
left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner._torch.inductor.elsewhere import Gpu
from planner._torch.inductor.fusion_names import Fusion
from planner.costs.cuda_scratch import cuda_scratch
from planner.costs.cuda_scratch.processors import processor_of
from planner.errors import PlannerError
from planner.lowering.inductor import InductorLowering
from planner.planning.prepared import Prepared
from planner.problem.emitted_step import EmittedStep, EmittedStepModel
from planner.progress import Progress
from solvers.model.arrays import Schedule
from solvers.model.schedule import simulate
from solvers.model.solution import Solution, Status

MOST_ATTEMPTS = 6
"""The most schedules that are lowered for a budget, besides the one that recomputes nothing."""

FUSIONS: tuple[Fusion, ...] = ("anywhere", "earlier", "in-order")
"""The ways to fuse a schedule's programs, the fastest first. A fused kernel reads a result once for all its
operations, but they may lie far apart, and the result is held that long."""

_NEAR = 0.97
"""The share of the allowed peak from which on the search does not ask the solver for a higher one."""

_FAR = 1.25
"""A way to fuse is not tried again if it takes more than this factor of the allowed bytes, and of the bytes
that another way takes."""

_LEAST_FACTORS = (1.1, 1.25, 1.5)
"""For the least peak: further allowances that are tried, as multiples of the least that the solver knows."""

_OLDEST = (7, 0)
"""The compute capability from which on Triton has kernels."""

_AS_SOLVED = 1.01
"""Programs that peak within this factor of the solver's prediction count as predicted by it."""


@dataclass(frozen=True)
class Lowered:
    """A solution and the memory of its programs."""

    solution: Solution
    step: EmittedStep


def emitted_model(prepared: Prepared, fusion: Fusion = "in-order") -> EmittedStepModel:
    """The model that predicts the memory of a step's schedules under Inductor, for a way to fuse.

    Raises:
        PlannerError: Inductor emits no programs for the device here, or the step needs data to be captured.
    """
    gpu = None if prepared.meter is not None else _gpu(prepared)
    if prepared.captured.with_data:
        raise PlannerError(
            "backend='inductor' needs a step in which neither what runs nor sizes depend on data; plan "
            "with backend='eager'"
        )
    options = prepared.options
    copying = options.inputs == "overwritten"
    key = (tuple(sorted(options.backend_options.items())), copying, fusion)
    if key not in prepared.emitted_models:
        prepared.emitted_models[key] = EmittedStepModel(
            prepared.captured,
            prepared.device,
            prepared.meter or cuda_scratch(prepared.device),
            InductorLowering(options.backend_options, fusion, gpu),
            copying=copying,
        )
    return prepared.emitted_models[key]


def _gpu(prepared: Prepared) -> Gpu:
    """The properties that Inductor reads of the GPU that is planned for, which is not here."""
    device = prepared.device
    processor = processor_of(device)
    if device.kind != "cuda" or not device.cudnn or processor.capability < _OLDEST:
        raise PlannerError(
            "backend='inductor' plans for the CPU of this machine, and for NVIDIA's GPUs from compute "
            f"capability 7.0 on, not for {device.name}; plan with backend='eager'"
        )
    if prepared.cuda is None:
        raise PlannerError(
            f"backend='inductor' plans for {device.name}, which is not here, with a module on the CPU or the "
            "meta device, not on another GPU; plan with model.to('meta')"
        )
    return Gpu(
        device.name,
        *processor.capability,
        processor.multiprocessors,
        processor.threads,
        device.memory_bytes,
    )


def solve_for_inductor(
    prepared: Prepared,
    room: int | None,
    solve: Callable[[int | None, float], Solution],
    time_limit: float,
    progress: Progress,
) -> tuple[Lowered, Lowered]:
    """The schedule for a dynamic peak of the programs that Inductor emits.

    Args:
        prepared: The captured step.
        room: The dynamic peak that is allowed; None for the least.
        solve: The solution for a dynamic peak of single operations, within so many seconds.
        time_limit: Wall seconds for each.
        progress: Called with what is being done.

    Returns:
        The answer, infeasible if nothing fits, with the least peak that was found; and what the schedule
        that recomputes nothing takes.
    """
    lowered = _Lowering(prepared, progress)
    graph = prepared.problem.graph
    simulated = simulate(graph, graph.base_schedule)
    unrecomputed = solve(simulated.peak_bytes, time_limit)
    if room is None:
        return _answer(_least(solve, lowered, time_limit)), lowered(unrecomputed, ("anywhere",))
    nothing = lowered(unrecomputed, ("anywhere",), room)
    if room < nothing.step.peak_bytes <= room * _FAR:  # it holds little that others would not
        nothing = lowered(unrecomputed, FUSIONS, room)
    if nothing.step.peak_bytes <= room:
        return _answer(nothing), nothing
    fitting, smallest = _within(solve, lowered, room, simulated.peak_bytes, nothing, time_limit)
    if fitting is None:
        smallest = min(smallest, _least(solve, lowered, time_limit), key=lambda x: x.step.peak_bytes)
        fitting = smallest if smallest.step.peak_bytes <= room else None
    if fitting is None:
        return replace(smallest, solution=smallest.solution.infeasible()), nothing
    return _answer(fitting), nothing


class _Lowering:
    """Lowers schedules, each with each fusion once."""

    def __init__(self, prepared: Prepared, progress: Progress) -> None:
        self._prepared, self._progress = prepared, progress
        self._known: dict[tuple[bytes, Fusion], EmittedStep] = {}

    def __call__(self, solution: Solution, fusions: Sequence[Fusion], room: int = 0) -> Lowered:
        """A schedule with the first of the fusions that fits the room, or the one of the lowest peak."""
        steps = []
        for fusion in fusions:
            steps.append(self.step(solution.schedule, fusion))
            if steps[-1].peak_bytes <= room:
                return Lowered(solution, steps[-1])
        return Lowered(solution, min(steps, key=lambda step: step.peak_bytes))

    def step(self, schedule: Schedule, fusion: Fusion) -> EmittedStep:
        """The memory of a schedule's programs."""
        key, known = (schedule.tobytes(), fusion), self._known
        if key not in known:
            done = len(known) / (len(known) + MOST_ATTEMPTS)
            self._progress(f"lowering with Inductor: program {len(known) + 1}", done)
            problem = self._prepared.problem
            sequences = problem.backward_sequences(self._prepared.captured, schedule)
            known[key] = emitted_model(self._prepared, fusion).step(sequences)
        return known[key]


def _within(
    solve: Callable[[int | None, float], Solution],
    lowered: _Lowering,
    room: int,
    most: int,
    nothing: Lowered,
    time_limit: float,
) -> tuple[Lowered | None, Lowered]:
    """The fastest that fits of the schedules that are tried, and the one of the smallest peak."""
    fitting, smallest, fusions = None, nothing, FUSIONS
    low, high = 0, most  # allowances of the solver: of which programs fit, and do not
    allowance = max(most - (nothing.step.peak_bytes - room), 0)
    for _ in range(MOST_ATTEMPTS):
        found = lowered(solve(allowance, time_limit), fusions, room)
        first = lowered.step(found.solution.schedule, fusions[0]).peak_bytes
        if first > _FAR * max(room, found.step.peak_bytes):
            fusions = fusions[1:]
        if found.step.peak_bytes < smallest.step.peak_bytes:
            smallest = found
        over = found.step.peak_bytes - room
        if over <= 0:
            if fitting is None or found.solution.seconds < fitting.solution.seconds:
                fitting = found
            if found.step.peak_bytes >= room * _NEAR:
                break
            low = max(low, allowance)
        else:
            if not found.solution.feasible:
                break  # the solver knows none that takes less
            high = min(high, allowance, found.solution.peak_bytes)
        step = allowance - over
        allowance = step if low < step < high else (low + high) // 2
        if high - low <= most // 100:
            break
    return fitting, smallest


def _least(solve: Callable[[int | None, float], Solution], lowered: _Lowering, time_limit: float) -> Lowered:
    """The schedule whose programs peak lowest; further ones are lowered while that lowers the peak."""
    solved = solve(None, time_limit)
    least = lowered(solved, ("in-order",))
    if least.step.peak_bytes > solved.peak_bytes * _AS_SOLVED:
        for factor in _LEAST_FACTORS:
            found = lowered(solve(int(solved.peak_bytes * factor), time_limit / 4), ("in-order",))
            if found.step.peak_bytes >= least.step.peak_bytes:
                break
            least = found
    return lowered(
        least.solution, FUSIONS[1:], least.step.peak_bytes
    )  # the first hardly ever takes as little


def _answer(lowered: Lowered) -> Lowered:
    """It, without what a solver proved: that speaks of single operations."""
    return replace(lowered, solution=replace(lowered.solution, status=Status.FEASIBLE, bound_seconds=None))
