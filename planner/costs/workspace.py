"""The bytes that a kernel allocates and frees inside itself, measured by a run on the device at hand.

Fake tensors know an operator's outputs but not the scratch memory of its kernel: convolutions in oneDNN and
cuDNN, attention, reductions in several passes. Each distinct operator, with its shapes, strides, dtypes and
other arguments, runs on tensors made for the purpose, one at a time, and its allocator events are read. The
results are kept in memory and on disk.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from planner._torch.execution.allocator_events import (
    counted_on_cuda,
    held_on_cuda,
    profiler_is_active,
    record_cpu_allocations,
)
from planner._torch.execution.plain_execution import plain_execution
from planner._torch.fake import storage_bytes, tree_leaves
from planner._torch.operators import OpOverload, asked_for, is_collective
from planner._torch.tensors import call_tensors, has_tensors
from planner.costs.devices import CUDA_ROUNDING_BYTES
from planner.costs.made_up.found_elements import check, told_sizes
from planner.costs.made_up.real_arguments import RealArguments
from planner.costs.measurement_cache import (
    Entries,
    call_signature,
    default_cache_path,
    environment,
    read_entries,
    write_entries,
)
from planner.interrupts import raise_interrupt
from planner.training_step.call import Call

logger = logging.getLogger(__name__)

aten = torch.ops.aten

_CHUNK = 64
"""How many operators run in one profiler session. Between sessions progress is told and Ctrl-C heeded. A
session takes a millisecond: the 73 operators of `small_gpt` (`tests/small.py`) take 149 ms with one each, 48
so, and 46 in a single one."""
_MAX_RUNS = 4
"""After so many runs an operator that allocates something else each time counts as in the last. Of those 73
twelve run a second time, and none a third."""
_ALONE = 1.1
"""A run whose wall time is at most this many times its process time had a processor to itself. Of those 73,
68 to 73 had, on two processors at a load of nine."""
_MARK = "planner.costs.workspace."
"""Before an operator's number in its chunk: what the profiler calls its run."""
# Views where the strides of their input allow it, and else copies.
_MAY_COPY = frozenset({aten.reshape, aten.contiguous, aten.to})

OnMeasured = Callable[[int, int], None]
"""Called with the number of operators that have run, and the number of all that will."""


@dataclass(frozen=True, slots=True)
class OpMemory:
    """The memory of one operator.

    Attributes:
        workspace_bytes: The most bytes that it held at once beyond those that it holds when it returns.
        output_bytes: Size of the storage of each of its outputs, flattened; 0 for one that shares another's
            storage or is no tensor. Empty for an operator that was not run (a view, or a failure).
    """

    workspace_bytes: int
    output_bytes: tuple[int, ...]


NOT_RUN = OpMemory(0, ())
"""The memory of an operator that was not run."""


class TimedRun(NamedTuple):
    """How long a run took, in process seconds."""

    seconds: float
    alone: bool
    """Whether it never waited for a processor, as it does beside other processes."""


class Workspaces(Protocol):
    """What knows the memory of calls: measured here, or predicted for a GPU that is not here."""

    def measure(self, calls: Iterable[Call]) -> list[OpMemory]:
        """The memory of each call, in order."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What one run of an operator allocated."""

    memory: OpMemory
    kept_bytes: int
    """Bytes that it left allocated beyond its outputs, as in a cache."""

    @property
    def clean(self) -> bool:
        """Whether it allocated nothing but its outputs: then a second run cannot differ."""
        return self.memory.workspace_bytes == 0 and self.kept_bytes == 0


