"""The training step of a module, captured without running it.

Three passes over a copy of the module whose tensors have shapes but no data; nothing is allocated,
no kernel runs, and nothing of the user's is touched:

1. *eager*: the step as it is, recorded operation by operation: the baseline.
2. *probe*: Dynamo turns the forward into graphs; which of their outputs get a gradient is noted.
3. *compiled*: AOTAutograd turns each into a joint graph of forward and backward. The step runs once
   more with the graphs in place (as single events), which records the glue around them: losses and
   other code outside the graphs, graph breaks, gradients that are materialised or accumulated.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from planner import _torch
from planner.errors import CaptureError
from planner.joint import JointGraph, read_joint
from planner.step import Step, map_tensors, tensors_in, unique_storages
from planner.tracking import Recording, StepRecorder

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class GraphCall:
    """An execution of a captured graph within a step.

    Attributes:
        graph: Index of the graph.
        instance: Which of the executions of this graph in the step, from 0.
        backward: Its backward half?
        arguments: Recorded storage of every input of that half (for the backward: of every
            tangent), -1 where resident.
        outputs: Recorded storage of every output, -1 for those that are none.
        released: Recorded storages among the arguments that nobody else holds: they are freed at
            their last use inside.
    """

    graph: int
    instance: int
    backward: bool
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    released: frozenset[int] = frozenset()


@dataclass
class CapturedGraph:
    """One graph that Dynamo made, with its joint graph.

    Attributes:
        structure: Digest of the graph without shapes: what a plan recognises it by.
        unused_outputs: Outputs that no gradient reached although they could have one.
        joint: Forward and backward; None where there is nothing to differentiate.
    """

    structure: str
    unused_outputs: tuple[int, ...]
    joint: JointGraph | None = None


@dataclass
class CapturedStep:
    """Everything that planning needs to know of a step.

    Attributes:
        graphs: The captured graphs, in order of first execution.
        eager: What the uncompiled step did.
        compiled: What the compiled step did, graphs as single events.
        resident: The tensors that are there before the step: parameters, buffers, inputs.
        notes: Things that the user should know.
    """

    graphs: list[CapturedGraph]
    eager: Recording
    compiled: Recording
    parameters: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    notes: list[str] = field(default_factory=list)


def capture(module: torch.nn.Module, step: Step, progress: Progress | None = None) -> CapturedStep:
    """Capture one training step.

    Args:
        module: The module; it is copied, not touched.
        step: Its arguments and loss.
        progress: Called with what is going on and the fraction done.

    Raises:
        CaptureError: If the step cannot be run on tensors without data, or no graph came of it.
    """
    report = progress or (lambda text, fraction: None)
    mode = _torch.fake_mode()
    report("copying the module without its data", 0.0)
    fake_module, fake_step = _without_data(module, step, mode)
    parameters, buffers = list(fake_module.parameters()), list(fake_module.buffers())
    inputs = unique_storages(tensors_in((fake_step.args, dict(fake_step.kwargs))))
    resident = [*parameters, *buffers, *inputs]

    def record(call: torch.nn.Module, doing: str, runners: "list[_Runner] | None" = None) -> Recording:
        _drop_gradients(resident)
        recorder = StepRecorder(mode, resident)
        for runner in runners or ():
            runner.recorder = recorder
        try:
            with mode, recorder:
                kept = fake_step.run(call)
            del kept
        except CaptureError:
            raise
        except Exception as error:
            raise _capture_error(doing, error) from error
        finally:
            _drop_gradients(resident)
        return recorder.recording

    with torch.random.fork_rng(devices=[]), _torch.dynamo_settings():
        report("running the eager step on tensors without data", 0.1)
        eager = record(fake_module, "running the step")

        report("capturing the forward", 0.2)
        runners: list[_Runner] = []
        previous = _torch.installed_call(fake_module)
        compiled = _torch.dynamo_compile(run_forward, _collector(runners))
        target = _Bound(compiled, fake_module)
        try:
            _drop_gradients(resident)
            with mode:
                fake_step.run(target)
        except CaptureError:
            raise
        except Exception as error:
            raise _capture_error("capturing the forward", error) from error
        finally:
            _drop_gradients(resident)
        if not runners:
            raise CaptureError(
                "nothing of the module's forward could be captured; torch.compile skips it too (see "
                "TORCH_LOGS=graph_breaks for the reason)"
            )

        for i, runner in enumerate(runners):
            report(f"tracing the backward of graph {i + 1} of {len(runners)}", 0.4 + 0.4 * i / len(runners))
            try:
                with mode:
                    runner.trace()
            except Exception as error:
                raise _capture_error("tracing the backward", error) from error

        report("recording the compiled step", 0.8)
        known = len(runners)
        recording = record(target, "running the compiled step", runners)
        if len(runners) != known:
            raise CaptureError(
                "the module's forward captures differently every time it runs (Python state that changes "
                "with each step?); it cannot be planned as it is"
            )
        _torch.install_call(fake_module, previous)
    report("captured", 1.0)
    graphs = [CapturedGraph(r.structure, r.unused_outputs, r.joint) for r in runners]
    return CapturedStep(graphs, eager, recording, parameters, buffers, inputs)


def run_forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is compiled, when a plan is made and when it runs; the module's own hooks stay outside."""
    return module.forward(*args, **kwargs)


