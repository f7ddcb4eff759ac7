"""Steps whose loss is computed in pieces: which splits there are, and the best of them for a budget."""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from planner._torch.joint import aot_metadata
from planner.capture.captured_step import CapturedGraph
from planner.costs.cuda_scratch import cuda_scratch
from planner.costs.kernel_timer import MeasuredCosts
from planner.errors import CaptureError, InfeasibleBudget
from planner.graph.joint_graph import read_joint
from planner.graph.spec import Split, SplitRuns
from planner.graph.split.pieces import NothingToSplit, split_joint, splittable
from planner.graph.split.runs import Run
from planner.planfile.budget import Budget, format_bytes
from planner.planfile.plan import PlanRecord
from planner.planning.prepared import Prepared
from planner.problem.build import build_problem
from planner.problem.offload import find_kept_otherwise
from planner.progress import Progress, part_of
from solvers.effort import EFFORTS
from solvers.least import floor_bytes
from solvers.model.schedule import simulate

LEAST_ROWS = 128
"""The fewest rows of a piece: matrix products of fewer rows take longer for each row."""

_TIMED_SECONDS = 2.0
"""The least time for measuring the operations of pieces, however long the step's own were measured."""

_LEAST_SECONDS = 5.0
"""The time for finding the least peak if it is above the bound that no plan undercuts."""

_WORTH_TIME = 1 / 50
"""A share of the unplanned step's peak: "min" takes no slower plan that saves fewer bytes than that."""

_SMALLEST = 1 / 100
"""A share of that peak: smaller results are not divided, or not further."""

_FASTER = 1 / 200
"""A share of the step's time: half as many pieces are tried only as long as each halving saves more."""

_WORTH_SAYING = 1 / 20
"""A share of the peak: an error proposes pieces only for results that are larger."""


class Planning(Protocol):
    """Plans a step for a budget; a plan is of use that takes fewer seconds than ``rival``. Where none fits
    the error has to tell the least, with ``minimum``, or else what was found so far."""

    def __call__(
        self,
        prepared: Prepared,
        wanted: Budget,
        report: Progress,
        minimum: bool = True,
        rival: float = math.inf,
    ) -> PlanRecord: ...


