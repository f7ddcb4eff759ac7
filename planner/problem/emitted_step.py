"""The peak of a step whose graphs run as programs that Inductor emits.

The captured step says which storages are alive between the graphs, and measurements say what an operation of
the glue takes. Inside of a graph the emitted program allocates and frees. It runs here as it is, on tensors
without data and with kernels that do nothing, under the recorder of steps. Weak references show what it
frees, as in any other step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch.fx import GraphModule

from planner._torch import fake
from planner._torch.inductor.fusion_names import Fusion
from planner._torch.inductor.random_operators import FROM_STATE, IN_ORDER
from planner.capture.captured_step import CapturedStep
from planner.capture.graphs.graph_call import GraphCall
from planner.costs.cuda_scratch import CudaScratch
from planner.costs.devices import Device, round_bytes
from planner.costs.eager_timeline import allocated_bytes, real_sizes
from planner.costs.workspace import NOT_RUN, OpMemory, WorkspaceMeter
from planner.graph.replay.rng import generator_state_bytes
from planner.lowering.partition import Role, partition
from planner.training_step.call import Call
from planner.training_step.recorder import Recording, StepRecorder
from solvers.model.arrays import PerStep

if TYPE_CHECKING:
    from planner.lowering.inductor import InductorLowering  # which imports Inductor


@dataclass(frozen=True)
class EmittedRun:
    """A program that ran without data.

    Attributes:
        recording: Its allocations and frees. The first event makes the arguments.
        inputs, outputs: The storage of each argument and result, -1 for those that are no tensors.
        digest: The digest of the program.
    """

    recording: Recording
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class EmittedStep:
    """The memory of a step whose graphs run as emitted programs.

    Attributes:
        step_bytes: Live bytes over entry, the scratch of kernels included, at every operation.
        forward_length: How many of these operations come before the backward.
        digests: By graph and schedule: the digests of the forward's program and of the backward's.
        fusion: The operations that are fused in the programs.
    """

    step_bytes: PerStep
    forward_length: int
    digests: Mapping[tuple[int, "Program"], tuple[str, str]]
    fusion: Fusion

    @property
    def peak_bytes(self) -> int:
        """The most live bytes at an operation."""
        return int(self.step_bytes.max(initial=0))


Program = tuple[int, ...]
"""The operations that a graph's backward runs, in order."""


@dataclass
class EmittedStepModel:
    """Predicts the memory of schedules of a captured step.

    Args:
        captured: The step.
        device: For rounding.
        meter: Measures the workspace of kernels, or has formulas for it; None counts none.
        lowering: Emits the programs.
        copying: Whether re-runs read copies of inputs.
    """

    captured: CapturedStep
    device: Device
    meter: WorkspaceMeter | CudaScratch | None
    lowering: "InductorLowering"
    copying: bool = False
    _programs: dict[tuple[int, Program], tuple[EmittedRun, EmittedRun]] = field(default_factory=dict)

    def step(self, sequences: Sequence[Sequence[Sequence[int]]]) -> EmittedStep:
        """The step under a schedule.

        Args:
            sequences: The operations that each execution of each graph runs in its backward, see
                :meth:`planner.problem.build.Problem.backward_sequences`.
        """
        composed = _Composed(self)
        for index, event in enumerate(self.captured.compiled.events):
            call = event.graph
            if isinstance(call, GraphCall) and self.captured.graphs[call.graph].joint is not None:
                programs = self.programs(call.graph, tuple(sequences[call.graph][call.instance]))
                composed.graph(index, call, programs[call.backward])
            else:
                composed.glue(index)
        digests = {
            (graph, tuple(sequence)): (forward.digest, backward.digest)
            for graph, executions in enumerate(sequences)
            for sequence in executions
            for forward, backward in [self.programs(graph, tuple(sequence))]
        }
        return composed.step(digests)

    def programs(self, graph: int, sequence: Program) -> tuple[EmittedRun, EmittedRun]:
        """The forward and the backward program of a graph's schedule."""
        halves = self._programs.get((graph, sequence))
        if halves is None:
            joint = self.captured.graphs[graph].joint
            assert joint is not None
            split = partition(joint, sequence, copying=self.copying)
            halves = self._run(split.forward, "forward"), self._run(split.backward, "backward")
            self._programs[graph, sequence] = halves
        return halves

    def _run(self, module: GraphModule, role: Role) -> EmittedRun:
        program, run, arguments = self.lowering.emitted(module, role)
        mode = next((x.fake_mode for x in arguments if fake.is_fake(x)), None) or fake.fake_mode()
        recorder = StepRecorder(mode, ())
        with fake.without_modes(), mode, recorder:
            recorder.graph_ran((), arguments)
            inputs = tuple(recorder.index_of(x) if fake.is_fake(x) else -1 for x in arguments)
            results = run(arguments)  # empties the list of arguments
            outputs = tuple(recorder.index_of(x) if fake.is_fake(x) else -1 for x in results)
        del results
        return EmittedRun(recorder.recording, inputs, outputs, program.digest)

    def memories(self, recording: Recording) -> list[OpMemory]:
        """The memory of each distinct call of a recording."""
        if self.meter is None:
            return [NOT_RUN] * len(recording.calls)
        return self.meter.measure(_measured(call) for call in recording.calls)


