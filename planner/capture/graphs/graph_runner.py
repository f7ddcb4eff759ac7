"""Dynamo graphs inside a step that is being captured.

A :class:`GraphRunner` runs one graph that Dynamo made. In the probing pass it runs the graph's operations and
notes which outputs get a gradient. Then it traces the joint graph. In the compiled pass calls go to a
:class:`~planner.capture.graphs.recorded_graph.RecordedGraph`, which returns the results in one event.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.fx import GraphModule

from planner._torch import fake
from planner._torch.autocast_state import AutocastState, autocast_state, under_autocast
from planner._torch.execution.checkpoints import as_written
from planner._torch.execution.settings import default_dtype
from planner._torch.joint import aot_metadata
from planner._torch.joint.memory_layout import is_cut_out, is_part
from planner._torch.module_paths import described_input
from planner._torch.tracing.breaks.calls_left_out import refusal
from planner._torch.tracing.hindrances import saved_tensors_are_changed
from planner._torch.without_data import fake_values
from planner.capture.graphs.arrival_order import RecordedArrivalOrder
from planner.capture.graphs.copies_apart import copy_apart
from planner.capture.graphs.recorded_graph import RecordedGraph
from planner.capture.uncaptured import AROUND
from planner.compiled.graph_hook import CompiledGraph
from planner.errors import CaptureError
from planner.graph.accumulation import is_sum
from planner.graph.dynamo_graph import structure_of
from planner.graph.joint_graph import JointGraph
from planner.graph.joint_pass import AutocastContext
from planner.graph.overwritten import to_copy
from planner.graph.passes import JOINT_PASSES
from planner.graph.spec import GraphSpec
from planner.graph.tangent_layouts import TangentLayouts
from planner.graph.trace import TracedGraph, trace_joint
from planner.hooks.autocast_cast_cache import AutocastCastCache
from planner.hooks.gradients_inside import CONNECTED_OUTSIDE, differentiated_inputs, may_be_connected_outside
from planner.hooks.unused_outputs import UnusedOutputs
from planner.hooks.written_in_place import WrittenInPlace
from planner.lowering.lowerings import Lowering
from planner.training_step.recorder import StepRecorder
from planner.training_step.unseen_writes import in_memory_of_others


@dataclass(frozen=True)
class WhenMade:
    """The settings under which Dynamo made a graph, for tracing it later.

    Dynamo may have given up the function around the graph since. Then other settings hold where it is called.

    Attributes:
        requires_grad: Whether each example input required gradients.
        grad_enabled: Whether gradients were on; inside an autograd function of the user they are off.
        default_dtype: The default type of new tensors.
        around: The region of autocast that the graph is in.
        autocast: The state of autocast.
    """

    requires_grad: tuple[bool, ...]
    grad_enabled: bool
    default_dtype: torch.dtype
    around: AutocastContext
    autocast: AutocastState

    @classmethod
    def here(cls, example_inputs: Sequence[Any]) -> Self:
        """The present settings."""
        return cls(
            tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            AutocastContext.here(),
            autocast_state(),
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context with the same settings."""
        dtype = default_dtype(self.default_dtype)
        with under_autocast(self.autocast), torch.set_grad_enabled(self.grad_enabled), dtype:
            yield

    def inputs(self, example_inputs: Sequence[Any]) -> list[Any]:
        """The inputs as they were. A buffer that the step fills in place with results requires gradients only
        after the step."""
        return [
            x.detach().requires_grad_(before)
            if isinstance(x, torch.Tensor) and x.requires_grad is not before
            else x
            for x, before in zip(example_inputs, self.requires_grad, strict=True)
        ]


