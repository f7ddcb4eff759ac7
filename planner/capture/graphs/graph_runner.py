"""Dynamo graphs inside a step that is being captured.

A :class:`GraphRunner` runs one graph that Dynamo made. In the probing pass it runs the graph's operations and
notes which outputs get a gradient. Then it traces the joint graph. In the compiled pass it returns the
results in one event, and records that: tensors without data or, in a step that runs with data, the computed
ones.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import GraphModule

from planner._torch import fake
from planner._torch.autocast_state import autocast_state, under_autocast
from planner._torch.execution.checkpoints import as_written
from planner._torch.execution.function_calls import DIFFERENTIATED_TWICE
from planner._torch.execution.settings import default_dtype
from planner._torch.joint import aot, aot_metadata
from planner._torch.joint.gradients_inside import MEET_OUTSIDE, differentiated_inputs, meet_outside
from planner._torch.joint.graph_modules import graph_module
from planner._torch.joint.memory_layout import is_cut_out, is_part
from planner._torch.module_paths import described_input
from planner._torch.tracing.hindrances import saved_tensors_are_changed
from planner._torch.without_data import fake_values
from planner.capture.graphs.alike_executions import AlikeExecutions
from planner.capture.graphs.arrival_order import RecordedArrivalOrder
from planner.capture.graphs.copies_apart import copy_apart
from planner.capture.graphs.fresh_results import fresh_results
from planner.capture.graphs.graph_call import GraphCall
from planner.compiled.graph_hook import CompiledGraph
from planner.errors import CaptureError
from planner.graph.accumulation import is_sum
from planner.graph.dynamo_graph import structure_of
from planner.graph.joint_graph import JointGraph
from planner.graph.joint_pass import AutocastContext
from planner.graph.overwritten import to_copy
from planner.graph.passes import JOINT_PASSES
from planner.graph.passes.in_place_accumulation import leaves_as_view
from planner.graph.spec import GraphSpec
from planner.graph.tangent_layouts import TangentLayouts
from planner.graph.trace import TracedGraph, trace_joint
from planner.hooks.autocast_cast_cache import AutocastCastCache
from planner.hooks.unused_outputs import UnusedOutputs
from planner.hooks.written_in_place import WrittenInPlace
from planner.lowering.lowerings import Lowering
from planner.lowering.partition import Partition, no_recomputation, partition
from planner.training_step.recorder import StepRecorder
from planner.training_step.unseen_writes import in_memory_of_others

_MOST_VARIANTS = 4
"""A bound, since each variant takes the time to trace a graph."""


class GraphRunner:
    """Stands for one Dynamo graph inside a step on tensors without data; see the module's docstring.

    Attributes:
        structure: Digest of the graph, see :func:`structure_of`.
        joint: Its joint graph once :meth:`trace` has run; None where there is nothing to differentiate.
        home, places: The index of the runner that Dynamo calls, and the executions of it that this one runs,
            see :meth:`split`. Dynamo's own runner is its home, and lists no places.
        per_use_inputs: Positions of the inputs whose gradients are to be returned unsummed.
        spec: How it was traced, once that is done; see :meth:`trace`.
        gradients: The gradients of its outputs in the probing pass. Once the graph is traced, ``layouts``
            holds the layouts that it was traced for.
        never_runs: Whether PyTorch gave up the code that the graph was made for.
        casts: Its casts under autocast that eager would keep beyond the graph.
        recorder: Records every execution in the compiled pass, see :meth:`record_to`.
    """

    def __init__(
        self,
        index: int,
        graph: GraphModule,
        example_inputs: Sequence[Any],
        lower: Lowering,
        *,
        cuda: bool = False,
        data: bool = False,
    ) -> None:
        self.index, self.graph, self.example_inputs = index, graph, list(example_inputs)
        self._requires_grad = [isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs]
        self._grad_enabled = torch.is_grad_enabled()  # off inside of functions of the user's
        self._default_dtype = torch.get_default_dtype()
        self._lower, self._cuda, self._data = lower, cuda, data
        self.per_use_inputs: frozenset[int] = frozenset()
        self.spec = GraphSpec()
        self.gradients = TangentLayouts()
        self.structure, self.never_runs = structure_of(graph), False
        self.joint: JointGraph | None = None
        self.recorder: StepRecorder | None = None
        self._compiled: Callable[..., Any] | None = None
        self._differentiated = differentiated_inputs(graph)
        self._probed = as_written(graph)
        self._alike = AlikeExecutions(self._probed)
        self._lent = set[int]()
        self._without: tuple[int, ...] = ()
        self._instances: dict[int, int] = {}
        self._executions = self._calls = 0
        self.home, self.places = index, tuple[int, ...]()
        self._variants: dict[int, GraphRunner] = {}  # by execution
        self._known: list[list[torch.Tensor | None]] = []  # by execution: values of outputs without data
        self._halves: Partition | None = None
        self._saved: dict[int, list[Any]] = {}  # by execution, where there are data
        # Of the moment at which Dynamo made the graph: the region may be one of a caller that it gave up.
        self._around, self._autocast = AutocastContext.here(), autocast_state()
        self.casts, self._written = AutocastCastCache(), WrittenInPlace(self._watch)
        self._order = RecordedArrivalOrder(lambda: self.recorder.pause() if self.recorder else nullcontext())

    @property
    def outdated(self) -> bool:
        """Whether an output got a gradient after the graph was traced without it."""
        return self._compiled is not None and self._without != self.unused_outputs

    @property
    def unused_outputs(self) -> tuple[int, ...]:
        """Outputs that could have a gradient, but in the probing pass got none."""
        return tuple(sorted(self.gradients.awaited - self.gradients.received))

    def __call__(self, *args: Any) -> Any:
        if saved_tensors_are_changed():
            return tuple(self._probed(*args))
        if meet_outside(args, self._differentiated, siblings=self._compiled is None):
            raise RuntimeError(MEET_OUTSIDE)
        if self._compiled is not None:
            compiled = self._variants.get(self._calls, self)._compiled
            self._calls += 1
            assert compiled is not None
            return compiled(*args)
        execution = len(self._known)
        outputs = list(self._probed(*args)) if self._data else self._alike(args)
        self._known.append(fake_values.known_values(outputs))
        tensors = {i: a for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
        self._lent |= in_memory_of_others(tensors)
        given = set(map(fake.storage_key, tensors.values()))
        handed = Counter(fake.storage_key(t) for t in outputs if isinstance(t, torch.Tensor))
        for i, tensor in enumerate(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                # Another tensor, because gradients pass through this one inside the graph as well. No view
                # where it shares no memory: a write to a view's base would bypass the hook on the view.
                key = fake.storage_key(tensor)
                alone = tensor.layout is torch.strided and key not in given and handed[key] == 1
                outputs[i] = copy_apart(tensor) if alone else torch.ops.aten.alias(tensor)
                known = {"of_input": key in given, "alone": alone, "part": is_part(tensor)}
                cut = is_cut_out(tensor)
                self.gradients.watch(i, outputs[i], execution=execution, cut=cut, **known)
        self._written.probed(outputs)
        return tuple(outputs)

    def sums(self) -> dict[int, int]:
        """Sums of gradients that the graph returns: positions of the inputs that they are of
        (-1: of none), by position among the backward's outputs."""
        assert self.joint is not None
        found = {}
        for i, (node, primal) in enumerate(zip(self.joint.outputs[1], self.joint.primals, strict=True)):
            position = aot_metadata.input_position(primal)
            if is_sum(node) and (position is None or self._hands_out_sum(position)):
                found[i] = -1 if position is None else position
        return found

    def _hands_out_sum(self, position: int) -> bool:
        return position < len(self.example_inputs) and position not in self.spec.per_use_inputs

    def written_inputs(self) -> list[str]:
        """The tensors that a re-run might read and that the step changes in place before the backward."""
        if self.joint is None:
            return []
        inputs = self.graph.graph.find_nodes(op="placeholder")
        positions = {aot_metadata.input_position(primal) for primal in self.joint.to_copy}
        changed = {aot_metadata.input_position(self.joint.primals[i]) for i in self.joint.mutated}
        uncounted = (self._written.uncounted_inputs - positions - changed) | (self._lent & changed)
        lost = [described_input(inputs[i]) for i in uncounted]
        for i in self._written.uncounted_outputs:
            shape = "x".join(map(str, _value(self.joint.outputs[0][i]).shape))
            lost.append(f"a result of {shape} of a part of the forward")
        if lost:
            raise CaptureError(
                f"{min(lost)} is written to in the forward by .data, numpy or DLPack, which PyTorch does not "
                "count, and the plan would read it again. Write to it under torch.no_grad(), or to a copy, "
                "or plan with backend='replay'"
            )
        return [described_input(inputs[i]) for i in sorted(self._written.inputs) if i in positions]

    def _watch(self, tensor: torch.Tensor) -> Callable[[], tuple[bool, bool]]:
        assert self.recorder is not None
        return self.recorder.watch(tensor)

    @property
    def overwritten_results(self) -> frozenset[int]:
        """Results that the step changes in place before the backward, by position."""
        return frozenset(self._written.outputs)

    def record_to(self, recorder: StepRecorder) -> None:
        """Record the executions of the step that now begins."""
        self.recorder, self._executions, self._calls = recorder, 0, 0
        self._instances.clear()
        self._saved.clear()

    def split(self, index: int) -> "list[GraphRunner]":
        """New runners, numbered from ``index``, for executions whose gradients lie otherwise than most do.

        Their backwards are traced for these layouts. In the compiled pass this runner hands them their
        executions.
        """
        if self._compiled is not None:
            return []
        self.gradients.end()
        others: list[GraphRunner] = []
        for executions in self.gradients.groups()[1 : _MOST_VARIANTS + 1]:
            other = GraphRunner(
                index + len(others),
                self.graph,
                self.example_inputs,
                self._lower,
                cuda=self._cuda,
                data=self._data,
            )
            other.home, other.places = self.index, tuple(sorted(executions))
            other._requires_grad = self._requires_grad
            other.gradients = self.gradients.taken_apart(executions)
            other._written.take_counted(self._written)
            other._around, other._autocast = self._around, self._autocast
            other._grad_enabled, other._default_dtype = self._grad_enabled, self._default_dtype
            other._known = [self._known[i] for i in other.places]
            self._variants |= dict.fromkeys(executions, other)
            others.append(other)
        self._known = [known for i, known in enumerate(self._known) if i not in self._variants]
        return others

    def trace(self) -> None:
        """Run AOTAutograd; from now on calls go to stubs that return tensors without data."""
        self.gradients.end()
        dtype = default_dtype(self._default_dtype)
        with under_autocast(self._autocast), torch.set_grad_enabled(self._grad_enabled), dtype:
            compiled = trace_joint(
                self.graph,
                self._inputs_as_captured(),
                GraphSpec(self.unused_outputs, self.per_use_inputs, self.gradients.layouts),
                JOINT_PASSES,
                partition=self._partition,
                compile_forward=self._forward_stub,
                compile_backward=self._backward_stub,
                autocast=self._around,
                cuda=self._cuda,
            )
        self._alike.forget()
        self._without = self.unused_outputs
        unused = UnusedOutputs(self._without, self.gradients.received.add)
        hooks = [self.casts, unused, self._written, self._order]
        runs_as_it_is = self.joint is None and not self.gradients.received
        call = self._operation_by_operation if runs_as_it_is else compiled.call
        self._compiled, self.spec = CompiledGraph(call, hooks), compiled.followed
        self.gradients.layouts = dict(self.spec.tangent_layouts)

    def _inputs_as_captured(self) -> list[Any]:
        # A buffer that the step fills in place with results requires gradients only after the step has run.
        return [
            x.detach().requires_grad_(before)
            if isinstance(x, torch.Tensor) and x.requires_grad is not before
            else x
            for x, before in zip(self.example_inputs, self._requires_grad, strict=True)
        ]

    def _partition(self, traced: TracedGraph) -> tuple[GraphModule, GraphModule]:
        self.casts.on_traced(traced)
        self._written.on_traced(traced)
        self._order.on_traced(traced)
        joint, self.joint = traced.joint, traced.reading
        parameters = [isinstance(x, torch.nn.Parameter) for x in self.example_inputs]
        self.joint.to_copy = to_copy(self.joint, parameters)
        if self._data:
            self._halves = partition(self.joint, no_recomputation(self.joint))
        outputs, gradients = self.joint.outputs
        # The forward "saves" one empty token, which tells its backward which execution it belongs to.
        forward = torch.fx.Graph()
        env = {p: forward.node_copy(p) for p in self.joint.primals}
        token = forward.call_function(torch.empty, (0,))
        token.meta["val"] = torch.empty(0)
        forward.output([*(_stand_in(forward, o, env) for o in outputs), token])
        backward = torch.fx.Graph()
        saved = backward.placeholder("token")
        saved.meta["val"] = token.meta["val"]
        env = {t: backward.node_copy(t) for t in self.joint.tangents}
        backward.output([_stand_in(backward, g, env) for g in gradients])
        return graph_module(joint, forward), graph_module(joint, backward)

    def _forward_stub(self, module: GraphModule) -> aot.BoxedFunction:
        if self.joint is None:  # gradients arrive at views of inputs only
            function = self._lower(module, "forward")
            return lambda args: self._recorded(lambda: function(args), list(args))
        joint, halves = self.joint, self._halves
        forward = None if halves is None else self._lower(halves.forward, "forward")

        def run(args: list[Any]) -> Sequence[Any]:
            arguments, execution = list(args), self._executions
            args.clear()
            assert self.recorder is not None
            self._executions += 1
            with self.recorder.pause():
                token = torch.empty(0)
                if forward is not None:
                    results = self._run_forward(forward, arguments, execution)
                else:
                    values = [_value(o) for o in joint.outputs[0]]
                    results = fresh_results(values, [_value(p) for p in joint.primals], arguments)
                    self._remember(results, execution)
                self._instances[fake.storage_key(token)] = execution
            self._call(arguments, [*results, token], backward=False, instance=execution, saves=True)
            return [*results, token]

        return run

    def _backward_stub(self, _module: GraphModule) -> aot.BoxedFunction:
        halves = self._halves
        backward = None if halves is None else self._lower(halves.backward, "backward")
        gradients = self.joint.outputs[1] if self.joint is not None else []
        views = [i for i, g in enumerate(gradients) if isinstance(g, torch.fx.Node) and leaves_as_view(g)]

        def run(args: list[Any]) -> Sequence[Any]:
            token, *tangents = args
            args.clear()
            assert self.recorder is not None
            assert self.joint is not None
            instance = self._instances[fake.storage_key(token)]
            with self.recorder.pause():
                if backward is not None:
                    if instance not in self._saved:
                        raise RuntimeError(DIFFERENTIATED_TWICE)
                    results = list(backward([*self._saved.pop(instance), *tangents]))
                else:
                    values = [_value(o) for o in self.joint.outputs[1]]
                    results = fresh_results(values, [_value(t) for t in self.joint.tangents], tangents, views)
            self._call(tangents, results, backward=True, instance=instance)
            return results

        return run

    def _run_forward(self, forward: aot.BoxedFunction, arguments: list[Any], execution: int) -> list[Any]:
        """Run the forward with data; of tensors that others see too, save copies, so as not to hold them."""
        assert self.joint is not None
        assert self.recorder is not None
        results = list(forward(list(arguments)))
        outputs, saved = results[: self.joint.forward_outputs], results[self.joint.forward_outputs :]
        seen = {fake.storage_key(t) for t in outputs if isinstance(t, torch.Tensor)}
        seen |= {
            fake.storage_key(a)
            for a in arguments
            if isinstance(a, torch.Tensor) and self.recorder.index_of(a) >= 0
        }
        self._saved[execution] = [
            t.clone() if isinstance(t, torch.Tensor) and fake.storage_key(t) in seen else t for t in saved
        ]
        return outputs

    def _operation_by_operation(self, *args: Any) -> Sequence[Any]:
        """Run a graph of which the step differentiates nothing, operation by operation."""
        return self._recorded(lambda: self._probed(*args), list(args))

    def _recorded(self, run: Callable[[], Sequence[Any]], arguments: list[Any]) -> Sequence[Any]:
        """Run a graph of which the step differentiates nothing, and record its operations: a planned step
        runs the same ones."""
        assert self.recorder is not None
        execution, before = self._executions, len(self.recorder.recording.events)
        self._executions += 1
        results = list(run())
        if not self._data:
            self._remember(results, execution)
        made = sum(bool(event.allocates) for event in self.recorder.recording.events[before:])
        self._call(arguments, results, backward=False, instance=execution, allocating=made)
        return results

    def _remember(self, results: list[Any], execution: int) -> None:
        if execution < len(self._known):
            fake_values.know_values(results, self._known[execution])

    def _call(
        self,
        arguments: list[Any],
        results: list[Any],
        *,
        backward: bool,
        instance: int,
        allocating: int = 0,
        saves: bool = False,
    ) -> None:
        recorder = self.recorder
        assert recorder is not None
        taken = [recorder.index_of(a) if isinstance(a, torch.Tensor) else -1 for a in arguments]
        recorder.graph_ran(arguments, results)
        produced = [recorder.index_of(r) if isinstance(r, torch.Tensor) else -1 for r in results]
        arguments.clear()
        recording = recorder.recording
        released = frozenset(i for i in taken if i >= 0 and recording.storages[i].died_after is not None)
        token = produced.pop() if saves else -1
        given, returned = tuple(taken), tuple(produced)
        call = GraphCall(self.index, instance, backward, given, returned, released, allocating, token)
        recording.events[-1] = recording.events[-1]._replace(graph=call)


def _stand_in(graph: torch.fx.Graph, original: Any, env: dict[Any, Any]) -> Any:
    if not isinstance(original, torch.fx.Node):
        return original
    if original in env:
        return env[original]
    node = graph.call_function(torch.empty, (0,))
    node.meta = dict(original.meta)
    return node


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, torch.fx.Node) else node
