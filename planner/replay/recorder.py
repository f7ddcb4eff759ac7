"""Recording a step for replay: its calls, and the tensors that autograd saves and asks for.

The step runs under :class:`StepRecorder`, with hooks on the tensors that the module's forward saves. A packed
tensor is not held, so its storage dies in the recording when Python frees it. Unpacking gives a stand-in: a
tensor of the same form in memory of its own, which dies when the node is done with it. So one recording gives
both lifetimes of each storage, dropped and kept.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.modules import module as every_module

from planner._torch import fake
from planner._torch.autograd import CountingMode, engine_asks
from planner._torch.tensors import SPARSE, storage_number, strided_copy
from planner._torch.tracing.block_marks import marks_here
from planner._torch.versions import version_of
from planner._torch.without_data.ctc_loss import lengths_are_tensors
from planner._torch.without_data.forms import Form, is_plain
from planner._torch.without_data.one_hot import OneHotAsWithData
from planner.parallel.fully_shard import ShardedUnits
from planner.parallel.units import ROOT, Units
from planner.replay.calls import (
    is_batch_norm,
    is_counted,
    operands_of,
    results_of,
    statistics_of,
    users_line,
    why_not_noted,
    written_operands,
)
from planner.training_step.recorder import Recording, StepRecorder
from planner.training_step.step import tensors_in


@dataclass(slots=True)
class Save:
    """One tensor that autograd saved in the module's forward.

    Attributes:
        storage: The recorded storage that it lies in; -1 if that existed before the step, and for a tensor
            that is not plain.
        begun: The number of counted calls of the forward that have begun by then.
        bytes: The bytes of that storage; 0 without one.
        unit: The number of the unit of ``fully_shard`` that saved it.
        gathered: Whether the unit's parameters were gathered each time that a node asked for it.
        by_python: Whether Python code asked for it, as a hook or a backward in Python.
        unpacked: The number of events recorded by then, for each time that a node asked for it.
        released: The last event before autograd freed it; None if it outlived the step.
    """

    storage: int
    begun: int = 0
    bytes: int = 0
    unit: int = ROOT
    gathered: bool = True
    by_python: bool = False
    unpacked: list[int] = field(default_factory=list)
    released: int | None = None


@dataclass(slots=True)
class CallDetails:
    """Details of one event of the recording; the defaults if it is no operator call.

    Attributes:
        position: Its place among the counted calls of the module's forward; -1 outside of these.
        operands: The recorded storages of its tensor arguments, in order; -1 for other storages.
        results: The recorded storages of the tensors that it returned, in order; -1 for other storages.
        written: The recorded storages that it writes; -1 for other storages.
        why_not: Why it does not run again for what it was handed; None where it may.
        outside_read, outside_written: Identities of storages from before the step that it reads and writes.
        statistics: Identities of storages with running statistics that it updates; a re-run does not.
        module: The name of the module that called it.
        line: The user's line that called it, as in ``net.py:12``.
        unit: The number of the unit of ``fully_shard`` that called it.
        blocks: Marks of the user's blocks that it is in, outermost first.
    """

    position: int = -1
    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    why_not: str | None = None
    outside_read: tuple[int, ...] = ()
    outside_written: tuple[int, ...] = ()
    statistics: tuple[int, ...] = ()
    module: str = ""
    line: str | None = None
    unit: int = ROOT
    blocks: tuple[str, ...] = ()


@dataclass
class Saved:
    """The records of :class:`SavesRecorder` beside the events.

    Attributes:
        saves: The tensors that autograd saved, in order.
        unpacked: The saves that nodes asked for, in order, each with the number of events by then.
        details: One entry for every event.
        own_counters: Storages with a tensor that has its own version counter, as results of ``detach`` and
            ``unsafe_split`` have: its version is not the number of writes that were seen.
        unseen: By storage, the number of events when a write outside of operators was last noticed; in
            ``outside_unseen`` for storages that existed before the step, by identity.
        operators: The operators of the counted calls, by position.
        grad_switches: The positions at which gradients are switched off and on, by turns.
        forward_events: The number of events of the module's forward.
        unit_of: By identity of a parameter's storage, the number of the unit that gathers it.
        of_one_call: Identities of the storages of parameters and arguments.
    """

    saves: list[Save] = field(default_factory=list)
    unpacked: list[tuple[int, int]] = field(default_factory=list)
    details: list[CallDetails] = field(default_factory=list)
    own_counters: set[int] = field(default_factory=set)
    unseen: dict[int, int] = field(default_factory=dict)
    outside_unseen: dict[int, int] = field(default_factory=dict)
    operators: list[Any] = field(default_factory=list)
    grad_switches: list[int] = field(default_factory=list)
    forward_events: int = 0
    unit_of: dict[int, int] = field(default_factory=dict)
    of_one_call: set[int] = field(default_factory=set)


class SavesRecorder(CountingMode, StepRecorder):
    """Records one step whose saved tensors are packed; see the module's docstring.

    Args:
        module: The module whose forward is planned, for the names of its parts.
        sharded: Its units of ``fully_shard``; None without any.
        of_step: Further arguments of :class:`StepRecorder`.
    """

    def __init__(
        self, module: torch.nn.Module, sharded: ShardedUnits | None, *of_step: Any, **options: Any
    ) -> None:
        super().__init__(*of_step, **options)
        self.look_for_unseen_writes()
        self.saved = Saved()
        self._sharded = [] if sharded is None else sharded.units
        self._units = Units(() if sharded is None else sharded.modules())
        for number, unit in enumerate(self._sharded):
            self.saved.unit_of.update((fake.storage_key(p), number) for p in unit.parameters)
        self.saved.of_one_call.update(map(fake.storage_key, module.parameters()))
        self._names = {id(part): name for name, part in module.named_modules()}
        self._inside = [""]
        self._finalizers: list[Any] = []  # weak references: their callbacks run while they are held
        self._in_forward = False
        self._versions: dict[int, int] = {}  # by storage that the forward made: its writes so far
        # Tensors that the forward read, by their id and storage: with the version that it read last, and the
        # number of operators that had written to that storage.
        self._read: dict[tuple[int, int], tuple[weakref.ref[torch.Tensor], int | None, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.seen(func, types, args, kwargs)  # Dynamo wraps the method that would be inherited

    def dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and record it with its details."""
        out = super().dispatched(func, types, args, kwargs)
        if self._paused or out is NotImplemented:
            return out
        events, details = self.recording.events, self.saved.details
        if len(events) == len(details):
            if self._counts(func):
                raise AssertionError(f"{func} is counted and was not recorded")
            return out
        details += [CallDetails() for _ in range(len(events) - len(details) - 1)]
        details.append(self._details(func, args, kwargs, out))
        return out

    @contextmanager
    def forward(self, arguments: Any) -> Iterator[None]:
        """The context of the module's forward with such arguments."""
        self.saved.of_one_call.update(map(self.memory_of, tensors_in(arguments)))
        self._in_forward = self.under_a_mode = True
        before = every_module.register_module_forward_pre_hook(self._enter)
        after = every_module.register_module_forward_hook(self._leave, always_call=True)
        try:
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            with hooks, self._units.watched(), OneHotAsWithData(), lengths_are_tensors():
                yield
        finally:
            before.remove()
            after.remove()
            self._look_for_changes()
            self._in_forward = self.under_a_mode = False
            self.saved.forward_events = len(self.recording.events)

    def eagerly(self) -> Recording | None:
        """As of :class:`StepRecorder`: without hooks, a saved tensor lives until autograd frees it."""
        if super().eagerly() is None:
            return None
        storages = [replace(storage) for storage in self.recording.storages]
        for save in self.saved.saves:
            if save.storage >= 0 and (died := storages[save.storage].died_after) is not None:
                until = None if save.released is None else max(died, save.released)
                storages[save.storage].died_after = until
        return replace(self.recording, storages=storages)

    # ---- inside ------------------------------------------------------------------------------------

    def _counts(self, func: Any) -> bool:
        return self._in_forward and not self._units.in_hooks and is_counted(func)

    def _enter(self, module: torch.nn.Module, _args: Any) -> None:
        self._inside.append(self._names.get(id(module), self._inside[-1]))

    def _leave(self, module: torch.nn.Module, _args: Any, _output: Any) -> None:
        if len(self._inside) > 1:
            self._inside.pop()

    def _details(self, func: Any, args: Any, kwargs: Any, out: Any) -> CallDetails:
        position = -1
        if self._counts(func):
            position = len(self.saved.operators)
            self.saved.operators.append(func)
            # An odd number of switches: gradients were off at the last call.
            if torch.is_grad_enabled() is bool(len(self.saved.grad_switches) % 2):
                self.saved.grad_switches.append(position)
        operands, results = list(operands_of(args, kwargs)), list(results_of(out))
        numbers = tuple(map(self.index_of, operands))
        # The statistics of a batch normalisation are no operands in training: a re-run gets none.
        writes = [] if is_batch_norm(func) else written_operands(func, args, kwargs)
        reads = operands[:3] if is_batch_norm(func) and len(args) > 5 and args[5] else operands
        if self._in_forward:
            for tensor, number in zip(operands, numbers, strict=True):
                self._check_counter(tensor, number)
            self._count_writes(writes, results)
            self._note_reads(reads, {self.memory_of(t) for t in writes})
        return CallDetails(
            position,
            numbers,
            tuple(map(self.index_of, results)),
            tuple(map(self.index_of, writes)),
            why_not_noted(func, args, kwargs),
            tuple(self.memory_of(t) for t, number in zip(reads, numbers, strict=False) if number < 0),
            self._outside(writes),
            self._outside(statistics_of(func, args)),
            self._inside[-1] if self._in_forward else "",
            users_line(AroundForward.__call__.__code__) if self._in_forward else None,
            self._units.current,
            marks_here() if self._in_forward else (),
        )

    def _count_writes(self, writes: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        for number in map(self.index_of, writes):
            if number in self._versions:
                self._versions[number] += 1  # PyTorch counts it when this call has returned
        for tensor in results:
            if (number := self.index_of(tensor)) >= 0:
                self._versions.setdefault(number, version_of(tensor) or 0)

    def _check_counter(self, tensor: torch.Tensor, number: int) -> None:
        version = version_of(tensor)  # None of a tensor of inference mode, whose writes nothing counts
        if version is None or self._versions.get(number, version) != version:
            self.saved.own_counters.add(number)

    def _note_reads(self, reads: list[torch.Tensor], written: set[int]) -> None:
        for tensor in reads:
            base = tensor if tensor._base is None or tensor._base.layout in SPARSE else tensor._base
            key = id(base), self.memory_of(base)
            self._look_at(key, len(self.recording.events) - 1)
            version = None if key[1] in written else version_of(base)  # which PyTorch counts after the call
            self._read[key] = weakref.ref(base), version, self.writes[key[1]]

    def _look_for_changes(self) -> None:
        for key, (tensor_of, _, _) in self._read.items():
            if (tensor := tensor_of()) is not None:
                self._check_counter(tensor, self.index_of(tensor))
                self._look_at(key, len(self.recording.events))
        self._read.clear()

    def _look_at(self, key: tuple[int, int], now: int) -> None:
        """Notice that a tensor has another version than when it was read, or other memory, by ``tensor.data =
        other``: a re-run would read that. No operator need have written: ``mark_dirty`` counts a write, too,
        and so does ``torch.autograd.graph.increment_version``."""
        tensor_of, version, writes = self._read.get(key, (lambda: None, None, 0))
        if (tensor := tensor_of()) is None:
            return
        number, counted = self.index_of(tensor), version not in (None, version_of(tensor))
        counted = counted and self.writes[key[1]] == writes  # else an operator that is known has written
        if self.memory_of(tensor) != key[1] or (counted and number < 0):
            self.saved.outside_unseen[key[1]] = now
        elif counted and number in self.saved.own_counters:
            self.saved.unseen[number] = now

    def _outside(self, tensors: list[torch.Tensor]) -> tuple[int, ...]:
        return tuple(self.memory_of(t) for t in tensors if self.index_of(t) < 0)

    def _resize_storage(self, storage: torch.UntypedStorage, size: int) -> Any:
        number, now = self._known.get(storage_number(storage), -1), len(self.recording.events)
        resized = super()._resize_storage(storage, size)
        if not self._paused and number >= 0:
            self.saved.unseen[number] = now
            self.saved.own_counters.add(self._known[storage_number(storage)])
        return resized

    def _written_unseen(self, key: int) -> None:
        super()._written_unseen(key)
        number, now = self._known.get(key, -1), len(self.recording.events)
        if number >= 0:
            self.saved.unseen[number] = now
        else:
            self.saved.outside_unseen[self._lies_in.get(key, key)] = now

    def _pack(self, tensor: torch.Tensor) -> Any:
        saved = self.saved
        if self._units.in_hooks:
            return tensor
        number = -1 if self._paused or not is_plain(tensor) else self.index_of(tensor)
        taken = 0 if number < 0 else tensor.untyped_storage().nbytes()
        save = Save(number, len(saved.operators), taken, self._units.current)
        saved.saves.append(save)
        if number < 0:
            return tensor
        self._check_counter(tensor, number)
        with self.pause():
            form = Form.of(tensor) if fake.is_fake(tensor) else strided_copy(tensor.detach())
        packed = _PackedForm(form, number, len(saved.saves) - 1)
        events = self.recording.events

        def released(_: Any) -> None:
            save.released = None if self._ended else len(events) - 1

        self._finalizers.append(weakref.ref(packed, released))
        return packed

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _PackedForm):
            return packed  # type: ignore[no-any-return]
        if self.unseen is not None and not self._in_forward:
            self.unseen.look_at_all()
            self.unseen = None  # re-runs of the recorded step read nothing that is written from now on
        events = len(self.recording.events)
        save = self.saved.saves[packed.save]
        save.unpacked.append(events)
        save.by_python = save.by_python or not engine_asks()
        if self._sharded and not self._sharded[save.unit].is_there():
            save.gathered = False
        self.saved.unpacked.append((packed.save, events))
        form, number = packed.form, packed.storage
        with self.pause():
            tensor = form.tensor() if isinstance(form, Form) else strided_copy(form)
        storage = tensor.untyped_storage()
        key = storage_number(storage)
        self._known[key] = number

        def forget(_: Any) -> None:
            if self._known.get(key) == number:
                del self._known[key]

        self._finalizers.append(weakref.ref(storage, forget))
        return tensor


class _PackedForm:
    """Autograd holds this in the place of a saved tensor."""

    __slots__ = ("__weakref__", "form", "save", "storage")

    def __init__(self, form: Form | torch.Tensor, storage: int, save: int) -> None:
        self.form, self.storage, self.save = form, storage, save


class AroundForward(torch.nn.Module):
    """Calls a module within :meth:`SavesRecorder.forward`."""

    def __init__(self, module: torch.nn.Module, recorder: SavesRecorder) -> None:
        super().__init__()
        self._target, self._recorder = [module], recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._recorder.forward((args, kwargs)):
            return self._target[0](*args, **kwargs)
