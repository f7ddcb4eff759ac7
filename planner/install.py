"""Putting a plan into a module, and taking it out again.

The planned module is the same object: its class, attributes, parameters, ``state_dict`` keys and
hooks stay. Only its call goes, while it trains, through the graphs that the plan describes.
"""

import logging
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from planner import _torch, _torch_jit, _torch_joint
from planner._torch_compiled import RUNS_A_PLAN, holds_dtensors, not_compiled
from planner._torch_definitions import Definitions
from planner._torch_modules import name_modules
from planner._torch_named import call_what_was_captured
from planner.adapt import adapt, among_sizes, describes, planned_bytes, total_bytes
from planner.arrivals import Expected
from planner.autocast import Surroundings, share_casts
from planner.awaiting import Awaiting, Calls
from planner.capture import run_forward
from planner.codegen import compile_graph
from planner.dropped_outputs import DroppedOutputs
from planner.errors import CaptureError, PlanFileError, PlanMismatch, PlanWarning
from planner.fingerprint import class_name, same_class, state_digest
from planner.first_forward import CapturedAgain, Path
from planner.graph_hooks import CompiledGraph, GraphHook, TracedGraph
from planner.graph_runner import detach_outputs, is_tensor_output, structure_of
from planner.joint import JointGraph, read_joint
from planner.kept_casts import AGAIN, KeptCasts, unplanned_call
from planner.meetings import Meetings
from planner.new_shapes import NewShapes, OnNewShape, checked, shape_key
from planner.own_errors import unplanned
from planner.partial_backward import PartialBackward
from planner.plan_file import GraphRecord, Plan
from planner.ranks import RankCheck, refuse_wrappers
from planner.read_again import ReadAgain
from planner.rewrite import no_recomputation, user_outputs
from planner.second_order import SecondOrder
from planner.static_shapes import MOST_SHAPES, StaticShapes
from planner.step import Loss, autocast_regions
from planner.tripwire import UnusedOutputs
from planner.unplanned import COMPILED_BEFORE, SHARDED, Unplanned, displaced
from planner.uses import compile_by_use

logger = logging.getLogger(__name__)


def apply(
    plan: Plan,
    model: torch.nn.Module,
    *,
    on_new_shape: OnNewShape = "reapply",
    loss: Loss | None = None,
) -> torch.nn.Module:
    """Make a module train by a plan, in place.

    Args:
        plan: A plan that was made for a module of the same class and state.
        model: The module. A plan that is installed already is replaced.
        on_new_shape, loss: See :meth:`Plan.apply`.

    Returns:
        The same module.

    Raises:
        PlanMismatch: If the plan was made for another model; the module is as it was.
        ValueError: If ``on_new_shape`` is not one of its three.
    """
    checked(on_new_shape)
    if not isinstance(model, torch.nn.Module):
        raise PlanMismatch(f"a plan is applied to an nn.Module, not to {type(model).__name__}")
    refuse_wrappers(model, "apply the plan to")
    found = class_name(model)
    if not same_class(plan.model.class_name, found):
        raise PlanMismatch(f"the plan is for a {plan.model.class_name}, this is a {found}")
    if state_digest(model) != plan.model.state_digest:
        raise PlanMismatch(
            f"the plan is for a {found} with other parameters or buffers (names, shapes or dtypes differ); "
            "plan this one, or build the model as it was built for the plan"
        )
    previous = _torch.installed_call(model)
    if isinstance(previous, PlannedCall):
        previous.retire()
        previous = previous.previous
    elif previous is not None:
        _warn(COMPILED_BEFORE)
    for part in map(_torch.installed_call, model.modules()):
        if isinstance(part, PlannedCall):
            part.unplanned.planned_call()  # it runs by this plan, not by its own
    _install(model, plan, previous, on_new_shape, loss).unplanned.wait()
    return model