class Forms:
    """The forms of a step: in pieces, each made once, and whole.

    Args:
        prepared: The step, in one piece.
        plan: Plans a step.
        bound: Seconds that no plan of a step undercuts for a budget in bytes; infinity where none fits.
    """

    def __init__(
        self, prepared: Prepared, plan: Planning, bound: Callable[[Prepared, Budget], float]
    ) -> None:
        self._prepared, self._plan, self._bound = prepared, plan, bound
        self._made = dict[Split, Prepared | CaptureError]()

    def planned(self, wanted: Budget, room: int | None, progress: Progress) -> PlanRecord:
        """The best plan, in one form or another; where all fits as it is, one in one piece.

        Args:
            wanted, room: The budget, and what of it is for forward and backward; None for the least.
            progress: Called with what is being done, and how much of it is done.

        Raises:
            CaptureError: There is nothing to split.
            InfeasibleBudget: No plan fits.
        """
        graph = self._prepared.problem.graph
        if room is not None and simulate(graph, graph.base_schedule).peak_bytes <= room:
            return self._plan(self._prepared, wanted, progress)
        if isinstance(self._prepared.costs, MeasuredCosts) and not self._made:
            self._prepared.costs.allow(_TIMED_SECONDS)
        splits = self._splits(room)
        if splits == [None]:
            return self._plan(self._prepared, wanted, progress)
        if room is None:
            return self._least(wanted, progress, splits)
        return self._best(wanted, progress, splits)

    def _splits(self, room: int | None) -> list[Split | None]:
        """How to split; None is not at all. The least takes as many pieces as are of use; all else may be
        faster in fewer."""
        runs = _runs(self._prepared)
        if runs and not any(self._is_much(run) for run in runs):
            return [None]
        most = _most_pieces(self._prepared, runs, room)
        in_loss = any(run.in_loss for run in runs)
        what = _what(self._prepared)
        splits = list[Split]()
        if in_loss:
            splits.append(Split("backward", most))
            fewer = self._in_fewer(most, runs, room)
            splits += fewer
            if what == "auto":
                splits += [split._replace(what=what) for split in fewer]
        if what == "auto" or not in_loss:
            splits.append(Split("backward", most, what))
        return [*dict.fromkeys(splits), None]

    def _in_fewer(self, most: int, runs: Sequence[Run], room: int | None) -> list[Split]:
        """The loss with gradients in the forward, where that is possible, in most pieces and in fewer: in
        half as many as long as that saves time, and a piece is less than there is room for."""
        split = Split("forward", most)
        step = self._step(split)
        if step is None:
            split = Split("backward", most)
            step = self._step(split)
        splits = [split]
        while room is not None and step is not None and split.pieces > 2:
            split = split._replace(pieces=split.pieces // 2)
            before, step = step.problem.graph.base_seconds, self._step(split)
            saves = step is not None and step.problem.graph.base_seconds < before * (1 - _FASTER)
            if not saves or max(run.bytes for run in runs) > split.pieces * room:
                break
            splits.append(split)
        return splits

    @property
    def _little_seconds(self) -> float:
        """The difference in seconds below which one form is as good as the other."""
        prepared = self._prepared
        return EFFORTS[prepared.options.effort].other_form * prepared.problem.graph.base_seconds

    def _is_much(self, run: Run) -> bool:
        return run.bytes > self._prepared.problem.eager.peak_bytes * _SMALLEST

    def _best(
        self, wanted: Budget, progress: Progress, tried: Sequence[Split | None], minimum: bool = True
    ) -> PlanRecord:
        """The fastest plan for a budget in bytes, of some forms: first of those whose bound is lowest. Forms
        with MLPs in pieces come after all others, so that they make no plan slower."""
        steps = [(split, step) for split in tried if (step := self._step(split)) is not None]
        bounds = [self._bound(step, wanted) for _, step in steps]
        last = [split is not None and split.what == "auto" for split, _ in steps]
        found: PlanRecord | None = None
        refused = list[InfeasibleBudget]()
        for number, n in enumerate(sorted(range(len(steps)), key=lambda n: (last[n], bounds[n]))):
            rival = math.inf if found is None else found.predicted.seconds
            if found is not None and bounds[n] >= rival - self._little_seconds:
                continue
            share = part_of(progress, number / len(steps), (number + 1) / len(steps))
            try:
                made = self._plan(steps[n][1], wanted, share, False, rival)
            except InfeasibleBudget as error:
                refused.append(error)
            else:
                found = made if made.predicted.seconds < rival else found
        if found is None and minimum:
            return self._fitting_least(wanted, progress, [step for _, step in steps])
        if found is None:
            raise min(refused, key=lambda error: error.minimum_bytes)
        return found

    def _fitting_least(self, wanted: Budget, progress: Progress, steps: Sequence[Prepared]) -> PlanRecord:
        """The plan of the least peak of some steps, where it fits a budget that nothing faster fits."""
        refused: InfeasibleBudget | None = None
        for floor, step in sorted(((self._floor(step), step) for step in steps), key=lambda each: each[0]):
            if refused is not None and floor >= refused.minimum_bytes:
                break
            try:
                return self._plan(step, wanted, progress, True)
            except InfeasibleBudget as error:
                refused = min(refused or error, error, key=lambda error: error.minimum_bytes)
        assert refused is not None
        raise refused

    def _floor(self, step: Prepared) -> int:
        """Bytes of the whole step that no plan undercuts."""
        prepared = self._prepared
        return prepared.footprint.around(prepared.resident.total) + floor_bytes(step.problem.graph)

    def _least(self, wanted: Budget, progress: Progress, tried: Sequence[Split | None]) -> PlanRecord:
        """The fastest plan whose peak is hardly more than the least: than what no plan undercuts, or, where
        none is found there, than the least that is found."""
        prepared = self._prepared
        hardly = int(prepared.problem.eager.peak_bytes * _WORTH_TIME)
        steps = {split: step for split in tried if (step := self._step(split)) is not None}
        around = prepared.footprint.around(prepared.resident.total)
        floors = {split: self._floor(step) for split, step in steps.items()}
        left = prepared.footprint.whole_step(0, prepared.problem.final_bytes).total_bytes
        enough = max(left, min(floors.values()))

        def within(most_bytes: int, progress: Progress, minimum: bool) -> PlanRecord:
            near = [split for split in steps if floors[split] <= most_bytes]
            return self._best(Budget(most_bytes, wanted.text, relative=True), progress, near, minimum)

        try:
            made = within(enough + hardly, part_of(progress, 0.0, 0.4), False)
        except InfeasibleBudget as error:
            seconds, share = _LEAST_SECONDS / len(steps), part_of(progress, 0.4, 0.5)
            any_time = replace(wanted, max_overhead=None)
            quick = [
                replace(step, packings=(), options=replace(step.options, time_limit=seconds))
                for step in steps.values()
            ]
            plans = [self._plan(step, any_time, share) for step in quick]
            least = min(plans, key=lambda plan: plan.predicted.dynamic_peak_bytes)
            found = min(error.minimum_bytes, around + least.predicted.dynamic_peak_bytes)
            try:
                made = within(found + hardly, part_of(progress, 0.5, 1.0), True)
            except InfeasibleBudget:  # searches that time ends need not find again what one has found
                made = least.remember(prepared.options)
        if wanted.max_overhead is not None and made.overhead > wanted.max_overhead:
            plans = [
                self._plan(step, own, progress)
                for split, step in steps.items()
                if (own := wanted if split is None else self._in_terms_of(step, wanted)) is not None
            ]
            return min(plans, key=lambda plan: plan.predicted.dynamic_peak_bytes)
        asked = {"budget_bytes": wanted.bytes, "budget_text": wanted.text}
        return made.model_copy(update={"target": made.target.model_copy(update=asked)})

    def _in_terms_of(self, step: Prepared, wanted: Budget) -> Budget | None:
        """A budget with the extra time that is left to a step in pieces, over itself with nothing recomputed;
        None where that takes longer already."""
        assert wanted.max_overhead is not None
        most_seconds = self._prepared.problem.eager.seconds * (1 + wanted.max_overhead)
        left = most_seconds / step.problem.graph.base_seconds - 1
        return None if left < 0 else replace(wanted, max_overhead=left)

    def _step(self, split: Split | None) -> Prepared | None:
        """The step in a form; None where that is not possible.

        Raises:
            CaptureError: No split is.
        """
        if split is None:
            made = list(self._made.values())
            if made and all(isinstance(step, CaptureError) for step in made):
                assert isinstance(made[-1], CaptureError)
                raise made[-1]
            return self._prepared
        if split not in self._made:
            try:
                self._made[split] = _split(self._prepared, split)
            except CaptureError as error:
                self._made[split] = error
        step = self._made[split]
        return None if isinstance(step, CaptureError) else step


def _runs(prepared: Prepared) -> list[Run]:
    """The runs of operations that can be computed in pieces."""
    found = list[Run]()
    for graph in prepared.captured.graphs:
        if graph.joint is not None:
            with contextlib.suppress(NothingToSplit):
                found += splittable(graph.joint.module, graph.joint.forward_outputs, _what(prepared))[1]
    return found


def _most_pieces(prepared: Prepared, runs: Sequence[Run], room: int | None) -> int:
    """The number of pieces up to which more pieces still save memory."""
    most, peak = 2, prepared.problem.eager.peak_bytes
    little = _SMALLEST * (peak if room is None else min(room, peak))
    for run in runs:
        while -(-run.rows // (2 * most)) >= LEAST_ROWS and run.bytes > most * little:
            most *= 2
    return most


def _what(prepared: Prepared) -> SplitRuns:
    return "auto" if prepared.options.split == "auto" else "loss"


def split_hint(prepared: Prepared) -> str:
    """The sentence to add to an error about a budget if pieces would help; empty if they would not."""
    options = prepared.options
    if options.split != "none" or options.backend != "eager" or options.in_flight:
        return ""
    largest = max(_runs(prepared), key=lambda run: run.bytes, default=None)
    if largest is None or largest.bytes < prepared.problem.eager.peak_bytes * _WORTH_SAYING:
        return ""
    return (
        f". {format_bytes(largest.bytes)} of it come from {largest.modules[0] or 'the module'}: plan "
        "with split='loss', outputs='dropped' to compute what ends in the loss in pieces of rows"
    )


def in_pieces(prepared: Prepared, pieces: int) -> Prepared:
    """A step that is captured in one piece, in so many, with gradients in the forward where that is possible.

    Raises:
        CaptureError: There is nothing to split.
    """
    return _in_either_form(prepared, Split("forward", pieces, _what(prepared)))


def split_as(plan: PlanRecord, prepared: Prepared) -> Prepared:
    """A step that is captured in one piece, in the pieces of a plan."""
    splits = {Split.of(graph.split) for graph in plan.graphs if graph.split is not None}
    if not splits:
        return prepared
    try:
        return _in_either_form(prepared, min(splits))
    except NothingToSplit:
        return prepared


def _in_either_form(prepared: Prepared, split: Split) -> Prepared:
    try:
        return _split(prepared, split)
    except NothingToSplit:
        raise
    except CaptureError:
        return _split(prepared, split._replace(form="backward"))


def _split(prepared: Prepared, split: Split) -> Prepared:
    graphs = list[CapturedGraph]()
    why = CaptureError(f"split='{split.what}': no graph is captured. Plan with split='none'")
    for graph in prepared.captured.graphs:
        try:
            graphs.append(_split_graph(prepared, graph, split))
        except NothingToSplit as error:
            graphs.append(graph)
            why = error
    if not any(graph.spec.split for graph in graphs):
        raise why
    captured = replace(
        prepared.captured, graphs=graphs, notes=[*prepared.captured.notes, _note(graphs, split)]
    )
    device, meter, costs = prepared.device, prepared.meter, prepared.costs
    problem = build_problem(
        captured,
        device,
        meter or cuda_scratch(device),
        costs,
        copying=prepared.options.inputs == "overwritten",
        in_flight=prepared.step.in_flight,
    )
    sends = prepared.options.offload != "none"
    packings = find_kept_otherwise(captured, problem, device, meter, costs, sends=sends)
    if isinstance(costs, MeasuredCosts):
        costs.save()
    return replace(prepared, captured=captured, problem=problem, packings=packings)


def _split_graph(prepared: Prepared, graph: CapturedGraph, split: Split) -> CapturedGraph:
    joint = graph.joint
    if joint is None:
        return graph
    made, runs, dropped = split_joint(joint.module, joint.forward_outputs, split)
    positions = aot_metadata.output_positions(joint.module, joint.forward_outputs)
    for place, value in dropped.items():
        if prepared.step.outputs != "dropped" or positions.get(place) not in graph.spec.unused_outputs:
            shape = "x".join(map(str, value.shape))
            raise CaptureError(
                f"split='loss': the module returns a result of {shape} of which the loss is computed, and "
                "the training loop may use it. Where it uses nothing but the loss, as in "
                "model(...).loss.backward(), plan with outputs='dropped'; else with split='none'"
            )
    reading = read_joint(made, joint.forward_outputs, joint.handed)
    copied = {p for p, old in zip(reading.primals, joint.primals, strict=True) if old in joint.to_copy}
    reading.to_copy = frozenset(copied)
    rows = tuple(dict.fromkeys((module, run.rows) for run in runs for module in run.modules))
    return replace(graph, joint=reading, spec=replace(graph.spec, split=split), split_runs=rows)


def _note(graphs: Sequence[CapturedGraph], split: Split) -> str:
    runs = [
        f"{module or 'the module'} ({rows:,} rows)" for graph in graphs for module, rows in graph.split_runs
    ]
    how = "the loss's with each piece in the forward" if split.form == "forward" else "in the backward again"
    what = "the loss is" if split.what == "loss" else "the loss and MLPs are"
    return (
        f"{what} computed in {split.pieces} pieces of what begins at {', '.join(dict.fromkeys(runs))}, "
        f"gradients {how}: they are as near to the true ones as without a plan, and not equal in the "
        "last bits; what is computed there is not returned whole"
    )