class WorkspaceMeter:
    """Measures operators on one device, each distinct one once.

    Attributes:
        failures: Operators that could not be run, with the reason, by signature. Their workspace counts as 0.
        unmeasured: Signatures of operators that were not run, since that would end an open profiler session.
            They count as 0, too.
        made_up: Makes the arguments that they are run with.
    """

    def __init__(self, device: torch.device | str, cache_path: Path | str | None = "default") -> None:
        """
        Args:
            device: Where to run: the CPU, or a CUDA device that is here.
            cache_path: JSON file to keep results in; ``"default"`` is one in the user's cache directory,
                ``None`` none. A file that cannot be read or written costs time, not correctness.
        """
        self.device = torch.device(device)
        self.failures: dict[str, str] = {}
        self.unmeasured: set[str] = set()
        self._known: dict[str, OpMemory] = {}
        self._remembered: Entries = {}
        self._masks_false: set[str] = set()
        self._timed: dict[str, TimedRun] = {}
        if cache_path == "default":
            cache_path = default_cache_path()
        self._path = None if cache_path is None else Path(cache_path)
        self._environment = environment(self.device)
        self.made_up = RealArguments(self.device)
        self._loaded = False

    def measure(self, calls: Iterable[Call], progress: OnMeasured | None = None) -> list[OpMemory]:
        """The memory of each call, in order; those that are not yet known are run.

        Random generators, active modes and autocast stay as they are.
        """
        self._load()
        calls = list(calls)
        signatures: list[str | None] = []
        pending: dict[str, Call] = {}
        for call in calls:
            signature = None
            try:
                if _allocates(call.func):
                    signature = _signature(call)
            except (TypeError, ValueError) as error:
                self._fail(str(call.func), str(error))
            signatures.append(signature)
            if signature is not None and not self._knows(signature) and signature not in self.failures:
                pending[signature] = call
        if pending and self.device.type == "cpu" and profiler_is_active():
            logger.warning("a torch.profiler session is open: workspace is not measured")
            self.unmeasured.update(pending)
        elif pending:
            self._run_all(pending, progress)
            self._save({key: self._known[key] for key in pending if key in self._known})
        return [  # without a signature it is a view, or a collective, which would wait for other ranks
            OpMemory(_copied_bytes(call, self.device.type), ()) if s is None else self._known.get(s, NOT_RUN)
            for s, call in zip(signatures, calls, strict=True)
        ]

    def run_of(self, call: Call) -> TimedRun | None:
        """How long a call took when it was measured on the CPU, in this process; None where it was not."""
        return self._timed.get(_signature(call)) if self._timed else None

    def failed(self, calls: Iterable[Call]) -> Iterator[tuple[Call, str]]:
        """The calls among measured ones that could not be run, each with the reason."""
        for call in calls if self.failures else ():
            if _allocates(call.func):
                with suppress(TypeError, ValueError):
                    reason = self.failures.get(_signature(call))
                    if reason is not None:
                        yield call, reason

    def _run_all(self, pending: Mapping[str, Call], progress: OnMeasured | None) -> None:
        todo = list(pending)
        cuda = [self.device] if self.device.type == "cuda" else []
        with plain_execution(self.device.type), torch.random.fork_rng(devices=cuda):
            for start in range(0, len(todo), _CHUNK):
                raise_interrupt()
                self._settle({key: pending[key] for key in todo[start : start + _CHUNK]})
                if progress is not None:
                    progress(min(start + _CHUNK, len(todo)), len(todo))

    def _settle(self, chunk: Mapping[str, Call]) -> None:
        """Run each operator until its allocations repeat: first runs fill caches that stay."""
        run_each = self._run_on_cuda if self.device.type == "cuda" else self._run_on_cpu
        before: dict[str, _Run] = {}
        for _ in range(_MAX_RUNS):
            runs = run_each(chunk)
            for key, run in runs.items():
                if run.clean or before.get(key) == run:
                    self._known[key] = run.memory
            before = runs
            settled = self._known.keys() | self.failures.keys()
            chunk = {key: call for key, call in chunk.items() if key not in settled}
            if not chunk:
                return
        for key, run in before.items():
            if key in chunk:
                logger.debug("%s allocates differently each time; the last is taken", key)
                self._known[key] = run.memory

    def _run_on_cpu(self, chunk: Mapping[str, Call]) -> dict[str, _Run]:
        outputs: dict[str, tuple[int, ...]] = {}

        def run_one(mark: str, key: str, call: Call) -> None:
            args, kwargs, inputs = self.made_up.of(call, masks=key not in self._masks_false)
            with _grad_mode(call.func), torch.profiler.record_function(mark):
                began, before = time.perf_counter(), time.process_time()
                result = asked_for(call.func, call.args, call.func(*args, **kwargs))
                seconds = time.process_time() - before
                self._timed[key] = TimedRun(seconds, time.perf_counter() - began <= _ALONE * seconds)
            check(call, result)
            outputs[key] = _output_bytes(result, inputs)

        def run_each() -> None:
            for number, (key, call) in enumerate(chunk.items()):
                with self._noting_failure(key, call):
                    run_one(f"{_MARK}{number}", key, call)

        recording = record_cpu_allocations(run_each)
        runs = {}
        for number, key in enumerate(chunk):
            if key in outputs:
                net = peak = 0
                for _, count in recording.allocations_between(*recording.marks[f"{_MARK}{number}"]):
                    net += count
                    peak = max(peak, net)
                runs[key] = _Run(OpMemory(peak - net, outputs[key]), net - sum(outputs[key]))
        return runs

    def _run_on_cuda(self, chunk: Mapping[str, Call]) -> dict[str, _Run]:
        def run_one(key: str, call: Call, *, exactly: bool = False) -> _Run:
            args, kwargs, inputs = self.made_up.of(call, masks=key not in self._masks_false)

            def run() -> Any:
                with _grad_mode(call.func):
                    outputs.append(asked_for(call.func, call.args, call.func(*args, **kwargs)))
                return outputs

            outputs: list[Any] = []
            if exactly:
                peak, net = held_on_cuda(run, self.device, CUDA_ROUNDING_BYTES)
            else:
                peak, net = counted_on_cuda(run, self.device)
            check(call, outputs[-1])
            sizes = _output_bytes(outputs, inputs, on="cuda")
            measured = _Run(OpMemory(peak - net, sizes), net - sum(map(_rounded, sizes)))
            # The counters include remainders that the allocator does not split off blocks; its events do not.
            return measured if exactly or measured.clean else run_one(key, call, exactly=True)

        runs = {}
        with torch.cuda.device(self.device):
            for key, call in chunk.items():
                with self._noting_failure(key, call):
                    runs[key] = run_one(key, call)
        return runs

    @contextmanager
    def _noting_failure(self, key: str, call: Call) -> Iterator[None]:
        """A context in which a call that raises counts as failed, with masks of both values."""
        try:
            yield
        except Exception as error:  # a kernel may raise anything about made-up inputs
            masks = any(tensor.dtype is torch.bool for tensor in call_tensors([call.args, call.kwargs]))
            if masks and key not in self._masks_false:
                self._masks_false.add(key)  # the next run tries it with masks that are False
            else:
                self._fail(key, f"{type(error).__name__}: {error}")

    def _fail(self, key: str, reason: str) -> None:
        logger.debug("no workspace known for %s: %s", key, reason)
        self.failures[key] = reason

    @contextmanager
    def arguments(self, call: Call) -> Iterator[tuple[list[Any], dict[str, Any]]]:
        """A context in which a call can be run, with real arguments for it and the grad mode that it needs.

        Raises:
            Exception: The call must not be run, or no such tensors can be made.
        """
        args, kwargs, _ = self.made_up.of(call, masks=False)
        with _grad_mode(call.func):
            yield args, kwargs

    def _load(self) -> None:
        if not self._loaded:
            self._loaded = True
            self._remembered = read_entries(self._path, self._environment)

    def _knows(self, signature: str) -> bool:
        if signature not in self._known and (numbers := self._remembered.get(signature)) is not None:
            self._known[signature] = OpMemory(numbers[0], tuple(numbers[1:]))
        return signature in self._known

    def _save(self, measured: Mapping[str, OpMemory]) -> None:
        entries = {key: [memory.workspace_bytes, *memory.output_bytes] for key, memory in measured.items()}
        write_entries(self._path, self._environment, entries)