class _Bound(torch.nn.Module):
    """The compiled call of a module, in the clothes of a module."""

    def __init__(self, compiled: Callable[..., Any], module: torch.nn.Module) -> None:
        super().__init__()
        self._compiled = compiled
        self._target = [module]  # in a list: not a submodule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._target[0]
        return _torch.call_with_forward(module, lambda *a, **k: self._compiled(module, a, k), args, kwargs)


def structure_of(graph: GraphModule) -> str:
    """Digest of a Dynamo graph's operations and their wiring, without shapes and constants."""
    numbers = {n: i for i, n in enumerate(graph.graph.nodes)}
    digest = hashlib.sha256()
    for node in graph.graph.nodes:
        target = node.target if node.op != "placeholder" else ""
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        wiring = ",".join(str(numbers[n]) for n in node.all_input_nodes)
        digest.update(f"{node.op} {name} {wiring}\n".encode())
    return digest.hexdigest()


def detach_outputs(graph: GraphModule, outputs: Sequence[int]) -> GraphModule:
    """A copy of a Dynamo graph in which some outputs are cut off from differentiation."""
    if not outputs:
        return graph
    new = torch.fx.Graph()
    new.output(new.graph_copy(graph.graph, {}))
    result = GraphModule(graph, new)
    node = result.graph.output_node()
    results = list(node.args[0])  # type: ignore[arg-type]
    for index in outputs:
        with result.graph.inserting_before(node):
            results[index] = result.graph.call_method("detach", (results[index],))
    node.args = (tuple(results),)
    result.recompile()
    for old, copied in zip(graph.graph.nodes, result.graph.nodes, strict=False):
        copied.meta = dict(old.meta) if old.op == copied.op else copied.meta
    return result