class GraphRunner:
    """Runs one Dynamo graph inside a step on tensors without data; see the module's docstring.

    Attributes:
        structure: Digest of the graph, see :func:`structure_of`.
        per_use_inputs: Positions of the inputs whose gradients are returned unsummed.
        spec: The specification that it was traced by, after :meth:`trace`.
        gradients: The gradients of its outputs in the probing pass. After :meth:`trace` its ``layouts`` are
            those that the graph was traced for.
        casts: Its casts under autocast that eager would keep beyond the graph.
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
        self._when_made = WhenMade.here(example_inputs)
        self._lower, self._cuda, self._data = lower, cuda, data
        self.per_use_inputs: frozenset[int] = frozenset()
        self.spec = GraphSpec()
        self.gradients = TangentLayouts()
        self.structure = structure_of(graph)
        self._compiled: Callable[..., Any] | None = None
        self._differentiated, self._refusal = differentiated_inputs(graph), refusal(graph)
        self._run_as_written = as_written(graph)
        self._lent_inputs = set[int]()
        self._traced_without: tuple[int, ...] = ()
        self._recorded = RecordedGraph(index, lower, data=data)
        self.casts, self._written = AutocastCastCache(), WrittenInPlace(self._watch)
        self._order = RecordedArrivalOrder(lambda: self.recorder.pause() if self.recorder else nullcontext())

    @property
    def joint(self) -> JointGraph | None:
        """The joint graph, once :meth:`trace` has run; None where there is nothing to differentiate."""
        return self._recorded.joint

    @property
    def recorder(self) -> StepRecorder | None:
        """Records every execution in the compiled pass, see :meth:`record_to`."""
        return self._recorded.recorder

    @property
    def outdated(self) -> bool:
        """Whether an output got a gradient after the graph was traced without it."""
        return self._compiled is not None and self._traced_without != self.unused_outputs

    @property
    def unused_outputs(self) -> tuple[int, ...]:
        """Positions of outputs that could have a gradient, but got none in the probing pass."""
        return tuple(sorted(self.gradients.awaited - self.gradients.received))

    def __call__(self, *args: Any) -> Any:
        if saved_tensors_are_changed():
            return tuple(self._run_as_written(*args))
        if self._refusal is not None:
            raise CaptureError(f"{self._refusal}. {AROUND}")
        if may_be_connected_outside(args, self._differentiated):
            raise RuntimeError(CONNECTED_OUTSIDE)
        if self._compiled is not None:
            return self._compiled(*args)
        outputs = list(self._run_as_written(*args))
        self._recorded.known.append(fake_values.known_values(outputs))
        tensors = {i: a for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
        self._lent_inputs |= in_memory_of_others(tensors)
        input_memory = set(map(fake.storage_key, tensors.values()))
        outputs_in = Counter(fake.storage_key(t) for t in outputs if isinstance(t, torch.Tensor))
        for i, tensor in enumerate(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                # Watch another tensor: gradients pass through this one inside the graph as well. If it shares
                # no memory, take no view: a write to a view's base would bypass the hook on the view.
                key = fake.storage_key(tensor)
                alone = tensor.layout is torch.strided and key not in input_memory and outputs_in[key] == 1
                outputs[i] = copy_apart(tensor) if alone else torch.ops.aten.alias(tensor)
                known = {"of_input": key in input_memory, "alone": alone, "part": is_part(tensor)}
                cut = is_cut_out(tensor)
                self.gradients.watch(i, outputs[i], cut=cut, **known)
        self._written.probed(outputs)
        return tuple(outputs)

    def sums(self) -> dict[int, int]:
        """Sums of gradients that the graph returns: by position among the backward's outputs, the position of
        the input whose gradient it is; -1 for none."""
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
        """The inputs that a re-run may read and that the step changes in place before the backward, in words.

        Raises:
            CaptureError: The step changes one in a way that PyTorch does not count.
        """
        if self.joint is None:
            return []
        inputs = self.graph.graph.find_nodes(op="placeholder")
        positions = {aot_metadata.input_position(primal) for primal in self.joint.to_copy}
        changed = {aot_metadata.input_position(self.joint.primals[i]) for i in self.joint.mutated}
        uncounted = (self._written.uncounted_inputs - positions - changed) | (self._lent_inputs & changed)
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
        """Positions of the results that the step changes in place before the backward."""
        return frozenset(self._written.outputs)

    def record_to(self, recorder: StepRecorder) -> None:
        """Record the executions of the step that now begins."""
        self._recorded.begin(recorder)

    def trace(self) -> None:
        """Run AOTAutograd; from now on calls go to the recorded graph."""
        self.gradients.end()
        with self._when_made.again():
            compiled = trace_joint(
                self.graph,
                self._when_made.inputs(self.example_inputs),
                GraphSpec(self.unused_outputs, self.per_use_inputs, self.gradients.layouts),
                JOINT_PASSES,
                partition=self._stand_ins,
                compile_forward=self._recorded.forward,
                compile_backward=self._recorded.backward,
                autocast=self._when_made.around,
                cuda=self._cuda,
            )
        self._traced_without = self.unused_outputs
        unused = UnusedOutputs(self._traced_without, self.gradients.received.add)
        hooks = [self.casts, unused, self._written, self._order]
        runs_as_it_is = self.joint is None and not self.gradients.received
        call = self._operation_by_operation if runs_as_it_is else compiled.call
        self._compiled, self.spec = CompiledGraph(call, hooks), compiled.followed
        self.gradients.layouts = dict(self.spec.tangent_layouts)

    def _stand_ins(self, traced: TracedGraph) -> tuple[GraphModule, GraphModule]:
        self.casts.on_traced(traced)
        self._written.on_traced(traced)
        self._order.on_traced(traced)
        joint = traced.reading
        parameters = [isinstance(x, torch.nn.Parameter) for x in self.example_inputs]
        joint.to_copy = to_copy(joint, parameters)
        return self._recorded.halves(joint)

    def _operation_by_operation(self, *args: Any) -> Sequence[Any]:
        """Run a graph without a backward, operation by operation."""
        return self._recorded.record(lambda: self._run_as_written(*args), list(args))

    def let_go(self) -> None:
        """Empty the runner, when no step will call it any more.

        Dynamo keeps what it compiled for as long as the process lives, and with it would keep the module that
        was planned, its copy, and the example inputs.
        """
        vars(self._recorded).clear()
        vars(self).clear()


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, torch.fx.Node) else node
