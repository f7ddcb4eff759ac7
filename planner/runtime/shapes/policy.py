"""Inputs of other shapes than planned: whether their memory fits, and what happens if it does not.

A planned module runs any shape by the plan's schedule. Shapes that are nowhere larger than planned take no
more memory. For others, the step is captured again without data, and the plan's schedule is simulated on it.
Then the user gets a warning with the peak, a new plan, or an error.

Inputs that grow step by step do not get a plan each: an earlier plan runs them where it fits, and the last of
a few plans is made for the least memory.

Data may lead a forward along a path that the plan has not seen, at any shape. With "replan" that path is
planned before the next step, unless the old plan fits it.
"""

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Literal, get_args

import torch

from planner.environment import tell
from planner.errors import CaptureError, PlanMismatch, warn
from planner.planfile.budget import format_bytes
from planner.planfile.plan import PlanRecord, TensorRecord, WholeStep
from planner.planning.make_plan import input_records
from planner.planning.options import options_of
from planner.planning.prepare import prepare
from planner.planning.prepared import Prepared
from planner.runtime.first_forward import OtherPaths
from planner.runtime.own_errors import is_meant
from planner.runtime.shapes.arguments import repeated
from planner.runtime.shapes.program import Compiled, Others, Program, Shapes, covers, structures_of_plan
from planner.runtime.shapes.schedule_at import schedule_at
from planner.training_step.inputs import names_of_parameters
from planner.training_step.step import Loss, Step
from solvers.model.schedule import simulate

OnNewShape = Literal["reapply", "replan", "error"]
"""What a planned module does with inputs that are larger than planned: "reapply" runs them by the same plan,
with a warning of the new peak, "replan" makes a plan for them. "error" refuses inputs that differ at all."""

MOST_PREDICTIONS = 8
"""The most predictions of a peak for one module. Each takes as long as planning without solving."""

MOST_PLANS = 8
"""The most plans that one module has at a time. Each holds graphs of its own."""

MOST_PATHS = 4
"""The most unseen paths that are planned for one module. Each takes as long as planning."""

MORE_THAN_LEAST = 1.1
"""With a budget of "min", an earlier plan runs larger inputs if they take at most this times its own peak."""


def checked(policy: str) -> OnNewShape:
    """Check ``on_new_shape=``, and return it.

    Raises:
        ValueError: There is no such policy.
    """
    if policy not in get_args(OnNewShape):
        raise ValueError(f"on_new_shape is {policy!r}; expected one of {', '.join(get_args(OnNewShape))}")
    return policy  # type: ignore[return-value]


_PLAN_LARGEST = "Plan for the largest shape, or pad to fewer"
_PLAN_COSTLIEST = "Plan with inputs that take the path that needs most"