class _Runner:
    """Stands for one Dynamo graph inside the fake step, in the passes probe and compiled."""

    def __init__(self, index: int, graph: GraphModule, example_inputs: Sequence[Any]) -> None:
        self.index, self.graph, self.example_inputs = index, graph, list(example_inputs)
        self.structure = structure_of(graph)
        self.joint: JointGraph | None = None
        self.recorder: StepRecorder | None = None
        self._compiled: Callable[..., Any] | None = None
        self._differentiable: set[int] = set()
        self._received: set[int] = set()
        self._instances: dict[int, int] = {}
        self._executions = 0
        self._pending = 0

    @property
    def unused_outputs(self) -> tuple[int, ...]:
        return tuple(sorted(self._differentiable - self._received))

    def __call__(self, *args: Any) -> Any:
        if self._compiled is not None:
            return self._compiled(*args)
        outputs = list(self.graph(*args))
        for i, tensor in enumerate(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                self._differentiable.add(i)
                # An alias, because gradients pass through the tensor itself inside the graph as well.
                outputs[i] = tensor.view_as(tensor)
                outputs[i].register_hook(lambda gradient, i=i: self._received.add(i))
        return tuple(outputs)

    def trace(self) -> None:
        """Run AOTAutograd; from now on calls go to stubs that return tensors without data."""
        self._compiled = _torch.compile_joint(
            detach_outputs(self.graph, self.unused_outputs),
            self.example_inputs,
            partition=self._partition,
            forward_compiler=self._forward_stub,
            backward_compiler=self._backward_stub,
        )

    def _partition(self, joint: GraphModule, forward_outputs: int) -> tuple[GraphModule, GraphModule]:
        self.joint = read_joint(joint, forward_outputs)
        outputs, gradients = self.joint.outputs
        # The forward "saves" one empty token, by which its backward knows which execution it belongs to.
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
        return GraphModule(joint, forward), GraphModule(joint, backward)

    def _forward_stub(self, module: GraphModule) -> _torch.BoxedFunction:
        def run(args: list[Any]) -> Sequence[Any]:
            arguments = list(args)
            args.clear()
            assert self.recorder is not None
            with self.recorder.pause():
                if self.joint is None:
                    results = _fresh(_output_values(module), _input_values(module), arguments)
                else:
                    values = [_value(o) for o in self.joint.outputs[0]]
                    results = _fresh(values, [_value(p) for p in self.joint.primals], arguments)
                    token = torch.empty(0)
                    key = _torch.storage_key(token)
                    self._instances[key] = self._executions
            self._call(arguments, results, backward=False, instance=self._executions)
            self._executions += 1
            return results if self.joint is None else [*results, token]

        return run

    def _backward_stub(self, _module: GraphModule) -> _torch.BoxedFunction:
        def run(args: list[Any]) -> Sequence[Any]:
            token, *tangents = args
            args.clear()
            assert self.recorder is not None
            assert self.joint is not None
            instance = self._instances[_torch.storage_key(token)]
            with self.recorder.pause():
                values = [_value(o) for o in self.joint.outputs[1]]
                results = _fresh(values, [_value(t) for t in self.joint.tangents], tangents)
            self._call(tangents, results, backward=True, instance=instance)
            return results

        return run

    def _call(self, arguments: list[Any], results: list[Any], *, backward: bool, instance: int) -> None:
        recorder = self.recorder
        assert recorder is not None
        taken = [recorder.index_of(a) if isinstance(a, torch.Tensor) else -1 for a in arguments]
        recorder.graph_ran(arguments, results)
        produced = [recorder.index_of(r) if isinstance(r, torch.Tensor) else -1 for r in results]
        arguments.clear()
        recording = recorder.recording
        released = frozenset(i for i in taken if i >= 0 and recording.storages[i].died_after is not None)
        call = GraphCall(self.index, instance, backward, tuple(taken), tuple(produced), released)
        recording.events[-1] = replace(recording.events[-1], graph=call)


def _collector(runners: list[_Runner]) -> Callable[..., Any]:
    def backend(graph: GraphModule, example_inputs: Sequence[Any]) -> _Runner:
        runner = _Runner(len(runners), graph, example_inputs)
        runners.append(runner)
        return runner

    return backend


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


def _output_values(module: GraphModule) -> list[Any]:
    return [_value(o) for o in module.graph.output_node().args[0]]  # type: ignore[union-attr]


def _input_values(module: GraphModule) -> list[Any]:
    return [_value(n) for n in module.graph.nodes if n.op == "placeholder"]


def _fresh(values: Sequence[Any], input_values: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Tensors without data like ``values``, aliasing each other and the arguments as those do."""
    bases: dict[int, torch.Tensor] = {}
    for value, argument in zip(input_values, arguments, strict=True):
        if isinstance(value, torch.Tensor) and isinstance(argument, torch.Tensor):
            bases[_torch.storage_key(value)] = argument
    results: list[Any] = []
    for value in values:
        if not isinstance(value, torch.Tensor):
            results.append(value)
            continue
        if value.layout is not torch.strided:
            results.append(torch.empty_like(value))
            continue
        key = _torch.storage_key(value)
        if key not in bases:
            span = value.untyped_storage().nbytes() // max(value.element_size(), 1)
            bases[key] = torch.empty(span, dtype=value.dtype, device=value.device)
        base = bases[key]
        if base.dtype != value.dtype:
            base = base.view(value.dtype) if base.dim() == 1 else base
        results.append(base.as_strided(value.shape, value.stride(), value.storage_offset()))
    return results


def _without_data(module: torch.nn.Module, step: Step, mode: Any) -> tuple[torch.nn.Module, Step]:
    replaced: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in replaced:
            replaced[id(tensor)] = _torch.fake_like(tensor, mode)
        return replaced[id(tensor)]  # type: ignore[no-any-return]

    for part in module.modules():
        for value in [*part._parameters.values(), *part._buffers.values(), *vars(part).values()]:
            if isinstance(value, torch.Tensor):
                fake(value)
    try:
        copied = _torch.deep_copy_with(module, replaced)
    except Exception as error:
        raise _capture_error("copying the module (copy.deepcopy)", error) from error
    args, kwargs = map_tensors(fake, (step.args, dict(step.kwargs)))
    return copied, Step(tuple(args), kwargs, step.loss)


def _drop_gradients(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


def _capture_error(doing: str, error: Exception) -> CaptureError:
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else ""
    return CaptureError(f"{doing} failed: {type(error).__name__}: {first}")