def _rounded(size: int) -> int:
    return -(-size // CUDA_ROUNDING_BYTES) * CUDA_ROUNDING_BYTES


def _signature(call: Call) -> str:
    return call_signature(call.func, call.args, call.kwargs, told_sizes(call))


def _allocates(func: object) -> bool:
    if not isinstance(func, OpOverload) or not has_tensors(func) or is_collective(func):
        return False
    is_view = func.is_view or func.overloadpacket is aten._unsafe_view
    return not is_view or func.overloadpacket in _MAY_COPY


def _output_bytes(result: Any, inputs: Iterable[torch.Tensor], on: str = "cpu") -> tuple[int, ...]:
    """As :attr:`OpMemory.output_bytes`; 0 for a tensor off the device, too."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    sizes = []
    for output in tree_leaves(result):
        size = 0
        if isinstance(output, torch.Tensor) and output.layout is torch.strided and output.device.type == on:
            storage = output.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                size = storage.nbytes()
        sizes.append(size)
    return tuple(sizes)


def _grad_mode(func: OpOverload) -> AbstractContextManager[None]:
    """The grad mode for an operator: oneDNN's layers make a reserve only in it, even if ``train`` is set."""
    return torch.enable_grad() if func.overloadpacket is aten.mkldnn_rnn_layer else nullcontext()


# Gloo, on the CPU, makes these copies in PyTorch 2.13, and NCCL makes none. Their own buffers are outside of
# PyTorch's allocator.
_COPIES_INPUT = ("reduce_scatter_tensor", "all_reduce_coalesced", "shard_dim_alltoall")
_COPIES_RESULT = ("all_gather_into_tensor",)


def _copied_bytes(call: Call, kind: str) -> int:
    """The bytes that a collective holds only while it runs; 0 for other operators.

    Collectives are not run to measure it: a rank that ran one would wait for the others.

    Args:
        call: The call.
        kind: The kind of device that it runs on.
    """
    if kind != "cpu" or not is_collective(call.func):
        return 0
    name = str(call.func).partition(".")[2]
    given = sum(storage_bytes(tensor) for tensor in call_tensors(call.args[0]))
    if name.startswith(_COPIES_INPUT):
        return given
    return given * call.args[1] if name.startswith(_COPIES_RESULT) else 0
