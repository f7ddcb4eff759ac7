"""The Dynamo backend that runs a plan's graphs by their schedules."""

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch.fx import GraphModule

from planner._torch import fake
from planner._torch.autocast_state import autocast_regions
from planner._torch.execution.checkpoints import as_written
from planner._torch.execution.host_place import HostPlace
from planner._torch.joint import aot
from planner._torch.joint.graph_modules import tell_sizes_alone
from planner._torch.module_paths import name_modules
from planner._torch.tracing.breaks.calls_left_out import refusal
from planner._torch.tracing.hindrances import saved_tensors_are_changed
from planner._torch.tracing.named_functions import call_what_was_captured
from planner.capture.uncaptured import AROUND
from planner.compiled.calls import Calls
from planner.compiled.graph_hook import CompiledGraph, GraphHook, HookContext
from planner.compiled.views_outside import compile_with_views_outside
from planner.errors import CaptureError, warn
from planner.graph.dynamo_graph import is_tensor_output, structure_of
from planner.graph.joint_graph import JointGraph
from planner.graph.joint_pass import AutocastContext
from planner.graph.passes import JOINT_PASSES
from planner.graph.spec import GraphSpec
from planner.graph.trace import TracedGraph, trace_joint
from planner.heap import older_objects_set_aside
from planner.hooks import hooks_for
from planner.hooks.awaiting_backward import Awaiting
from planner.hooks.undefined_gradients import UndefinedGradients
from planner.hooks.unused_outputs import UnusedOutputs
from planner.lowering.lowerings import Lowering, chosen_lowering
from planner.lowering.partition import no_recomputation, user_outputs
from planner.planfile.plan import GraphRecord, PlanRecord
from planner.runtime.executions import Alike, Executions, alike
from planner.runtime.first_forward import Path
from planner.runtime.forward_only import warns_if_differentiated
from planner.runtime.own_errors import warn_unplanned
from planner.runtime.read_again import ReadAgain
from planner.runtime.recorded_graph import RecordedGraph
from planner.runtime.recordings import Recordings
from planner.runtime.remap import (
    among_sizes,
    fits_whole,
    grown,
    left_out,
    matches,
    planned_bytes,
    remap_schedule,
    reruns_what_may_run,
    same_operations,
    spec_of,
    total_bytes,
    why_grown,
)
from planner.runtime.shapes.per_shape import MOST_SHAPES, StaticShapes

logger = logging.getLogger(__name__)


