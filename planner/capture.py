"""The training step of a module, captured without running it.

Three passes over a copy of the module whose tensors have shapes but no data; nothing is allocated,
no kernel runs, and nothing of the user's is touched:

1. *eager*: the step as it is, recorded operation by operation: the baseline.
2. *probe*: Dynamo turns the forward into graphs; which of their outputs get a gradient is noted.
3. *compiled*: AOTAutograd turns each into a joint graph of forward and backward. The step runs once
   more with the graphs in place (as single events), which records the glue around them: losses and
   other code outside the graphs, graph breaks, gradients that are materialised or accumulated.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from planner import _torch
from planner._torch_kernels import Attention, dispatched_in_python, kernels_of_cuda
from planner.errors import CaptureError
from planner.graph_runner import GraphRunner, collector
from planner.joint import JointGraph
from planner.step import Step, map_tensors, tensors_in, unique_storages
from planner.tracking import Recording, StepRecorder

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]


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
        parameters, buffers, inputs: The tensors that are there before the step.
        gradients: Those that are there before the step and are added to.
        notes: Things that the user should know.
    """

    graphs: list[CapturedGraph]
    eager: Recording
    compiled: Recording
    parameters: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor] = ()
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CudaKernels:
    """The step will run on CUDA though it is captured on the CPU.

    Attributes:
        capability: Compute capability of the device.
        attention: Its attention kernel; None for what PyTorch chooses.
    """

    capability: tuple[int, int]
    attention: Attention | None = None


def capture(
    module: torch.nn.Module,
    step: Step,
    progress: Progress | None = None,
    *,
    cuda: CudaKernels | None = None,
    accumulate: bool | None = None,
) -> CapturedStep:
    """Capture one training step.

    Args:
        module: The module; it is copied, not touched.
        step: Its arguments and loss.
        progress: Called with what is going on and the fraction done.
        cuda: Replace what the CPU does by what CUDA does; None to capture what the tensors' device does.
        accumulate: Whether every trainable parameter has a gradient that is added to; None: those that
            have one now.

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
    with mode:
        gradients = {
            parameter: torch.empty_like(parameter, requires_grad=False)
            for parameter, own in zip(parameters, module.parameters(), strict=True)
            if parameter.requires_grad and (own.grad is not None if accumulate is None else accumulate)
        }

    def record(call: torch.nn.Module, doing: str, runners: list[GraphRunner] | None = None) -> Recording:
        _drop_gradients(resident)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        recorder = StepRecorder(mode, resident, list(gradients.values()))
        for runner in runners or ():
            runner.recorder = recorder
        try:
            dispatched = dispatched_in_python() if cuda and not runners else nullcontext()
            with mode, dispatched, recorder:
                kept = fake_step.run(call)
            del kept
        except CaptureError:
            raise
        except Exception as error:
            raise _capture_error(doing, error) from error
        finally:
            _drop_gradients(resident)
        return recorder.recording

    kernels = nullcontext() if cuda is None else kernels_of_cuda(cuda.capability, cuda.attention)
    with torch.random.fork_rng(devices=[]), _torch.dynamo_settings(), kernels:
        report("running the eager step on tensors without data", 0.1)
        eager = record(fake_module, "running the step")

        report("capturing the forward", 0.2)
        runners: list[GraphRunner] = []
        previous = _torch.installed_call(fake_module)
        compiled = _torch.dynamo_compile(run_forward, collector(runners, cuda=cuda is not None))
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
    return CapturedStep(graphs, eager, recording, parameters, buffers, inputs, list(gradients.values()))


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
    for part in copied.modules():
        _torch.install_call(part, None)  # a plan travels with copies
    args, kwargs = map_tensors(fake, (step.args, dict(step.kwargs)))
    return copied, Step(tuple(args), kwargs, step.loss)


def _drop_gradients(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


def _capture_error(doing: str, error: Exception) -> CaptureError:
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else ""
    return CaptureError(f"{doing} failed: {type(error).__name__}: {first}")