def remove(model: torch.nn.Module) -> torch.nn.Module:
    """Take the plan out of a module, in place; a module without one is left alone.

    Returns:
        The same module.
    """
    installed = _torch.installed_call(model)
    if isinstance(installed, PlannedCall):
        installed.retire()
        _torch.install_call(model, installed.previous)
        vars(model).pop(_Companion.NAME, None)
    return model


def _install(
    model: torch.nn.Module,
    plan: Plan,
    previous: Callable[..., Any] | None = None,
    on_new_shape: OnNewShape = "reapply",
    loss: Loss | None = None,
) -> "PlannedCall":
    call = PlannedCall(model, plan, previous, on_new_shape, loss)
    _torch.install_call(model, call)
    vars(model)[_Companion.NAME] = _Companion(model)
    return call


def installed_plan(model: torch.nn.Module) -> Plan | None:
    """The plan that a module trains by, or None."""
    installed = _torch.installed_call(model)
    return installed.plan if isinstance(installed, PlannedCall) else None


class _Companion:
    """Lives among a planned module's attributes and, when they are copied or pickled, plans the copy too.

    PyTorch leaves out of copies what is installed in place of a module's call. A copy exists, without its
    attributes, before they are copied: that is when the plan is installed in it.
    """

    NAME = "_planner_companion"

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Companion":
        copied = memo.get(id(self._model))
        call = None if self._model is None else _torch.installed_call(self._model)
        if isinstance(copied, torch.nn.Module) and isinstance(call, PlannedCall):
            _install(copied, call.plan, None, call.on_new_shape, call.loss)
        return _Companion(copied)

    def __reduce__(self) -> tuple[Any, ...]:
        call = None if self._model is None else _torch.installed_call(self._model)
        if not isinstance(call, PlannedCall):
            return _companion_from_pickle, (self._model, None)
        return _companion_from_pickle, (self._model, call.plan.dumps(), call.on_new_shape)


def _companion_from_pickle(
    model: torch.nn.Module | None, text: str | None, on_new_shape: OnNewShape = "reapply"
) -> _Companion:
    if model is not None and text is not None:
        try:
            plan = Plan.loads(text, source="the plan of the pickled model")
            _install(model, plan, None, checked(on_new_shape))
        except PlanFileError as error:
            _warn(f"the model is unpickled without its plan: {error}")
    return _Companion(model)