class PlanBackend:
    """A ``torch.compile`` backend that runs the graphs of a plan by their schedules.

    Args:
        model: The module; not held, as compiled code may outlive it.
        plan: The plan.
        warned_of_shapes: Returns whether inputs had other shapes than planned, of which the user was warned.
        path: Notes which of the plan's graphs are captured, and which others.
        calls: The calls of the module.
        on_capture: Called with the module for every graph that is captured.
        host: Keeps the results that the plan sends to the host; None if it sends none.
        recordings: Runs graphs as recorded CUDA graphs; None if operators are called one by one.
    """

    def __init__(
        self,
        model: weakref.ref[torch.nn.Module],
        plan: PlanRecord,
        warned_of_shapes: Callable[[], bool],
        path: Path,
        calls: Calls,
        on_capture: Callable[[torch.nn.Module], None],
        host: HostPlace | None = None,
        recordings: Recordings | None = None,
    ) -> None:
        self._model, self._plan, self._warned_of_shapes, self._path = model, plan, warned_of_shapes, path
        self._calls, self._on_capture, self._host = calls, on_capture, host
        self._recordings = recordings
        self._captured: Counter[str] = Counter()  # by structure: how many graphs Dynamo has captured
        self._autocast: list[str] = []
        self._alike: dict[str, Alike] = {}
        self._warned_of_executions = False

    def __call__(self, graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        call_what_was_captured(graph)
        if (why := refusal(graph)) is not None:
            raise CaptureError(why)
        if (model := self._model()) is not None:
            name_modules(graph, model)
            self._on_capture(model)
        self._autocast = autocast_regions()  # AOTAutograd switches it off while it traces
        call = compile_with_views_outside(graph, example_inputs, self._callable)
        tell_sizes_alone(graph)
        # For steps under the user's saved_tensors_hooks, as a planned graph saves other tensors.
        written = cache(lambda: as_written(graph).forward)
        return lambda *args: (written() if saved_tensors_are_changed() else call)(*args)

    def _callable(self, graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph by the plan, for its sizes or for symbolic ones. What fails runs as written."""
        structure = structure_of(graph)
        record = self._record_of(structure)
        number = self._captured[structure] - 1
        spec = spec_of(self._plan, record, structure, number, graph, example_inputs)
        if record is None and not spec.unused_outputs:  # it may need no plan: nothing in it has a backward
            if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs):
                return as_written(graph).forward
            if structure in self._plan.forward_only or left_out(
                self._plan, structure, number, example_inputs
            ):
                return warns_if_differentiated(as_written(graph).forward, warn)
        absent = [i for i in spec.unused_outputs if not is_tensor_output(graph, i)]
        if absent:
            warn(
                f"the plan says that the loss leaves output {absent[0]} unused, and the model has no such "
                "output: another model? It runs as it is, without the plan. Plan it again"
            )
            return as_written(graph).forward
        if not any(map(fake.is_size, example_inputs)):
            try:
                if record is None and not spec.per_use_inputs:
                    # It may be one of the plan's graphs after all, which then has its specification.
                    with contextlib.suppress(_NotOfThePlan):
                        return self._compile(graph, example_inputs, record, spec, exactly=True)
                    spec = GraphSpec.per_use(len(example_inputs))
                return self._compile(graph, example_inputs, record, spec)
            except aot.STARTS_AGAIN:
                # Dynamo captures the same graph again: do not count it twice.
                self._captured[record.structure if record else structure_of(graph)] -= 1
                raise
            except aot.DATA_DECIDE as error:  # Dynamo would run the forward as written, and say nothing
                warn(
                    f"data decide what a part of the forward does, and it runs as written: {error}. {AROUND}"
                )
            except Exception as error:
                warn_unplanned("a part of the forward", error, AROUND)
            return as_written(graph).forward
        try:
            symbolic = replace(spec, tangent_layouts={})  # gradients are copied to the strides of the outputs
            otherwise = self._compile(graph, example_inputs, record, symbolic, exactly=record is not None)
            if not any(g.gradient_layouts for g in self._plan.graphs if g.structure == structure):
                return otherwise
            beyond = self._laid_out_otherwise
        except Exception as error:  # PyTorch's operators raise errors of any kind at symbolic sizes
            logger.info("compiled for each shape, not for symbolic sizes: %s", error)
            otherwise, beyond = as_written(graph).forward, self._beyond_static_shapes
        return StaticShapes(
            lambda inputs: _or_as_written(graph, lambda: self._compile(graph, inputs, record, spec)),
            otherwise,
            beyond,
        )

    def _beyond_static_shapes(self, sizes: str) -> None:
        warn(
            f"inputs of sizes {sizes} run without the plan, and may exceed the budget: the model cannot be "
            f"captured at symbolic sizes, and was compiled for {MOST_SHAPES} shapes already. Pad to fewer"
        )

    def _laid_out_otherwise(self, sizes: str) -> None:
        warn(
            f"with inputs of sizes {sizes} gradients may differ in the last bits from those without a plan: "
            f"the model was compiled for {MOST_SHAPES} shapes already, and for others gradients between its "
            "graphs are copied. Pad to fewer"
        )

    def _compile(
        self,
        graph: GraphModule,
        example_inputs: Sequence[Any],
        record: GraphRecord | None,
        spec: GraphSpec,
        *,
        exactly: bool = False,
    ) -> Callable[..., Any]:
        """The callable of a graph, which runs a program of its own for each execution in a step.

        Raises:
            _NotOfThePlan: With ``exactly``: the graph is made of other operations than planned.
        """
        with older_objects_set_aside():
            return self._compile_executions(graph, example_inputs, record, spec, exactly)

    def _compile_executions(
        self,
        graph: GraphModule,
        example_inputs: Sequence[Any],
        record: GraphRecord | None,
        spec: GraphSpec,
        exactly: bool,
    ) -> Callable[..., Any]:
        first, followed = self._compile_program(
            graph, example_inputs, record and record.programs[0], spec, exactly
        )
        record = record or followed
        if record is None:
            return first
        planned = self._alike.get(record.structure) or alike(self._plan, record.structure)
        self._alike[record.structure] = planned

        def compile_(number: int, inputs: Sequence[Any]) -> Callable[..., Any]:
            program = planned.programs[number]
            spec = among_sizes(GraphSpec.of(program), graph, inputs)
            if any(map(fake.is_size, inputs)):
                spec = replace(spec, tangent_layouts={})
            return self._compile_program(graph, inputs, program, spec, exactly, warn_of_it=False)[0]

        def compile_later(number: int, inputs: Sequence[Any]) -> Callable[..., Any]:
            return _or_as_written(graph, lambda: compile_(number, inputs))

        programs: dict[int, Callable[..., Any]] = {planned.number(record.programs[0]): first}
        # Programs of other graphs are compiled when they are needed. With symbolic sizes all are compiled
        # now: Dynamo knows these sizes only here.
        symbolic = any(map(fake.is_size, example_inputs))
        own = {planned.order[i] for i in planned.of_graph[record.occurrence]}
        for number in range(len(planned.programs)) if symbolic else own:
            if number not in programs:
                programs[number] = compile_(number, example_inputs)
        return Executions(
            planned,
            record.occurrence,
            programs,
            # It holds the graph, so it is passed only if it is needed.
            compile_later if len(programs) < len(planned.programs) else None,
            self._calls,
            partial(self._shared, planned),
            self._beyond_executions,
        )

    def _shared(self, planned: Alike, strayed: bool) -> None:
        """Note that a graph begins to run for other layers too; ``strayed`` as for :class:`Executions`."""
        for record in planned.records:
            self._path.follow(record)
        if strayed:
            warn(
                "a graph that was captured for one layer runs for others of the same code too, and in this "
                "step some layers followed each other's part of the plan: it may exceed the budget. Later "
                "steps follow their own"
            )

    def _beyond_executions(self, planned: int) -> None:
        """Warn, once, that a graph runs more often in a step than the planned number of times."""
        if not self._warned_of_shapes() and not self._warned_of_executions:
            self._warned_of_executions = True
            warn(
                f"a part of the forward runs more often in this step than the {planned} times that were "
                "planned: it may exceed the budget. Plan with inputs for which it runs most often; where "
                "chance leaves parts out (layerdrop), plan with its probability at 0, and set it back then"
            )

    def _compile_program(
        self,
        graph: GraphModule,
        example_inputs: Sequence[Any],
        record: GraphRecord | None,
        spec: GraphSpec,
        exactly: bool,
        *,
        warn_of_it: bool = True,
    ) -> tuple[CompiledGraph, GraphRecord | None]:
        """Compile a graph to run one program: how the plan runs the graph in one of its executions.

        Returns:
            The compiled graph, and the plan's graph that it turned out to be, if any.
        """
        warn_once = warn if warn_of_it else (lambda _text: None)
        followed, exact = record, False
        target = self._plan.target
        lower = chosen_lowering(target.backend, target.backend_options, self._plan.fusion)

        def partition(traced: TracedGraph) -> tuple[GraphModule, GraphModule]:
            nonlocal followed, exact
            if record is None:  # symbolic sizes may give the plan's graph another structure
                followed = next((g for g in self._plan.graphs if matches(g, traced.reading)), None)
            exact = followed is not None and matches(followed, traced.reading)
            if exactly and not exact:
                raise _NotOfThePlan("traced into other operations than planned")
            for hook in hooks:
                hook.on_traced(traced)
            halves = read_again.emitted(
                traced.reading, *self._sequence(graph, followed, traced.reading, warn_once)
            )
            return halves.forward, halves.backward

        recorded: RecordedGraph | None = None

        def lowered_forward(module: GraphModule) -> aot.BoxedFunction:
            nonlocal recorded
            function = lower(module, "forward")
            if self._recordings is not None and user_outputs(module) is not None:
                recorded = self._recordings.new_graph(followed if exact else None, example_inputs)
            return function if recorded is None else recorded.forward(module, function)

        def lowered_backward(module: GraphModule) -> aot.BoxedFunction:
            function = lower(module, "backward")
            return function if recorded is None else recorded.backward(module, function)

        def compile_backward(module: GraphModule) -> aot.BoxedFunction:
            function = backward.compile(module)
            for hook in hooks:
                function = hook.backward(function)
            return function

        backward = UndefinedGradients(lowered_backward)
        read_again = ReadAgain(self._plan, graph, example_inputs, self._host)
        unused = spec.unused_outputs
        context = HookContext(graph, self._plan, unused, self._autocast, self._calls, warn)
        # UnusedOutputs replaces outputs before the hooks behind it look at them.
        hooks: list[GraphHook] = [
            backward,
            UnusedOutputs(unused),
            *hooks_for(context),
            read_again,
            Awaiting(self._calls),  # last: what another hook refuses can be repeated
        ]
        compiled = trace_joint(
            graph,
            example_inputs,
            spec,
            JOINT_PASSES,
            partition=partition,
            compile_forward=lowered_forward,
            compile_backward=compile_backward,
            autocast=AutocastContext.here(),
        )
        if exact:  # for other operations Inductor emits other programs anyway: the user was warned of these
            self._warn_of_other_programs(followed, lower, warn_once)
        if record is not None and compiled.followed != spec:  # without a record `spec` is only a guess
            summed = spec.per_use_inputs - compiled.followed.per_use_inputs
            relaid = spec.tangent_layouts.keys() - compiled.followed.tangent_layouts.keys()
            where = f"input {min(summed)}" if summed else f"output {min(relaid)}"
            warn_once(
                f"the gradients of {where} of a graph cannot be added up, or laid out in memory, as planned: "
                "gradients may differ in the last bits from those without a plan. planner.verify() tells"
            )
        return CompiledGraph(compiled.call, hooks), followed

    def _warn_of_other_programs(
        self, record: GraphRecord | None, lower: Lowering, warn: Callable[[str], None]
    ) -> None:
        """Warn if Inductor emits other programs than those whose peak the plan predicts."""
        found = getattr(lower, "digests", None)
        if record is None or found is None or not record.emitted or self._warned_of_shapes():
            return
        if [found.get("forward"), found.get("backward")] != record.emitted:
            warn(
                "Inductor emits other programs for this plan than when it was made (another version of "
                "PyTorch, or other settings of Inductor?): the step may take more than predicted. Plan it "
                "again"
            )

    def _record_of(self, structure: str) -> GraphRecord | None:
        """The plan's next graph of a structure. Layers of the same code are graphs of one structure, which
        Dynamo captures in their order: once for the planned shapes, and again for others."""
        matching = [g for g in self._plan.graphs if g.structure == structure]
        count = self._captured[structure]
        self._captured[structure] += 1
        if not matching:
            return None
        occurrences = matching[0].occurrences
        if not occurrences:
            return matching[count % len(matching)]
        return next((g for g in matching if g.occurrence == count % occurrences), None)

    def _sequence(
        self, graph: GraphModule, record: GraphRecord | None, joint: JointGraph, warn: Callable[[str], None]
    ) -> tuple[Sequence[int], Sequence[int], Mapping[int, int]]:
        """The schedule of a graph's backward. Warns if it is not exactly the plan's.

        Returns:
            Three things, with operations by index: the operations that the backward runs, in order; those of
            them that unpack bits or fetch a result from the host; and for each result that is sent to the
            host, the operation after which it has arrived.
        """
        if record is None:
            remapped = max((remap_schedule(g, joint) for g in self._plan.graphs), key=lambda a: a.followed)
            if message := self._path.note_other(remapped.followed, structure_of(graph)):
                warn(message)
            return remapped.backward, remapped.packed, {}
        self._path.follow(record)
        if not matches(record, joint):
            if same_operations(record, joint) and not reruns_what_may_run(record, joint):
                warn(
                    "the plan re-runs operations that must not run again; it runs without recomputation. "
                    "Plan it again"
                )
                return no_recomputation(joint), (), {}
            remapped = remap_schedule(record, joint)
            fits = fits_whole(self._plan, record, joint, other_shapes=self._warned_of_shapes())
            if not fits and (not remapped.only_less or grown(record, joint)):
                warn(
                    f"PyTorch traces this model into other operations than when the plan was made "
                    f"({self._why_other_operations()}); of the {remapped.planned} operations that the plan "
                    f"re-runs it re-runs the {remapped.followed} that are there, and may exceed the budget. "
                    "Plan it again"
                )
            return remapped.backward, remapped.packed, {}
        same = joint.fingerprint == record.fingerprint
        if not same and grown(record, joint) and not self._warned_of_shapes():
            warn(
                f"the operations produce {total_bytes(joint):,} bytes instead of {planned_bytes(record):,}, "
                f"although the inputs have the planned shapes: {why_grown(self._plan, self._model())}. The "
                "step may exceed the budget. Plan it again as it is now, or where it takes most"
            )
        return record.backward, record.packed, record.completed_by(record.forward_length)

    def _why_other_operations(self) -> str:
        then, now = self._plan.model.autocast, self._autocast
        if then != now:
            return f"under autocast {', '.join(then) or 'off'} then, {', '.join(now) or 'off'} now"
        return "other parameters to train, another version, device or shape?"


def _or_as_written(graph: GraphModule, compile_: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What is compiled inside of the user's step; the graph as written, with a warning, where that fails."""
    try:
        return compile_()
    except Exception as error:
        warn_unplanned("a part of the forward", error, AROUND)
        return as_written(graph).forward


class _NotOfThePlan(CaptureError):
    """A graph is made of other operations than those of the plan."""
