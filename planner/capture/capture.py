"""The training step of a module, captured.

Three passes over a copy of the module; nothing that belongs to the user is touched:

1. *eager*: the step as it is, recorded operation by operation: the baseline.
2. *probe*: Dynamo makes the forward into graphs; which of their outputs get a gradient is noted.
3. *compiled*: AOTAutograd makes of each a joint graph of forward and backward. The step runs once
   more with the graphs in place (as single events), which records the glue around them: losses and
   other code outside the graphs, graph breaks, gradients that are materialised or accumulated.

The tensors of the copy have shapes but no data: nothing is allocated and no kernel runs. Where the data
decide what runs (``nonzero``, ``item``), see :func:`planner.capture.on_a_copy.on_a_copy`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from planner._torch import dynamo, fake
from planner._torch.autocast_state import region_of_its_own
from planner._torch.autograd import apart_from_a_backward, no_saved_tensors_hooks
from planner._torch.cuda.kernels import dispatched_in_python
from planner._torch.distributed import holds_dtensors
from planner._torch.layouts.shape_functions import layouts_of_kernels
from planner._torch.tracing.breaks import graph_breaks
from planner._torch.tracing.callbacks import name_of, parts_run_uncompiled
from planner._torch.tracing.hindrances import hindering_mode
from planner._torch.without_data.ctc_loss import lengths_are_read
from planner.blocks.running import blocks_run_as_written
from planner.capture import uncaptured
from planner.capture.captured_step import NO_LOSS, CapturedStep, CudaKernels
from planner.capture.carried_history import CARRIED_HISTORY, is_of_carried_history
from planner.capture.decided_by_data import told_by_data
from planner.capture.differences import notes_on, warn_of_cpu_kernels, warn_of_other_gradients
from planner.capture.external_accumulation import ask_for_per_use_gradients
from planner.capture.graphs.graph_runner import GraphRunner
from planner.capture.graphs.runners import captured_graphs, collector, let_go
from planner.capture.module_calls import Bound, Marked, run_forward
from planner.capture.on_a_copy import RunOfACopy, as_on_its_device, on_a_copy
from planner.errors import CaptureError, warn
from planner.lowering.lowerings import chosen_lowering
from planner.module_parts import buffers_of, parameters_of
from planner.parallel.fully_shard import ShardedUnits
from planner.parallel.rank import Rank, gradients_there
from planner.progress import Progress
from planner.training_step.arrivals.on_copies import state_of
from planner.training_step.generators import GeneratorStates
from planner.training_step.python_state import PythonState
from planner.training_step.recorder import Recording, StepRecorder
from planner.training_step.regions import RunningRegions, refuse_in_checkpoint
from planner.training_step.step import Step, differentiable_outputs, tensors_in, unique_storages

Around = Callable[[torch.nn.Module, Any], torch.nn.Module]
RecorderOf = Callable[[torch.nn.Module, ShardedUnits | None], Callable[..., StepRecorder]]


def _as_it_is(call: torch.nn.Module, _: Any) -> torch.nn.Module:
    return call


class Most(NamedTuple):
    """Bounds beyond which capturing a step is an error.

    Attributes:
        graphs: The most graphs. Once there are as many, a break is an error; one at which data decide what
            runs always is.
        operations: The most operations of the forward that make values; None for no bound.
    """

    graphs: int
    operations: int | None = None


_MOST_PASSES = 4
"""How often the step may run until it takes the same path twice."""


def capture(
    module: torch.nn.Module,
    step: Step,
    progress: Progress | None = None,
    *,
    cuda: CudaKernels | None = None,
    accumulate: bool | None = None,
    regions: Sequence[str] = (),
    rank: Rank | None = None,
    compiling: bool = False,
    most: Most | None = None,
) -> CapturedStep:
    """Capture one training step, on a copy of the module.

    Args:
        module, step: The module, and its arguments and loss.
        progress: Called with the present action and the fraction done.
        cuda: Use CUDA's kernels in place of the CPU's; None for those of the tensors' device.
        accumulate: Whether every trainable parameter has a gradient that the step adds to; None: the
            parameters that have one now.
        regions: Names of the submodules that are graphs of their own.
        rank: The rank whose step it is; None for a single process.
        compiling: As for :func:`planner._torch.dynamo.dynamo_compile`.
        most: More than that is an error; None for no bound.

    Raises:
        CaptureError: The step cannot run, or Dynamo makes no graph of it.
    """
    if (hindrance := hindering_mode()) is not None:
        raise CaptureError(f"{hindrance}: plan before it begins, or after it ended")
    run = partial(_Capture.run, regions=regions, compiling=compiling, most=most)
    return _on_a_copy(module, step, run, progress, cuda=cuda, accumulate=accumulate, rank=rank)


def record_saving(
    module: torch.nn.Module,
    step: Step,
    recorder_of: RecorderOf,
    around: Around,
    progress: Progress | None = None,
    *,
    cuda: CudaKernels | None = None,
    accumulate: bool | None = None,
    rank: Rank | None = None,
) -> CapturedStep:
    """Record one training step on a copy of the module, by a recorder that can tell what it is without one.

    Args:
        recorder_of: Given the copy and its sharded units, returns the class (or function) that makes the
            recorder.
        around: Puts that recorder around the module's call.

    All else is as for :func:`capture`.

    Raises:
        CaptureError: The step cannot run.
    """
    if (hindrance := hindering_mode()) is not None:
        raise CaptureError(f"{hindrance}: plan before it begins, or after it ended")

    def use(copied: "_Capture") -> CapturedStep:
        return copied.run_saving(recorder_of, around)

    return _on_a_copy(module, step, use, progress, cuda=cuda, accumulate=accumulate, rank=rank)


def record_eagerly(
    module: torch.nn.Module,
    step: Step,
    change: Callable[[torch.nn.Module], object],
    *,
    cuda: CudaKernels | None = None,
    accumulate: bool | None = None,
    rank: Rank | None = None,
) -> Recording:
    """Record the step without graphs, on a copy of the module, after ``change`` has changed that copy.

    Raises:
        CaptureError: The step cannot run.
    """

    def use(copied: "_Capture") -> Recording:
        change(copied.copied.module)
        return copied.run_eagerly()

    return _on_a_copy(module, step, use, None, cuda=cuda, accumulate=accumulate, rank=rank)


_T = TypeVar("_T")


def _on_a_copy(
    module: torch.nn.Module,
    step: Step,
    use: Callable[["_Capture"], _T],
    progress: Progress | None,
    *,
    cuda: CudaKernels | None,
    accumulate: bool | None,
    rank: Rank | None,
) -> _T:
    report = progress or (lambda text, fraction: None)
    added_to = gradients_there(parameters_of(module), accumulate)

    def capture_with(run: RunOfACopy) -> _T:
        return use(_Capture(run, report, cuda if run.without_data else None, added_to, rank))

    with no_saved_tensors_hooks(), apart_from_a_backward():
        return on_a_copy(module, step, capture_with, report, may_have_data=cuda is None)


class _Capture:
    """The three passes over a copy."""

    def __init__(
        self,
        run: RunOfACopy,
        report: Progress,
        cuda: CudaKernels | None,
        added_to: Sequence[bool],
        rank: Rank | None,
    ) -> None:
        copied = run.copied
        self.copied, self.report, self._cuda, self._before = copied, report, cuda, run.before
        self._given = PythonState([], (copied.step.args, dict(copied.step.kwargs)))
        self.notes: list[str] = []
        self._uncompiled: dict[str, None] = {}  # in the order in which they are called
        self._no_loss = self._eager_runs = False
        self._with_gradients: dict[bool, list[bool]] = {}  # by whether graphs ran: of each parameter
        self._runners: list[GraphRunner] = []
        self.arriving: list[torch.Tensor] = []  # gradients that the next stage of a pipeline sends
        self._units: ShardedUnits | None = None
        if rank is not None:
            added_to, self._units = rank.put_into(copied, added_to, elsewhere=cuda is not None)
        self._python = PythonState([copied.module])
        self._generators = GeneratorStates.now(self._python.generators)
        self.parameters, self.buffers = parameters_of(copied.module), buffers_of(copied.module)
        given = tensors_in((copied.step.args, dict(copied.step.kwargs)))
        self.inputs = unique_storages(given)
        self._resident = [*self.parameters, *self.buffers, *given]
        with copied.running():
            self.gradients = {
                parameter: torch.zeros_like(
                    parameter, dtype=fake.gradient_dtype(parameter), requires_grad=False
                )
                for parameter, added in zip(self.parameters, added_to, strict=True)
                if added
            }

    def run_eagerly(self) -> Recording:
        """Record the step operation by operation, and no more."""
        with layouts_of_kernels(), contextlib.ExitStack() as stack:
            as_on_its_device(self._cuda, stack)
            stack.callback(self._python.restore)
            return self._recorded().recording

    def run_saving(self, recorder_of: RecorderOf, around: Around) -> CapturedStep:
        """Record the step by another recorder, and as it is where that one cannot tell, without graphs."""
        module = self.copied.module
        with layouts_of_kernels(), contextlib.ExitStack() as stack:
            autocast = as_on_its_device(self._cuda, stack)
            stack.callback(self._python.restore)
            self.report("running the step whose saved tensors are dropped", 0.1)
            python = PythonState([module], objects=True)
            saving = partial(self._recorded, recorder_of(module, self._units), around, python)
            try:
                recorder = saving()
            except CaptureError:
                self._recorded()  # as it is: its error is the better one, where it fails as well
                self._eager_runs = True
                recorder = saving()
            self._eager_runs = True
            if (eager := recorder.eagerly()) is None:
                self.report("running the eager step", 0.6)
                eager = self._recorded().recording
            recording = recorder.recording
        if self._cuda is not None:
            warn_of_cpu_kernels(recording, (), module, self._warn)
        self.report("captured", 1.0)
        return CapturedStep(
            [],
            eager,
            recording,
            self.parameters,
            self.buffers,
            self.inputs,
            list(self.gradients.values()),
            self.arriving,
            with_data=self.copied.data,
            autocast=autocast,
            notes=[
                *self.notes,
                *self.copied.notes,
                *told_by_data(self.copied.answers),
                *[NO_LOSS] * (self._no_loss and self.copied.step.in_flight is None),
            ],
            uncompiled=list(self._uncompiled),
        )

    def run(
        self, regions: Sequence[str] = (), *, compiling: bool = False, most: Most | None = None
    ) -> CapturedStep:
        """Capture the step; see :func:`capture`."""
        runners = self._runners
        try:
            return self._run(runners, regions, compiling, most)
        finally:
            let_go(runners)

    def _run(
        self, runners: list[GraphRunner], regions: Sequence[str], compiling: bool, most: Most | None
    ) -> CapturedStep:
        module, report = self.copied.module, self.report
        with dynamo.dynamo_settings(), contextlib.ExitStack() as stack:
            autocast = as_on_its_device(self._cuda, stack)
            # Hooks of the copy write where those of the original do.
            stack.callback(self._python.restore)
            report("running the eager step", 0.1)
            eager = self._recorded().recording
            self._eager_runs = True
            count = sum(bool(e.allocates) and not e.backward for e in eager.events)
            if most is not None and most.operations is not None and count > most.operations:
                raise CaptureError(
                    f"the forward has {count:,} operations, which take minutes to become a graph. Plan "
                    "with regions= for the blocks that repeat, or with backend='graph'"
                )
            report("capturing the forward", 0.2)
            counted = graph_breaks.counted_breaks()
            cuda, data = self._cuda is not None, self.copied.data
            # Where results decide the path, another step takes another one: that is no step of few graphs.
            decides = self.copied.data or self.copied.answers is not None
            graphs = None if most is None else 1 if decides else most.graphs
            backend = collector(runners, module, chosen_lowering(), cuda=cuda, data=data)
            (running := RunningRegions(regions, refuse_in_checkpoint)).put_in(module)
            compile_ = partial(
                dynamo.dynamo_compile,
                run_forward,
                backend,
                parts=len(regions),
                unbroken=lambda: graphs is not None and len(runners) >= graphs,
            )
            whole, region = (compile_(compiling=compiling) for _ in range(2))
            target = Bound(running.during(whole, region), module)
            try:
                with self._pass("capturing the forward"):
                    self.copied.step.run(target)
                if not runners:
                    raise uncaptured.nothing_captured(counted)
                recording, forward_events = self._compiled_pass(target, runners)
            finally:
                for compiled in (whole, region):
                    dynamo.forget(compiled)
        uncaptured.refuse_second_backwards(recording, [runner.graph for runner in runners])
        warn_of_other_gradients(recording, runners, self._with_gradients, self.copied, self._warn, regions)
        if self._cuda is not None:
            warn_of_cpu_kernels(recording, runners, module, self._warn)
        report("captured", 1.0)
        ran = {e.graph.graph for e in recording.events if e.graph is not None}
        made = [runners[i].graph for i in sorted(ran)]
        if all(runners[i].joint is None for i in ran):
            raise uncaptured.nothing_differentiated(made, counted)
        return CapturedStep(
            captured_graphs(runners, ran),
            eager,
            recording,
            self.parameters,
            self.buffers,
            self.inputs,
            list(self.gradients.values()),
            self.arriving,
            breaks=graph_breaks.distinct_places(map(graph_breaks.break_reason, made)),
            eager_operations=sum(
                -e.graph.allocating if e.graph is not None else bool(e.allocates)
                for e in recording.events[:forward_events]
            ),
            with_data=self.copied.data,
            autocast=autocast,
            notes=[
                *self.notes,
                *self.copied.notes,
                *told_by_data(self.copied.answers),
                *notes_on(runners, bool(regions)),
                *[NO_LOSS] * (self._no_loss and self.copied.step.in_flight is None),
            ],
            uncompiled=list(self._uncompiled),
            overwritten=[name for r in runners for name in r.written_inputs()],
            state_in_hooks=state_of(self.copied.hooks),
        )

    def _compiled_pass(self, target: torch.nn.Module, runners: list[GraphRunner]) -> tuple[Recording, int]:
        """Trace the graphs and record the step with them, until it takes the same path twice.

        Then once more, if some graphs must return per-use (unsummed) gradients. Returns the same as
        :meth:`_record`.
        """
        waiting, attempts, asked = list(runners), 1, False
        python: PythonState | None = None
        while True:
            traced = len(runners)
            self._trace(waiting, traced)
            if python is not None and attempts == _MOST_PASSES:
                python.restore()  # counters and histories change with each pass: start where the last one did
            python = PythonState([self.copied.module], objects=True)
            self.report("recording the compiled step", 0.8)
            recorder, forward_events = self._record(target, "running the compiled step", runners)
            recording = recorder.recording
            waiting = [*(r for r in runners if r.outdated), *runners[traced:]]
            if waiting:  # this pass made new graphs: a forward may take another path the second time
                attempts += 1
            elif not asked:
                waiting, asked = ask_for_per_use_gradients(recording, runners), True
                python.restore()
            if not waiting:
                return recording, forward_events
            if attempts > _MOST_PASSES:
                raise uncaptured.always_different(runner.graph for runner in waiting)

    def _trace(self, runners: Sequence[GraphRunner], total: int) -> None:
        for runner in runners:
            fraction = 0.4 + 0.4 * runner.index / total
            self.report(f"tracing the backward of graph {runner.index + 1} of {total}", fraction)
            with self._pass("tracing the backward", restoring=False):  # tracing runs no code of the user's
                runner.trace()

    def _warn(self, text: str) -> None:
        self.notes.append(text)
        warn(text)

    def _recorded(
        self,
        recorder_of: Callable[..., StepRecorder] = StepRecorder,
        around: Around = _as_it_is,
        python: PythonState | None = None,
    ) -> StepRecorder:
        """Record the plain step; a second time if the first forward set up tensors that later ones find, or
        changed a flag or a counter in ``python``, so that it may be none like those that follow."""

        def record() -> StepRecorder:
            return self._record(self.copied.module, "running the step", (), recorder_of, around)[0]

        recorder = record()
        if not recorder.left_tensors() and (python is None or not python.changed()):
            return recorder
        try:
            return record()
        except CaptureError as error:
            if not is_of_carried_history(error.__cause__):
                raise
        self.notes.append(CARRIED_HISTORY)
        return record()

    def _record(
        self,
        call: torch.nn.Module,
        doing: str,
        runners: Sequence[GraphRunner] = (),
        recorder_of: Callable[..., StepRecorder] = StepRecorder,
        around: Around = _as_it_is,
    ) -> tuple[StepRecorder, int]:
        """Run the step under a recorder; returns also how many events the module's forward had."""
        if not self._eager_runs and holds_dtensors(self.copied.module):
            # DTensors cache how operators are distributed: keep that out of the recording.
            with self._pass(doing):
                self.copied.step.run(call)
        gradients, foreign = list(self.gradients.values()), self._before.about_to_run
        recorder = recorder_of(fake.fake_mode(), self._resident, gradients, self._cuda is None, foreign)
        if self._eager_runs:
            recorder.look_for_unseen_writes()
        marked = Marked(around(call, recorder), recorder)
        for runner in runners:
            runner.record_to(recorder)
        dispatched = dispatched_in_python() if self._cuda and not runners else lengths_are_read(not runners)
        with self._pass(doing), dispatched, recorder:
            for parameter, gradient in self.gradients.items():
                parameter.grad = gradient
            kept = self.copied.step.run(marked, recorder.pause, recorder.note_sent)
            recorder.note_what_is_left(self.copied.step, self.parameters, *kept)
            self._with_gradients[bool(runners)] = [p.grad is not None for p in self.parameters]
        self._no_loss, step = kept[1] is None, self.copied.step
        if self._no_loss and step.in_flight is not None and not step.lets_go_of_outputs:
            self.arriving = [torch.empty_like(t, device="meta") for t in differentiable_outputs(kept[0])]
        if recorder.divides:
            self.copied.assumed.append("no factor of a product is zero")
        del kept  # after the recording: users hold outputs beyond the step
        return recorder, marked.events

    @contextlib.contextmanager
    def _pass(self, doing: str, *, restoring: bool = True) -> Iterator[None]:
        """A context in which the copy runs, from the same state each time, the original's too."""
        self.copied.reset()
        self._given.restore()
        if CARRIED_HISTORY in self.notes:
            self._python.put_back_history()
        self._generators.restore()
        self._before.generators.restore()
        for tensor in self._resident:
            tensor.grad = None
        try:
            as_written = blocks_run_as_written()
            with region_of_its_own(), self.copied.running(), as_written, parts_run_uncompiled() as called:
                yield
                self._uncompiled |= dict.fromkeys(n for n in map(name_of, called) if n is not None)
        except CaptureError:
            raise
        except Exception as error:
            graphs, data = [runner.graph for runner in self._runners], self.copied.data
            raise uncaptured.failed(doing, error, graphs, with_data=data, eager=self._eager_runs) from error
        finally:
            for tensor in self._resident:
                tensor.grad = None
            if restoring:
                self._before.restore_tensors()