class PlannedCall:
    """What a planned module runs in place of its own call.

    Attributes:
        plan: The plan.
        previous: What was installed before, by ``module.compile()`` for instance.
        on_new_shape, loss: As they were given to :func:`apply`.
        unplanned: Notices training without the plan.
    """

    _retired = False

    def __init__(
        self,
        model: torch.nn.Module,
        plan: Plan,
        previous: Callable[..., Any] | None,
        on_new_shape: OnNewShape = "reapply",
        loss: Loss | None = None,
    ) -> None:
        self.plan, self.previous = plan, previous
        self._model = model
        self._training = plan.model.training
        self.on_new_shape, self.loss = on_new_shape, loss
        self._calls = Calls(_warn)
        compile_ = partial(_compiled, weakref.ref(model), self._calls)
        self._shapes = NewShapes(model, plan, on_new_shape, compile_, loss)
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._compare_ranks: RankCheck | None = RankCheck(plan, on_new_shape)
        self._told_of_casts = False
        self._definitions: Definitions | None = None  # at the first planned step
        self._hooks: tuple[int, ...] | None = None  # on all modules, at the first planned step
        self.unplanned = Unplanned(model, self._training)
        setattr(self, RUNS_A_PLAN, True)

    def retire(self) -> None:
        """Another call is installed on purpose."""
        self.unplanned.planned_call()
        self._retired = True

    def reinstate(self, *, waiting: bool) -> None:
        """It is installed again; ``waiting`` for the first planned call, which has not come yet."""
        self._retired = False
        if waiting:
            self.unplanned.wait()

    def __del__(self) -> None:  # what is installed in its place lets go of it
        if not self._retired and not sys.is_finalizing():
            displaced(self._model, self)

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        if _torch_jit.is_traced():  # what is recorded is the module, not the plan
            return _torch.module_call(model, *args, **kwargs)
        if model.training is not self._training or not torch.is_grad_enabled():
            if torch.is_grad_enabled() and not self._told_of_casts:
                self._told_of_casts = unplanned_call([p for p in model.parameters() if p.requires_grad])
                if self._told_of_casts:
                    _warn(AGAIN)
            call = partial(_torch.module_call, model) if self.previous is None else self.previous
            output = call(*args, **kwargs)
            if model.training is not self._training and torch.is_grad_enabled():
                self.unplanned.called_in_other_mode(output)
            return output
        if self._compare_ranks is not None and self._compare_ranks():
            self._compare_ranks = None
        hooks = _torch.hooks_on_all_modules()
        if hooks != self._hooks:
            if self._hooks is not None:
                _warn(
                    "hooks were registered on all modules at once, or taken away, since the first planned "
                    "step: it runs as it is, without the plan. Apply the plan again to have them captured"
                )
                return _torch.module_call(model, *args, **kwargs)
            self._hooks = hooks
            self.unplanned.planned_call()
            if holds_dtensors(model):
                _warn(SHARDED)
        if self._definitions is None:
            self._definitions = Definitions(model)
        elif (changed := self._definitions.changed()) is not None:
            _warn(
                f"{changed} was changed since the first planned step: it runs as it is, without the plan. "
                "Apply the plan again to have the change captured"
            )
            return _torch.module_call(model, *args, **kwargs)
        return _torch.call_with_forward(model, self._forward, args, kwargs)

    def captured(self) -> None:
        """Look after the classes of what was captured now, too."""
        if self._definitions is not None:
            self._definitions.include(self._model)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.begin()
        key = None
        try:
            key = shape_key(args, kwargs)
            program = self._programs.get(key)
            if program is None:
                program = self._programs[key] = self._shapes.program(args, kwargs)
        except Exception as error:
            unplanned("a step with inputs that have not been seen before", error)
            program = self._programs[key] = run_forward
        return program(self._model, args, kwargs)


