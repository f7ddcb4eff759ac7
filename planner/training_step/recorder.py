"""Records the allocations and frees of a training step by running it.

:class:`StepRecorder` is a dispatch mode. It notes each operation that runs under it, the
storages that the operation allocates, and (by weak references) after which operation each
storage dies. The step runs on fake tensors, or on real ones. Run over the plain module it gives the
eager step as the user has it today; run over the compiled module it gives the *glue*: what happens
between the captured graphs.

No dispatch mode sees the tensor of eight bytes that PyTorch makes of a Python number (``x / 2.0``).
Where autograd saves it, it is found in the node of the result, and recorded right after the operation.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from planner._torch import autograd, fake, operators
from planner._torch.execution.cast_inside import dispatched_casting, is_noted, note_operators, noted_operators
from planner._torch.execution.linear_layers import Product
from planner._torch.execution.saved_numbers import SavedNumbers
from planner._torch.own_code import meant, stand_in
from planner._torch.patches import replaced
from planner._torch.tensors import (
    SPARSE,
    call_tensors,
    held_tensors,
    is_lent,
    is_opaque,
    is_wrapper,
    storage_number,
)
from planner._torch.tracing.inside_compile import not_compiled
from planner._torch.without_data.ctc_loss import LENGTHS_AS_TENSORS
from planner._torch.without_data.extremes import EXTREMES, GradientsOfExtremes
from planner._torch.without_data.plain import ASKS_FOR_DEVICE, device_asked_for, device_of, stored_bytes
from planner._torch.without_data.products import PRODUCTS, GradientsOfProducts
from planner.errors import CaptureError
from planner.training_step.call import Call, signature_of, sizes_by_data
from planner.training_step.examples import Examples
from planner.training_step.step import NESTED, Step, tensors_in
from planner.training_step.unseen_writes import UnseenWrites

QUERIES = ("prim::device", "aten::sym_size", "aten::sym_stride", "aten::size", "aten::stride")
"""Queries of a tensor subclass, which a dispatch mode sees as calls of operators; they allocate nothing."""


@dataclass(slots=True)
class Storage:
    """One storage that a step allocated.

    Attributes:
        bytes: Its size.
        died_after: Index of the event after which nothing held it; None while it lives.
        kind: The kind of device that it is on.
        grown: Whether a later operator made it larger than the one that allocated it.
    """

    bytes: int
    died_after: int | None = None
    kind: str = "cpu"
    grown: bool = False


class Event(NamedTuple):
    """Something that happened in the step.

    Attributes:
        call: Index into ``recorder.calls``, or None for the execution of a captured graph.
        reads: Indices of the recorded storages that it reads, one per tensor argument (resident: -1).
        allocates: Indices of the storages that it allocates, in order of the outputs.
        backward: Whether it ran inside a backward pass.
        graph: The :class:`planner.capture.graphs.graph_call.GraphCall` of a captured graph; else None.
        node: The autograd node that it ran in; None in the forward.
    """

    call: int | None
    reads: tuple[int, ...]
    allocates: tuple[int, ...]
    backward: bool
    graph: Any = None
    node: tuple[str, int] | None = None


@dataclass
class Recording:
    """Everything that :class:`StepRecorder` recorded.

    Attributes:
        outputs: Example outputs of each distinct call.
        gradients: The storages that are gradients of parameters when the step has ended.
        results: The storages of outputs that a pipeline does not hold beyond a micro-batch's backward. It
            does hold those that are sent to the next stage, unless it frees them early.
        sent: The storages of outputs that are sent to the next stage of a pipeline, which then frees them.
        casting: Whether autocast may cast what an operator calls inside.
        opaque: A class of tensors that do not say which tensors they hold; None if no operator is given one.
    """

    events: list[Event] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    gradients: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    sent: frozenset[int] = frozenset()
    casting: bool = False
    opaque: type | None = None


class StepRecorder(autograd.InfrastructureMode):
    """Records one step; see the module's docstring.

    Args:
        mode: A fake mode, under which examples of the operations' arguments are kept.
        resident: Tensors that are there before the step: parameters, buffers, inputs.
        gradients: Gradients that are there before the step, resident as well.
        numbers: Whether Python numbers that autograd saves are in the memory of the step's device: the CPU's.
        foreign: Called, before an operation runs, with those of its arguments that are neither there before
            the step as far as is known, nor made by it.

    Attributes:
        under_a_mode: Whether the recorded operations are going to run under a dispatch mode. PyTorch then
            neither writes in place nor chooses by data where it does so for plain tensors only.
        otherwise_rounded: Whether gradients of products were computed under such a mode, which rounds them
            otherwise.
        runs_otherwise: Whether an operation may have run otherwise under such a mode than without.
    """

    def __init__(
        self,
        mode: Any,
        resident: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor] = (),
        numbers: bool = False,
        foreign: Callable[[Any, list[torch.Tensor]], None] = lambda operator, tensors: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self._examples, self._foreign = Examples(mode), foreign
        self._known, self._signatures = dict[int, int](), dict[Any, int]()
        self._references: dict[int, weakref.ref[Any]] = {}
        self._paused = self._ended = False
        self._states: set[int] = set()  # storages that are states of generators
        self._numbers, self._saved_numbers = numbers, SavedNumbers()
        self._product = Product()
        self._products = GradientsOfProducts(self._run_in_place_of_others, self.pause)
        self._extremes = GradientsOfExtremes(self._run_in_place_of_others, self.pause)
        self._born_under: list[tuple[str, int] | None] = []
        self._patches = contextlib.ExitStack()
        self._generator_state: Callable[[], torch.Tensor] = meant(torch.get_rng_state)
        self._resize: Callable[..., Any] = meant(torch.UntypedStorage.resize_)
        self._read_by_collectives: dict[int, torch.Tensor] = {}  # by storage of the result
        self.writes = Counter[int]()  # by the identity of memory
        self.resizes = Counter[int]()  # of storages, by the same
        self._lies_in: dict[int, int] = {}  # by storage of a view without data: that of the viewed data
        self.unseen: UnseenWrites | None = None
        self.under_a_mode = self.otherwise_rounded = self.runs_otherwise = False
        # Held: their identities are not used again.
        self._resident: list[Any] = []
        self._is_resident([held for tensor in (*resident, *gradients) for held in held_tensors(tensor)])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.seen(func, types, args, kwargs)

    def seen(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run what the mode sees: an operator, a question, or the note of one that autocast casts inside."""
        if func is ASKS_FOR_DEVICE and fake.is_fake(args[0]):
            return device_asked_for(args)
        if func in noted_operators and is_noted(func):
            self.recording.casting = True
            return dispatched_casting(self.dispatched, func, types, args, kwargs)
        return self.dispatched(func, types, args, kwargs)

    def dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and record it."""
        kwargs = kwargs or {}
        if not self._paused and any(map(is_wrapper, types)):
            if any(tensor.is_nested for tensor in call_tensors([args, kwargs])):
                raise CaptureError(NESTED)
            self.recording.opaque = next(filter(is_opaque, types), self.recording.opaque)
            return NotImplemented  # it runs operations on the tensors that it holds, which are recorded
        # Operators of higher order run the operators that they are made of, which are recorded themselves.
        if self._paused or not operators.is_operator(func) or operators.name_of(func) in QUERIES:
            return func(*args, **kwargs)
        self._record_saved_number()
        node = autograd.running_node_number()
        self.runs_otherwise |= self.under_a_mode and (node is not None or func is LENGTHS_AS_TENSORS)
        if node is not None and node[0] in PRODUCTS:
            self.otherwise_rounded |= self.under_a_mode
            instead = None if self.under_a_mode else self._products.instead(func, args, kwargs, node)
            if instead is not None:
                return instead[0]
        if node is not None and node[0] in EXTREMES and not self.under_a_mode:
            instead = self._extremes.instead(func, args, kwargs)
            if instead is not None:
                return instead[0]
        # The argument of lift_fresh was made just now.
        given = [] if func is torch.ops.aten.lift_fresh.default else _tensors(args, kwargs)
        unknown = {key: t for t in given if (key := fake.storage_key(t)) not in self._known}
        if unknown:
            self._foreign(func, list(unknown.values()))
        self._look(t.untyped_storage() for t in given)
        self._saved_numbers.runs(node)
        if node is not None and self._accumulates_in_place(func, args, kwargs, node):
            out = args[0].add_(args[1])
            func = torch.ops.aten.add_.Tensor
        elif self._adds_bias_in_place(func, args):
            out = torch.ops.aten.alias.default(args[0].add_(args[1]))
            func = torch.ops.aten.add_.Tensor
        else:
            func = self._in_place(func, args, node) or func
            out = func(*args, **kwargs)
            if operators.reads_until_waited_for(func):
                self._read_by_collectives[fake.storage_key(out)] = args[0]
            if operators.waits(func):
                self._read_by_collectives.pop(fake.storage_key(args[0]), None)
                if fake.is_fake(out):
                    return args[0]  # as it does with data
        self._product.note(func, args, out)
        if operators.writes(func):
            self._note_growth(given)
            written = operators.written_arguments(func, args, kwargs)
            if any(map(fake.is_fake, given)) and any(is_lent(t) for t in written if not fake.is_fake(t)):
                raise RuntimeError(f"{func} writes to memory of others, which a step without data leaves out")
            self.writes.update(map(self.memory_of, written))
        reads = tuple(map(self.index_of, given or _tensors(args, kwargs)))
        if self._numbers and (numbers := operators.numbers_for_tensors(func, args)):
            with self.pause():
                self._saved_numbers.note(func, args, numbers, out, node)
                if node is not None and not torch.is_grad_enabled() and autograd.engine_calls():
                    # The tensor that autograd saved of a number: another is not made.
                    args = operators.numbers_as_tensors(func, args)
        if self.unseen is not None:
            self.unseen.note(t.untyped_storage() for t in (*given, *_tensors((out,), {})))
        call = self._call(func, args, kwargs, out)
        asked = _tensors((operators.asked_for(func, args, out),), {})
        made = [t for t in asked if fake.storage_key(t) not in unknown]
        lent = func is torch.ops.aten.lift_fresh.default and is_lent(args[0])
        # An unknown tensor may have data, although its view, or the result of a write to it, has none.
        if lent or func in operators.KEPT_BY_PYTORCH or (unknown and operators.returns_given(func)):
            self._is_resident(t for t in made if fake.storage_key(t) not in self._known)
            if len(unknown) == 1:
                self._lies_in.update(dict.fromkeys(map(fake.storage_key, made), next(iter(unknown))))
        self._append(call, reads, made, node)
        return out

    def __enter__(self) -> "StepRecorder":
        note_operators()
        # torch.utils.checkpoint saves states of the generator, which no dispatch mode sees, nor does one see
        # that invertible layers let go of their inputs' memory.
        state = stand_in(not_compiled(self._save_generator_state), self._generator_state)
        resize = not_compiled(lambda storage, size: self._resize_storage(storage, size))
        self._patches.enter_context(replaced(torch, {"get_rng_state": state}))
        resizes = {"resize_": stand_in(resize, self._resize)}
        self._patches.enter_context(replaced(torch.UntypedStorage, resizes))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        self._record_saved_number()
        self._saved_numbers.runs(None)
        self._ended = True  # storages that are alive now outlive the step
        self._leave_out_the_host()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    # ---- used while a captured graph runs --------------------------------------------------------

    def index_of(self, tensor: torch.Tensor) -> int:
        """The index of a tensor's storage in the recording; -1 where it is resident or unknown."""
        return self._known.get(fake.storage_key(tensor), -1)

    def memory_of(self, tensor: torch.Tensor) -> int:
        """Identity of the memory that a tensor lies in; of a view without data, of what it views."""
        key = fake.storage_key(tensor)
        return self._lies_in.get(key, key)

    def look_for_unseen_writes(self) -> None:
        """From now on compare bytes where there are some; what changed unseen counts among the writes."""
        self.unseen = UnseenWrites(self._written_unseen)

    def watch(self, tensor: torch.Tensor) -> Callable[[], tuple[bool, bool]]:
        """A function that tells whether a tensor's memory was written to since, and whether it was resized.
        The memory is not held for that. Once it is freed, the answer is that of the moment before."""
        memory, storage = self.memory_of(tensor), tensor.untyped_storage()

        def now() -> tuple[int, int]:
            return self.writes[memory], self.resizes[memory]

        self._look([storage])
        before, last = now(), list[tuple[int, int]]()
        there = weakref.ref(storage, lambda _: last.append(now()))

        def changed() -> tuple[bool, bool]:
            if (storage := there()) is not None:
                self._look([storage])
            writes, resizes = last[0] if last else now()
            return writes != before[0], resizes != before[1]

        return changed

    def _look(self, storages: Iterable[torch.UntypedStorage]) -> None:
        if self.unseen is not None:
            self.unseen.look(storages)

    def _written_unseen(self, key: int) -> None:
        self.writes[self._lies_in.get(key, key)] += 1

    def graph_ran(self, arguments: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Note that a captured graph ran as one event. What is a view of something unknown is not made."""
        self._record_saved_number()
        reads = tuple(self.index_of(t) if isinstance(t, torch.Tensor) else -1 for t in arguments)
        given = {fake.storage_key(t) for t in arguments if isinstance(t, torch.Tensor)}
        tensors = [t for t in outputs if isinstance(t, torch.Tensor) and fake.storage_key(t) not in given]
        node = autograd.running_node_number()
        self._saved_numbers.runs(node)
        self._append(None, reads, tensors, node)

    def indices_of(self, tensors: Iterable[torch.Tensor | None]) -> frozenset[int]:
        """Indices of the recorded storages of some tensors."""
        held = [part for tensor in tensors if tensor is not None for part in held_tensors(tensor)]
        return frozenset(map(self.index_of, held)) - {-1}

    def note_what_is_left(
        self,
        step: Step,
        parameters: Sequence[torch.Tensor],
        output: object,
        loss: torch.Tensor | None,
    ) -> None:
        """Note which storages a step leaves that has run, and for what."""
        self.recording.gradients = self.indices_of(parameter.grad for parameter in parameters)
        if loss is not None and step.outputs == "dropped":
            self.recording.results = self.indices_of(tensors_in(output))

    def note_sent(self, outputs: Sequence[torch.Tensor]) -> None:
        """Note what goes to the next stage of a pipeline, and is let go of then."""
        self.recording.sent = self.indices_of(outputs)

    def left_tensors(self) -> bool:
        """Whether something made in the step is still there, as a table that a first forward keeps."""
        return any(storage() is not None for storage in self._references.values())

    @property
    def divides(self) -> bool:
        """Whether it was recorded as dividing by factors, which no data tell to be other than zero."""
        return self._products.assumed

    def eagerly(self) -> Recording | None:
        """The step as it runs without a mode; None where something may run otherwise then."""
        return None if self.runs_otherwise else self.recording

    def pause(self) -> "_Pause":
        """A context in which operations run unrecorded."""
        return _Pause(self)

    # ---- inside ------------------------------------------------------------------------------------

    def _run_in_place_of_others(self, func: Any, *args: Any) -> Any:
        return self.dispatched(func, (), args, {})

    def _record_saved_number(self) -> None:
        """Record the Python number that autograd saved of the last operation, now that there is its node."""
        if not self._saved_numbers.noted:
            return
        with self.pause():
            numbers, node = self._saved_numbers.found()
        for number in numbers:
            # Saving allocates nothing and takes no time; so does this.
            call = self._call(torch.ops.aten.detach.default, (number,), {}, number)
            self._append(call, (), [number], node)

    def _is_resident(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._resident.append(storage := tensor.untyped_storage())
            self._known[storage_number(storage)] = -1

    def _note_growth(self, written: Sequence[torch.Tensor]) -> None:
        """Note storages that an operator made larger, as with `out=` an empty tensor. They count with that
        size from the first: the smaller memory was freed."""
        for tensor in written:
            if (number := self.index_of(tensor)) >= 0:
                storage = self.recording.storages[number]
                if (size := stored_bytes(tensor)) > storage.bytes:
                    storage.bytes, storage.grown = size, True

    def _append(
        self,
        call: int | None,
        reads: tuple[int, ...],
        outputs: Sequence[torch.Tensor],
        node: tuple[str, int] | None,
    ) -> None:
        born = []
        for tensor in outputs:
            storage = tensor.untyped_storage()
            key = storage_number(storage)
            if key in self._known:
                continue
            number = len(self.recording.storages)
            self.recording.storages.append(Storage(stored_bytes(tensor), kind=device_of(tensor).type))
            self._born_under.append(node)
            self._known[key] = number
            self._references[number] = weakref.ref(storage, self._on_death(key, number))
            born.append(number)
        self.recording.events.append(Event(call, reads, tuple(born), node is not None, node=node))

    def _on_death(self, key: int, number: int) -> Any:
        recording, known = self.recording, self._known

        def died(_: Any) -> None:
            if self._ended:
                return
            recording.storages[number].died_after = len(recording.events) - 1
            if known.get(key) == number:
                del known[key]

        return died

    def _save_generator_state(self) -> torch.Tensor:
        state = self._generator_state()
        if not self._paused:
            operator = torch.ops.aten.empty.memory_format
            call = self._call(operator, (list(state.shape),), {"dtype": state.dtype}, state)
            self._append(call, (), [state], autograd.running_node_number())
            self._states.update(self.recording.events[-1].allocates)
        return state

    def _resize_storage(self, storage: torch.UntypedStorage, size: int) -> Any:
        """Record that a storage got another size: another one takes its place."""
        resized, key = self._resize(storage, size), storage_number(storage)
        number = -1 if self._paused else self._known.get(key, -1)
        if number >= 0:
            self.resizes[key] += 1
            events, storages = self.recording.events, self.recording.storages
            storages[number].died_after = len(events) - 1
            new = len(storages)
            storages.append(Storage(storage.nbytes(), kind=storages[number].kind))
            self._born_under.append(node := autograd.running_node_number())
            del self._references[number]  # it is not what dies when this does
            self._known[key], self._references[new] = new, weakref.ref(storage, self._on_death(key, new))
            with self.pause():
                made = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            call = self._call(
                torch.ops.aten.empty.memory_format, ([storage.nbytes()],), {"dtype": torch.uint8}, made
            )
            events.append(Event(call, (), (new,), node is not None, node=node))
        return resized

    def _leave_out_the_host(self) -> None:
        """On a GPU, what is in the memory of the host takes none of the device's.

        In a step that is recorded on the CPU for one only states of generators are told apart.
        """
        here = any(storage.kind == "cuda" for storage in self.recording.storages)
        for number, storage in enumerate(self.recording.storages):
            if (here and storage.kind == "cpu") or (number in self._states and not self._numbers):
                storage.bytes = 0

    def _accumulates_in_place(self, func: Any, args: Any, kwargs: Any, node: object) -> bool:
        # The engine accumulates gradients with `old.add_(new)` if it alone holds `old`, but never
        # for tensor subclasses, so a fake step would count a storage that the real one does not have.
        # `old` is then older than the node whose output is `new`; a node's own sums do not count.
        if func is not torch.ops.aten.add.Tensor or kwargs or len(args) != 2 or self.under_a_mode:
            return False
        old, new = args
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or old.shape != new.shape:
            return False
        number = self.index_of(old)
        return (
            number >= 0
            and self._born_under[number] is not None
            and self._born_under[number] != node
            and old.dtype == new.dtype
            and old.numel() * old.element_size() == old.untyped_storage().nbytes()
            and autograd.exclusively_owned(old)
            and autograd.engine_calls()
        )

    def _adds_bias_in_place(self, func: Any, args: Any) -> bool:
        if func is not torch.ops.aten.add.Tensor or not self._product.is_followed_by_its_bias(args):
            return False
        self.runs_otherwise |= self.under_a_mode
        return not self.under_a_mode

    def _in_place(self, func: Any, args: Any, node: tuple[str, int] | None) -> Any:
        # A node changes tensors that it made itself in place, unless tensor subclasses may be involved.
        in_place = (
            None if node is None or self.under_a_mode else autograd.in_place_for_plain_tensors(node[0], func)
        )
        number = -1 if in_place is None else self.index_of(args[0])
        own = number >= 0 and self._born_under[number] == node and autograd.engine_calls()
        return in_place if own else None

    def _call(self, func: Any, args: Any, kwargs: Any, out: Any) -> int:
        if operators.takes_pinning(func) and kwargs.get("dtype") is None and isinstance(out, torch.Tensor):
            kwargs = {**kwargs, "dtype": out.dtype}  # where it is measured, the default may be another
        sizes = sizes_by_data(func, args, out)
        signature = (func, signature_of(args), signature_of(kwargs), sizes)
        if (number := self._signatures.get(signature)) is None:
            number = self._signatures[signature] = len(self.recording.calls)
            with self.pause():
                args, kwargs, out = self._examples.of_call(args, kwargs, out)
            self.recording.calls.append(Call(func, args, kwargs, sizes))
            self.recording.outputs.append(out)
        return number


class _Pause:
    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder, self._before = recorder, False

    def __enter__(self) -> None:
        self._before, self._recorder._paused = self._recorder._paused, True

    def __exit__(self, *_: object) -> None:
        self._recorder._paused = self._before


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found += _parts(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value, {})
    return found


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose storages a tensor uses."""
    parts = SPARSE.get(tensor.layout)
    return [tensor] if parts is None else [part(tensor.detach()) for part in parts]