class NewShapes:
    """Decides which program runs a shape that has not been seen before, and tells the user.

    Args:
        model: The module.
        plan: The plan that was applied.
        policy: See :data:`OnNewShape`.
        compile_: Compiles two forwards of a plan, one for the planned shape and one for others. It is called
            with the plan, a function that tells whether other shapes have come, and an object that notes
            unseen paths.
        loss: As for :func:`planner.plan`; None for the one that the plan was made with.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: PlanRecord,
        policy: OnNewShape,
        compile_: Callable[[PlanRecord, Callable[[], bool], OtherPaths], tuple[Compiled, Compiled]],
        loss: Loss | None = None,
    ) -> None:
        self._model, self._policy, self._compile = model, policy, compile_
        self._target, self._optimizer_bytes = plan.target, plan.resident.optimizer_bytes
        options = options_of(plan)
        if plan.resident.gradient_bytes:  # None would be as they are when the new shape comes
            options = replace(options, accumulate=True)
        self._options = options if loss is None else replace(options, loss=loss)
        self._parameters = names_of_parameters(model.forward)
        self._planned = dict(self._named((r.path, tuple(r.shape)) for r in plan.model.inputs))
        self._planned_layouts = dict(self._named((r.path, _layout(r)) for r in plan.model.inputs))
        self._warned_of_strides = self._warned_of_gradients = False
        self._with_gradients = self._requiring_gradients(plan.model.inputs)
        # By the set of inputs that require gradients: why such a step cannot be planned; "" if it can.
        self._refused = {frozenset(self._with_gradients): ""}
        self._other_shapes = Others()
        self._programs = [self._program(plan, self._planned)]
        self._predictions = self._paths_met = 0
        self._replaced: set[str] = set()  # structures of graphs whose plan did not fit another path

    def program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """The compiled forward to run for a call whose shapes have not been seen before.

        Raises:
            PlanMismatch: The policy is "error" and the shape is not the planned one.
            InfeasibleBudget: The policy is "replan" and no plan for this shape fits the budget.
            CaptureError: Other inputs require gradients than planned, and such a step cannot be planned.
        """
        records = input_records(Step(args, kwargs))
        shapes = dict(self._named((r.path, tuple(r.shape)) for r in records))
        self._warn_of_strides(records)
        self._warn_of_gradients(records)
        if self._policy == "error" and shapes != self._planned:
            raise PlanMismatch(
                f"{self._differences(shapes)}; the plan was applied with on_new_shape='error'. Plan for this "
                "shape, or apply with 'reapply' or 'replan'"
            )
        self._refuse_gradients(records, args, kwargs)
        self._other_shapes.came = self._other_shapes.came or shapes != self._planned
        # Inductor's programs for smaller shapes may take more, so each shape is looked at.
        fit = operator.eq if self._target.backend == "inductor" else covers
        for program in self._programs_for(shapes):
            if any(fit(known, shapes) for known in program.covered):
                return program.run(shapes)
        return self._program_for_larger(args, kwargs, shapes).run(shapes)

    @property
    def strayed(self) -> bool:
        """Whether a forward took a path that its plan has not seen."""
        return any(program.paths.met for program in self._programs)

    def look_at_path(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Plan again for arguments whose forward took an unseen path, unless the plan fits that path too.

        Data may decide the path of a forward, as where a mask is set everywhere or not. A step's path is not
        known before the step, so one plan must fit all paths. It is made for the path that takes most memory,
        at the largest sizes.

        Returns:
            Whether another plan runs from now on.
        """
        program = next(p for p in self._programs if p.paths.met)
        program.paths.met = False
        self._paths_met += 1
        if self._paths_met > MOST_PATHS:
            return False
        seen = structures_of_plan(program.plan)
        try:
            prepared, shapes = self._prepared_path(args, kwargs, program, seen)
            found = _captured(prepared) - seen - program.paths.fitting
            if not found:  # chance decides the path, and took a known one this time
                return False
            if self._first_fitting(prepared, [program]) is not None:
                program.paths.fitting |= found
                _, total = self._taken_by(program, prepared)
                tell(
                    f"{type(self._model).__name__} takes {format_bytes(total)} on that path, by the same plan"
                )
                return False
            if found <= self._replaced:  # neither path fits the other's plan: they would replace each other
                _, total = self._taken_by(program, prepared)
                raise PlanMismatch(f"by the plan for another path it takes {format_bytes(total)}")
            made = self._program(self._replanned(prepared, "another path of its forward"), shapes)
        except Exception as error:
            warn(
                "the path that the forward took is not planned, and may exceed the budget: "
                f"{error}. {_PLAN_COSTLIEST}"
            )
            return False
        self._replaced |= seen
        self._programs[self._programs.index(program)] = made
        return True

    def _prepared_path(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program, seen: set[str]
    ) -> tuple[Prepared, Shapes]:
        """Prepare the step on its unseen path. Its inputs are repeated up to the largest sizes of a program;
        if these take a known path, the step is prepared at its own sizes."""
        shapes = self._shapes_of(args, kwargs)
        largest = max(program.covered, key=lambda known: sum(map(math.prod, known.values())))
        if largest != shapes and covers(largest, shapes):
            with contextlib.suppress(Exception):  # the model may refuse repeated inputs
                larger = repeated(args, kwargs, map(largest.get, shapes))
                prepared = self._prepare(*larger)
                if not _captured(prepared) <= seen:
                    return prepared, self._shapes_of(*larger)
        return self._prepare(args, kwargs), shapes

    def _shapes_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
        return dict(self._named((r.path, tuple(r.shape)) for r in input_records(Step(args, kwargs))))

    def _program_for_larger(self, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes) -> Program:
        """The program for shapes that no program covers: the first one, with a warning, or a new one."""
        first, newest = self._programs[0], self._programs[-1]
        budget = self._target.budget_bytes
        others = "other than" if self._target.backend == "inductor" else "larger than"
        diff = f"the inputs are {others} those that were planned: {self._differences(shapes)}"
        if self._policy == "reapply" and self._predictions >= MOST_PREDICTIONS:
            warn(
                f"{diff}. After {MOST_PREDICTIONS} predictions its peak is not predicted any more. "
                f"{_PLAN_LARGEST}"
            )
            return first
        if self._policy == "replan" and budget is None and len(self._programs) >= MOST_PLANS:
            return newest  # made for the least memory: no other would take less
        self._predictions += 1
        try:
            prepared = self._prepare(args, kwargs)
            if self._policy == "replan":
                fitting = self._first_fitting(prepared, self._programs_for(shapes))
            else:
                peak_bytes, total = self._taken_by(first, prepared)
        except Exception as error:
            # A replay follows the forward along another path, with a warning: that is no refusal.
            other_path = isinstance(error, PlanMismatch) and self._target.backend == "replay"
            if is_meant(error) and not other_path:
                raise
            warn(
                f"{diff}. The new peak cannot be predicted ({error}), and may exceed the budget. "
                f"{_PLAN_LARGEST}"
            )
            first.covered.append(shapes)  # one warning is enough
            return first
        if self._policy == "replan":
            if fitting is not None:
                fitting.covered.append(shapes)
                return fitting
            kind = "larger" if self._planned.keys() <= shapes.keys() else "other"
            reason = f"{kind} inputs ({self._differences(shapes)})"
            # Added to the others; where all are made, in the place of the last.
            self._programs[MOST_PLANS - 1 :] = [self._program(self._replanned(prepared, reason), shapes)]
            return self._programs[-1]
        first.covered.append(shapes)
        planned_bytes = first.plan.predicted.dynamic_peak_bytes
        if self._policy == "reapply" and peak_bytes > planned_bytes:
            within = "within" if budget is not None and total <= budget else "over"
            limit = "" if budget is None else f", {within} the budget of {format_bytes(budget)}"
            warn(
                f"{diff}. By the same plan the step is predicted to peak at {format_bytes(total)}{limit}; "
                f"{peak_bytes:,} bytes of that are its own, where {planned_bytes:,} were planned. "
                "Plan for the largest shape, or apply with on_new_shape='replan'"
            )
        return first

    def _taken_by(self, program: Program, prepared: Prepared) -> tuple[int, int]:
        """Bytes that a program takes at the sizes of a step: its dynamic peak, and the whole step."""
        peak, whole = _taken(program.plan, prepared)
        return peak, whole.total_bytes + self._unknown_optimizer_bytes()

    def _programs_for(self, shapes: Shapes) -> list[Program]:
        """The programs that may run such shapes: those made for the same inputs, or all if no plan may be
        added."""
        any_of_them = self._policy != "replan" or len(self._programs) >= MOST_PLANS
        return [p for p in self._programs if any_of_them or p.planned.keys() == shapes.keys()]

    def _first_fitting(self, prepared: Prepared, programs: Sequence[Program]) -> Program | None:
        """The first program whose schedule fits the budget at the sizes of a step; None if there is none."""
        budget = self._target.budget_bytes
        for program in programs:
            try:
                peak_bytes, total = self._taken_by(program, prepared)
            except PlanMismatch:
                continue
            enough = MORE_THAN_LEAST * program.plan.predicted.dynamic_peak_bytes
            fits = peak_bytes <= enough if budget is None else total <= budget
            if fits:
                return program
        return None

    def _warn_of_strides(self, records: Sequence[TensorRecord]) -> None:
        known = self._planned_layouts
        for name, record in self._named((r.path, r) for r in records):
            if self._warned_of_strides or not record.strides or _layout(record) == known.get(name):
                continue
            self._warned_of_strides = True
            warn(
                f"{name} has other strides than planned ({tuple(record.strides)}): copies of it "
                "are not predicted, and the step may take more. Pass .contiguous(), or plan with one like it"
            )

    def _warn_of_gradients(self, records: Sequence[TensorRecord]) -> None:
        other = self._requiring_gradients(records) - self._with_gradients
        if other and not self._warned_of_gradients:
            self._warned_of_gradients = True
            warn(
                f"{min(other)} requires a gradient, and did not when the plan was made: neither that "
                "gradient nor the backward that leads to it is predicted, and the step may take more. Plan "
                "with inputs that require gradients where those of training do"
            )

    def _refuse_gradients(
        self, records: Sequence[TensorRecord], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Check that a step can still be planned if other inputs require gradients than planned.

        A forward that takes gradients with respect to its inputs makes them require gradients itself. If they
        do so before it is called, capture may give other graphs.

        Raises:
            CaptureError: The step cannot be planned.
        """
        if self._target.backend == "replay":
            return  # replays run any forward as it is written
        requiring = frozenset(self._requiring_gradients(records))
        if requiring not in self._refused:
            self._refused[requiring] = ""
            try:
                self._prepare(args, kwargs)
            except CaptureError as error:
                self._refused[requiring] = str(error)
        if self._refused[requiring]:
            raise CaptureError(self._refused[requiring])

    def _requiring_gradients(self, records: Sequence[TensorRecord]) -> set[str]:
        found = self._named((r.path, r.requires_grad) for r in records)
        return {name for name, requires in found if requires}

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        # Only a new plan needs measured seconds; a prediction needs bytes alone.
        options = self._options if self._policy == "replan" else replace(self._options, costs="roofline")
        step = Step.of(self._model, args, kwargs, options.loss, options.outputs)
        return prepare(self._model, step, options)

    def _program(self, plan: PlanRecord, shapes: Shapes) -> Program:
        paths = OtherPaths()
        planned, others = self._compile(plan, self._other_shapes, paths)
        return Program(plan, shapes, planned, others, [shapes], paths)

    def _replanned(self, prepared: Prepared, reason: str) -> PlanRecord:
        """Make a new plan. The last one is made for the least memory, as it runs all larger inputs."""
        from planner.planning.solve import plan_prepared

        target = self._target
        budget, unknown = target.budget_bytes, self._unknown_optimizer_bytes()
        budget_left = target.budget_text if budget is None else budget - unknown
        is_last = len(self._programs) >= MOST_PLANS - 1
        made = plan_prepared(prepared, "min" if is_last and budget is not None else budget_left)
        if budget is not None and _total(made) + unknown > budget:
            made = plan_prepared(prepared, budget_left)  # raises InfeasibleBudget, with the least peak
        last_plan = (
            f"; inputs grew so often that {MOST_PLANS} plans were made: this one, for the least memory, is "
            "for larger ones too. Plan for the largest inputs at first"
        )
        tell(
            f"{type(self._model).__name__} planned again for {reason}: "
            f"{format_bytes(_total(made))}, {100 * made.overhead:+.0f} % time{last_plan if is_last else ''}"
        )
        return made

    def _unknown_optimizer_bytes(self) -> int:
        """Bytes of optimizer state in the plan if the optimizer is not known here, as with a plan from a
        file; else 0, as new predictions then count the state themselves."""
        return self._optimizer_bytes if self._options.optimizer is None else 0

    def _named(self, pairs: Any) -> Iterator[tuple[str, Any]]:
        """The same pairs, with the name of the forward's parameter instead of ``args[0]`` or ``kwargs['x']``
        in their paths: an input has one name, whether it is passed by position or by keyword."""
        for path, of_input in pairs:
            kind, _, rest = path.partition("[")
            inside, _, deeper = rest.partition("]")
            name = inside.strip("'")
            if kind == "args" and inside.isdigit() and int(inside) < len(self._parameters):
                name = self._parameters[int(inside)]
            yield f"{name}{deeper}", of_input

    def _differences(self, shapes: Shapes) -> str:
        texts = [
            f"{name} is {_text(shape)}"
            + (f", planned was {_text(self._planned[name])}" if name in self._planned else ", not planned")
            for name, shape in shapes.items()
            if self._planned.get(name) != shape
        ]
        texts += [f"{name} was planned and is not there" for name in self._planned if name not in shapes]
        return "; ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


def _layout(record: TensorRecord) -> list[tuple[int, int]]:
    """How a tensor lies in memory, whatever its sizes: its dimensions, the innermost first, each with 1 where
    there are gaps between its elements, -1 where they overlap, and 0 where they follow each other."""
    found, dense = [], 1
    for stride, dim, size in sorted(zip(record.strides or (), count(), record.shape, strict=False)):
        found.append((dim, (stride > dense) - (stride < dense)))
        dense = max(dense, stride * size)
    return found


def _captured(prepared: Prepared) -> set[str]:
    """The structures of the graphs that a step was captured as."""
    return {graph.structure for graph in prepared.captured.graphs}


def _total(plan: PlanRecord) -> int:
    return plan.predicted.peak_bytes if plan.whole_step is None else plan.whole_step.total_bytes


def _taken(plan: PlanRecord, prepared: Prepared) -> tuple[int, WholeStep]:
    """The memory of a plan's schedule at the sizes of a prepared step: its dynamic peak, and the whole step.
    With Inductor the programs that it makes for the schedule count."""
    prepared, schedule = schedule_at(plan, prepared)
    problem = prepared.problem
    if prepared.options.backend != "inductor":
        return simulate(problem.graph, schedule).peak_bytes, prepared.whole_step(schedule)
    from planner.planning.inductor import emitted_model  # which imports Inductor

    sequences = problem.backward_sequences(prepared.captured, schedule)
    peak_bytes = emitted_model(prepared, plan.fusion).step(sequences).peak_bytes
    return peak_bytes, prepared.footprint.whole_step(peak_bytes, problem.final_bytes)


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