def _compiled(
    model: weakref.ref[torch.nn.Module], calls: Calls, plan: Plan, told_of_shapes: Callable[[], bool]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def compile_(once_more: bool) -> list[CapturedAgain]:
        paths = [Path(plan, captured_again=once_more) for _ in range(2)]
        backends = [PlanBackend(model, plan, told_of_shapes, path, calls) for path in paths]
        compiled = _torch.dynamo_compile_shapes(run_forward, backends, _not_captured_any_more, _not_captured)
        return [CapturedAgain(paths[i], compiled[i], lambda: compile_(False), i, _warn) for i in range(2)]

    planned, others = compile_(True)
    return planned, others


def _not_captured(error: Exception) -> None:
    unplanned("a part of the forward that cannot be captured", error)


def _not_captured_any_more() -> None:
    _warn(
        "the forward was captured so often that PyTorch gives up: what it does changes with every call "
        "(Python state, not shapes: these become symbols). It runs as it is, without the plan, where it "
        "does something new"
    )


class PlanBackend:
    """A ``torch.compile`` backend that runs the graphs of a plan by their schedules.

    Args:
        model: The module; not held, as what is compiled may outlive it.
        plan: The plan.
        told_of_shapes: Whether the inputs had other shapes than planned, about which the user was told.
        path: Told which of the plan's graphs are there.
        calls: Told when their backwards run.
    """

    def __init__(
        self,
        model: weakref.ref[torch.nn.Module],
        plan: Plan,
        told_of_shapes: Callable[[], bool],
        path: Path,
        calls: Calls,
    ) -> None:
        self._model, self._plan, self._told_of_shapes, self._path = model, plan, told_of_shapes, path
        self._calls = calls
        self._captured: Counter[str] = Counter()
        self._autocast: list[str] = []

    def __call__(self, graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        call_what_was_captured(graph)
        if (model := self._model()) is not None:
            name_modules(graph, model)
            if isinstance(installed := _torch.installed_call(model), PlannedCall):
                installed.captured()
        self._autocast = autocast_regions()  # AOTAutograd switches it off while it traces
        record = self._record_of(structure_of(graph))
        if record is None and not any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs
        ):
            return graph.forward
        if record is not None:
            record = among_sizes(record, graph, example_inputs)
        unused = record.unused_outputs if record is not None else []
        absent = [i for i in unused if not is_tensor_output(graph, i)]
        if absent:
            _warn(
                f"the plan says that the loss leaves output {absent[0]} unused, and the model has no such "
                "output: another model? It runs as it is, without the plan"
            )
            return graph.forward
        if not any(map(_torch.is_size, example_inputs)):
            try:
                return self._compile(graph, example_inputs, record)
            except _torch_joint.DATA_DECIDE as error:  # Dynamo would go on without a word
                _warn(f"data decide what a part of the forward does, which runs without the plan: {error}")
            except Exception as error:
                unplanned("a part of the forward", error)
            return graph.forward
        try:
            return self._compile(graph, example_inputs, record, exactly=True)
        except Exception as error:  # whatever PyTorch's operators raise at symbolic sizes
            logger.info("compiled for each shape, not for symbolic sizes: %s", error)
        return StaticShapes(
            graph, lambda graph, inputs: self._compile(graph, inputs, record), self._beyond_static_shapes
        )

    def _beyond_static_shapes(self, sizes: str) -> None:
        _warn(
            f"inputs of sizes {sizes} run without the plan, and may exceed the budget: the model cannot be "
            f"captured at symbolic sizes, and was compiled for {MOST_SHAPES} shapes already. Pad to fewer"
        )

    def _compile(
        self,
        graph: GraphModule,
        example_inputs: Sequence[Any],
        record: GraphRecord | None,
        *,
        exactly: bool = False,
    ) -> Callable[..., Any]:
        """The callable of a graph. If ``exactly``, an error where it is not made of the plan's operations."""
        unused = record.unused_outputs if record is not None else []
        by_use = record.inputs_by_use if record is not None else []
        layouts = {g.output: g.dimensions for g in record.gradient_layouts} if record is not None else {}
        around, kept = Surroundings.here(), dict[int, torch.dtype]()

        def partition(joint: GraphModule, outputs: int) -> tuple[GraphModule, GraphModule]:
            traced = TracedGraph(joint, outputs, len(example_inputs), frozenset(by_use), kept)
            for hook in hooks:
                hook.on_traced(traced)
            return self._partition(record, second_order, again, joint, outputs, exactly)

        def compile_backward(module: GraphModule) -> _torch_joint.BoxedFunction:
            function = backward.compile(module)
            for hook in hooks:
                function = hook.backward(function)
            return function

        obstacle = "it was called under autocast" if self._autocast else None
        if self._plan.rung != "one-graph":
            if record is None and any(g.inputs_by_use for g in self._plan.graphs):
                # A graph that the plan has not seen, of a model in which gradients meet: any of its own may.
                by_use = list(range(len(example_inputs)))
            # Held for a second run, what one part hands to another would live for longer than planned.
            obstacle = "it is captured in several parts"
        second_order = SecondOrder(graph, obstacle, _warn)
        backward = PartialBackward(lambda module: compile_graph(module, "backward", fixed_outputs=0))
        again = ReadAgain(self._plan, graph, example_inputs)
        hooks: list[GraphHook] = [
            KeptCasts(_warn), Expected(_warn), Meetings(_warn), backward, second_order, again,
            UnusedOutputs(unused), DroppedOutputs(unused, self._plan, _warn), Awaiting(self._calls),
        ]  # fmt: skip
        compiled = compile_by_use(
            detach_outputs(graph, unused),
            example_inputs,
            by_use,
            prepare=lambda joint: kept.update(share_casts(joint, graph, example_inputs, around)),
            partition=partition,
            forward_compiler=_compile_forward,
            backward_compiler=compile_backward,
            layouts=layouts,
        )
        if compiled.left or compiled.relaid:
            where = f"input {min(compiled.left)}" if compiled.left else f"output {min(compiled.relaid)}"
            _warn(
                f"the gradients of {where} of a graph cannot be added up, or laid out in memory, as planned: "
                "gradients may differ in the last bits from those without a plan. planner.verify() tells"
            )
        return CompiledGraph(compiled.call, hooks)

    def _record_of(self, structure: str) -> GraphRecord | None:
        """The plan's graph of a structure; of several the next, as layers of the same code come in turn,
        once for the shapes that were planned and again for others."""
        matching = [g for g in self._plan.graphs if g.structure == structure]
        count = self._captured[structure]
        self._captured[structure] += 1
        if not matching:
            return None
        turns = matching[0].turns
        if not turns:
            return matching[count % len(matching)]
        return next((g for g in matching if g.turn == count % turns), None)

    def _partition(
        self,
        record: GraphRecord | None,
        second_order: SecondOrder,
        again: ReadAgain,
        module: GraphModule,
        outputs: int,
        exactly: bool,
    ) -> tuple[GraphModule, GraphModule]:
        joint = read_joint(module, outputs)
        if exactly and record is not None and not describes(record, joint):
            raise CaptureError("traced into other operations than planned")
        second_order.on_joint(module, joint)
        halves = again.emitted(joint, self._sequence(record, joint))
        return halves.forward, halves.backward

    def _sequence(self, record: GraphRecord | None, joint: JointGraph) -> Sequence[int]:
        """What a graph's backward runs, in order; says so where the plan is not followed to the letter."""
        if record is None:  # a structure that is not the plan's, as symbolic sizes may give it
            record = next((g for g in self._plan.graphs if describes(g, joint)), None)
        if record is None:
            adapted = max((adapt(g, joint) for g in self._plan.graphs), key=lambda a: a.followed)
            told = self._path.left(adapted.followed)
            if told:
                _warn(told)
            return adapted.backward
        self._path.follow(record)
        if not describes(record, joint):
            if not all(joint.ops[i].recomputable for i in record.recomputed if i < joint.forward_length):
                _warn("the plan re-runs what may not be re-run; it runs without recomputation. Plan it again")
                return no_recomputation(joint)
            adapted = adapt(record, joint)
            # Where all that the operations produce fits into the planned peak, any order of them does.
            fits = total_bytes(joint) <= self._plan.predicted.dynamic_peak_bytes
            if not fits and (not adapted.only_less or _grown(record, joint)):
                _warn(
                    f"PyTorch traces this model into other operations than when the plan was made "
                    f"({self._what_differs()}); of the {adapted.planned} operations that the plan re-runs it "
                    f"re-runs the {adapted.followed} that are there, and may exceed the budget. Plan it again"
                )
            return adapted.backward
        same = joint.fingerprint == record.fingerprint
        if not same and _grown(record, joint) and not self._told_of_shapes():
            _warn(
                f"the operations produce {total_bytes(joint):,} bytes instead of {planned_bytes(record):,}, "
                "although the inputs have the planned shapes: something else in the model sets sizes. The "
                "step may exceed the budget"
            )
        return record.backward

    def _what_differs(self) -> str:
        then, now = self._plan.model.autocast, self._autocast
        if then != now:
            return f"under autocast {', '.join(then) or 'off'} then, {', '.join(now) or 'off'} now"
        return "other parameters to train, another version, device or shape?"


def _grown(record: GraphRecord, joint: JointGraph) -> bool:
    return total_bytes(joint) > planned_bytes(record)


def _compile_forward(module: GraphModule) -> _torch_joint.BoxedFunction:
    return compile_graph(module, "forward", fixed_outputs=user_outputs(module))


def _warn(text: str) -> None:
    logger.warning(text)
    warnings.warn(text, PlanWarning, stacklevel=2)