def _measured(call: Call) -> Call:
    """The call to measure in the place of another: for a draw in order, or from a state, the plain draw."""
    plain = FROM_STATE.get(call.func) or IN_ORDER.get(call.func)
    return call if plain is None else Call(plain, call.args[1:], call.kwargs)


class _Composed:
    """The composition of a step, event by event."""

    def __init__(self, model: EmittedStepModel) -> None:
        self._model, self._recording = model, model.captured.compiled
        self._memories = model.memories(self._recording)
        # An object stands for a storage: its bytes, the operation that makes it, and the last one that holds
        # it (None: it outlives the step).
        self._bytes: list[int] = []
        self._born: list[int] = []
        self._dies: list[int | None] = []
        self._object: dict[int, int] = {}  # by storage of the step
        self._saved: dict[tuple[int, int], list[int | None]] = {}  # by execution: objects for its backward
        self._tokens: dict[tuple[int, int], int] = {}  # by execution: a storage that lives as long as these
        self._workspace: list[int] = []  # by operation
        self._ends: dict[int, int] = {-1: -1}  # by event: its last operation
        self._held_until: list[tuple[int, int]] = []  # objects, each with the last event that holds it
        self._forward = 0

    def glue(self, index: int) -> None:
        """Add an operation between graphs, or a graph of which nothing is differentiated."""
        event, step = self._recording.events[index], len(self._workspace)
        memory = NOT_RUN if event.call is None else self._memories[event.call]
        for storage, size in zip(
            event.allocates, allocated_bytes(event, self._recording, memory, self._model.device), strict=True
        ):
            self._object[storage] = self._new(size, step)
            self._hold(storage, self._object[storage])
        self._workspace.append(memory.workspace_bytes)
        self._end(index, event.backward)

    def graph(self, index: int, call: GraphCall, run: EmittedRun) -> None:
        """Add the forward or the backward of a graph."""
        recording, start = run.recording, len(self._workspace)
        memories = self._model.memories(recording)
        known: dict[int, int] = {}  # by storage of the program
        arguments: list[int | None] = [self._object.get(recorded) for recorded in call.arguments]
        if call.backward:
            arguments = [*self._saved.pop((call.graph, call.instance)), *arguments]
        for storage, found in zip(run.inputs, arguments, strict=True):
            if storage >= 0 and storage not in known:
                known[storage] = self._new(0, start) if found is None else found
        for step, event in enumerate(recording.events):
            memory, workspace = NOT_RUN, 0
            if event.call is not None:
                of, memory = recording.calls[event.call], memories[event.call]
                again = of.func in FROM_STATE
                workspace = memory.workspace_bytes + again * generator_state_bytes(self._model.device.kind)
                sizes = real_sizes(of, memory, [recording.storages[s].bytes for s in event.allocates])
                for storage, size in zip(event.allocates, sizes, strict=True):
                    known[storage] = self._new(round_bytes(self._model.device, size), start + step)
            self._workspace.append(workspace)
        returned = set(run.outputs)
        for storage, held in known.items():
            died = recording.storages[storage].died_after
            if died is not None and storage not in returned:
                self._until(held, start + died)
        results = [known.get(storage) for storage in run.outputs]
        for recorded, held_by in zip(call.outputs, results, strict=False):
            if recorded >= 0 and held_by is not None:
                self._object.setdefault(recorded, held_by)
                self._hold(recorded, held_by)
        if not call.backward:
            self._saved[call.graph, call.instance] = results[len(call.outputs) :]
            self._tokens[call.graph, call.instance] = call.token
        self._end(index, call.backward)

    def step(self, digests: Mapping[tuple[int, Program], tuple[str, str]]) -> EmittedStep:
        """The step, once all events are added."""
        for execution, saved in self._saved.items():  # the step does not run their backward
            for value in saved:
                if value is not None:
                    self._hold(self._tokens[execution], value)
        for held, event in self._held_until:
            self._until(held, self._ends[event])
        length = len(self._workspace)
        change = np.zeros(length + 1, dtype=np.int64)
        for size, born, dies in zip(self._bytes, self._born, self._dies, strict=True):
            change[born] += size
            if dies is not None:
                change[max(dies, born) + 1] -= size
        live = np.cumsum(change[:length]) + np.array(self._workspace, dtype=np.int64)
        return EmittedStep(live, self._forward, digests, self._model.lowering.fusion)

    def _new(self, size: int, born: int) -> int:
        self._bytes.append(size)
        self._born.append(born)
        self._dies.append(born)
        return len(self._bytes) - 1

    def _until(self, held: int, step: int) -> None:
        dies = self._dies[held]
        if dies is not None:
            self._dies[held] = max(dies, step)

    def _hold(self, storage: int, held: int) -> None:
        """Hold an object as long as others than the graphs hold its storage of the step."""
        died = self._recording.storages[storage].died_after
        if died is None:
            self._dies[held] = None
            return
        call = self._recording.events[died].graph
        # A graph freed it: others held it only up to the event before.
        inside = isinstance(call, GraphCall) and storage in call.released
        self._held_until.append((held, died - 1 if inside else died))

    def _end(self, index: int, backward: bool) -> None:
        self._ends[index] = len(self._workspace) - 1
        if not backward and not self._recording.events[index].backward:
            self._forward = len(self._workspace)
