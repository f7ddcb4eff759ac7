"""The stand-in for a Dynamo graph in the compiled pass: a forward and a backward, each recorded as one event.

They return tensors without data or, in a step that runs with data, the computed tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from planner._torch import fake
from planner._torch.execution.function_calls import DIFFERENTIATED_TWICE
from planner._torch.joint import aot
from planner._torch.joint.graph_modules import graph_module
from planner._torch.without_data import fake_values
from planner.capture.graphs.fresh_results import fresh_results
from planner.capture.graphs.graph_call import GraphCall
from planner.graph.joint_graph import JointGraph
from planner.graph.passes.in_place_accumulation import leaves_as_view
from planner.lowering.lowerings import Lowering
from planner.lowering.partition import Partition, no_recomputation, partition
from planner.training_step.recorder import StepRecorder


class RecordedGraph:
    """Runs one graph in the compiled pass, and records its executions.

    Args:
        index: The index of its runner.
        lower: Makes a function of a graph.
        data: Whether the step runs with data.

    Attributes:
        joint: The joint graph, once it is traced; None if nothing is differentiated.
        known: By execution, for each output its value if that is known without data.
        recorder: Records every execution, see :meth:`begin`.
    """

    def __init__(self, index: int, lower: Lowering, *, data: bool) -> None:
        self._index, self._lower, self._data = index, lower, data
        self.joint: JointGraph | None = None
        self.known: list[list[torch.Tensor | None]] = []
        self.recorder: StepRecorder | None = None
        self._partition_with_data: Partition | None = None  # of the joint graph, in a step with data
        self._executions = 0
        self._execution_of: dict[int, int] = {}  # by the token of its forward, see `halves`
        self._saved: dict[int, list[Any]] = {}  # by execution, in a step with data

    def begin(self, recorder: StepRecorder) -> None:
        """Record the executions of the step that now begins."""
        self.recorder, self._executions = recorder, 0
        self._execution_of.clear()
        self._saved.clear()

    def halves(self, joint: JointGraph) -> tuple[GraphModule, GraphModule]:
        """Stand-ins for forward and backward of a joint graph, which AOTAutograd compiles in their place."""
        self.joint = joint
        if self._data:
            self._partition_with_data = partition(joint, no_recomputation(joint))
        outputs, gradients = joint.outputs
        # The forward "saves" one empty tensor, the token, which tells its backward which execution it is of.
        forward = torch.fx.Graph()
        env = {p: forward.node_copy(p) for p in joint.primals}
        token = forward.call_function(torch.empty, (0,))
        token.meta["val"] = torch.empty(0)
        forward.output([*(_stand_in(forward, o, env) for o in outputs), token])
        backward = torch.fx.Graph()
        saved = backward.placeholder("token")
        saved.meta["val"] = token.meta["val"]
        env = {t: backward.node_copy(t) for t in joint.tangents}
        backward.output([_stand_in(backward, g, env) for g in gradients])
        return graph_module(joint.module, forward), graph_module(joint.module, backward)

    def forward(self, module: GraphModule) -> aot.BoxedFunction:
        """The forward that runs, and is recorded, in place of a stand-in."""
        if self.joint is None:  # no joint graph: gradients arrive at views of inputs only
            function = self._lower(module, "forward")
            return lambda args: self.record(lambda: function(args), list(args))
        joint, halves = self.joint, self._partition_with_data
        forward = None if halves is None else self._lower(halves.forward, "forward")
        detached = [i for i, output in enumerate(joint.outputs[0]) if _is_detached(output)]

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
                    given = [_value(p) for p in joint.primals]
                    results = fresh_results(values, given, arguments, detached=detached)
                    self._remember(results, execution)
                self._execution_of[fake.storage_key(token)] = execution
            self._call(arguments, [*results, token], backward=False, execution=execution, saves=True)
            return [*results, token]

        return run

    def backward(self, _module: GraphModule) -> aot.BoxedFunction:
        """The backward that runs, and is recorded, in place of a stand-in."""
        halves = self._partition_with_data
        backward = None if halves is None else self._lower(halves.backward, "backward")
        gradients = self.joint.outputs[1] if self.joint is not None else []
        as_views = [i for i, g in enumerate(gradients) if isinstance(g, torch.fx.Node) and leaves_as_view(g)]

        def run(args: list[Any]) -> Sequence[Any]:
            token, *tangents = args
            args.clear()
            assert self.recorder is not None
            assert self.joint is not None
            execution = self._execution_of[fake.storage_key(token)]
            with self.recorder.pause():
                if backward is not None:
                    if execution not in self._saved:
                        raise RuntimeError(DIFFERENTIATED_TWICE)
                    results = list(backward([*self._saved.pop(execution), *tangents]))
                else:
                    values = [_value(o) for o in self.joint.outputs[1]]
                    results = fresh_results(
                        values, [_value(t) for t in self.joint.tangents], tangents, as_views
                    )
            self._call(tangents, results, backward=True, execution=execution)
            return results

        return run

    def _run_forward(self, forward: aot.BoxedFunction, arguments: list[Any], execution: int) -> list[Any]:
        """Run the forward with data. Inputs and outputs that it saves are copied, so as not to hold them."""
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

    def record(self, run: Callable[[], Sequence[Any]], arguments: list[Any]) -> Sequence[Any]:
        """Run a graph without a backward and record its operations one by one, as a planned step runs it."""
        assert self.recorder is not None
        execution, before = self._executions, len(self.recorder.recording.events)
        self._executions += 1
        results = list(run())
        if not self._data:
            self._remember(results, execution)
        allocating = sum(bool(event.allocates) for event in self.recorder.recording.events[before:])
        self._call(arguments, results, backward=False, execution=execution, allocating=allocating)
        return results

    def _remember(self, results: list[Any], execution: int) -> None:
        if execution < len(self.known):
            fake_values.know_values(results, self.known[execution])

    def _call(
        self,
        arguments: list[Any],
        results: list[Any],
        *,
        backward: bool,
        execution: int,
        allocating: int = 0,
        saves: bool = False,
    ) -> None:
        recorder = self.recorder
        assert recorder is not None
        read = [recorder.index_of(a) if isinstance(a, torch.Tensor) else -1 for a in arguments]
        recorder.graph_ran(arguments, results)
        made = [recorder.index_of(r) if isinstance(r, torch.Tensor) else -1 for r in results]
        arguments.clear()
        recording = recorder.recording
        released = frozenset(i for i in read if i >= 0 and recording.storages[i].died_after is not None)
        token = made.pop() if saves else -1
        given, returned = tuple(read), tuple(made)
        call = GraphCall(self._index, execution, backward, given, returned, released, allocating, token)
        recording.events[-1] = recording.events[-1]._replace(graph=call)


def _stand_in(graph: torch.fx.Graph, original: Any, env: dict[Any, Any]) -> Any:
    if not isinstance(original, torch.fx.Node):
        return original
    if original in env:
        return env[original]
    node = graph.call_function(torch.empty, (0,))
    node.meta = dict(original.meta)
    return node


def _is_detached(output: Any) -> bool:
    """Whether a result is a tensor of the graph's without its gradient, or a part of one. AOTAutograd returns
    such a tensor as one that is no view of the other."""
    return isinstance(output, torch.fx.Node) and output.target is torch.ops.aten._unsafe_view.default


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, torch.fx.Node) else node
