"""A planned step at work: the forward runs as it was written, and drops what the plan drops.

A dispatch mode counts the calls of operators in the forward, and notes those that the plan runs again. Hooks
drop planned tensors when autograd saves them. The backward is autograd's own: when a node asks for a dropped
tensor, the calls that the plan names there run again.

A saved tensor that is not the plan's value at that place (`slots.py`) is kept, as without a plan.
"""

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from planner._torch import operators
from planner._torch.autograd import CountingMode, graph_is_kept
from planner._torch.execution.bernoulli_draws import FASTER
from planner._torch.execution.cast_inside import dispatched_casting, is_noted, noted_operators
from planner._torch.tensors import alias_of, is_wrapper, without_history
from planner._torch.versions import check_version
from planner.errors import FreedError, InputsChanged
from planner.parallel.units import ROOT, Units
from planner.replay.backward import Backward
from planner.replay.calls import is_counted, operands_of, results_of, statistics_of, users_line
from planner.replay.loaded_program import LoadedProgram
from planner.replay.noted import geometry_of, view_of
from planner.replay.slots import Slots
from planner.replay.unplanned_memory import UnplannedMemory
from planner.training_step.user_lines import short_line


class _Dropped:
    """Autograd holds this in the place of a saved tensor that the plan drops."""

    __slots__ = ("__weakref__", "counts", "geometry", "handed_out", "save", "slot", "step", "version")

    def __init__(self, step: "FollowedStep", save: int, slot: int, tensor: torch.Tensor) -> None:
        self.step, self.save, self.slot = step, save, slot
        self.handed_out: torch.Tensor | None = None  # until autograd frees the save
        self.geometry = geometry_of(tensor)
        counts = tensor if tensor._base is None else tensor._base  # as long as a view of the memory lives
        self.counts, self.version = TensorWeakRef(counts), counts._version


class FollowedStep:
    """One forward of a planned module, and what autograd holds of it."""

    def __init__(self, loaded: LoadedProgram, units: Units) -> None:
        self.loaded, self.units = loaded, units
        self.calls, self.operators, self.saves = loaded.calls, loaded.operators, loaded.saves
        self.position = self.save = 0
        self.slots = Slots(loaded)
        self.backward = Backward(loaded, self.slots)
        self.skipped = 0  # planned calls that did not come
        self.missed = False  # the plan notes, drops or writes something at one of them
        self.unplanned: UnplannedMemory | None = None  # memory of calls that the plan does not have
        self.larger: tuple[int, int] | None = None  # a saved tensor's bytes, and its planned bytes
        self._unmatched: list[tuple[str, bool, str | None]] = []  # the last calls, if none of them matched

    @property
    def followed(self) -> bool:
        """Whether all calls came that the plan needs, each with the plan's values.

        Otherwise the schedule is followed as far as it can be; values that it lacks are made on demand.
        """
        return self.backward.followed

    def pack(self, tensor: torch.Tensor) -> Any:
        """Pack a tensor that autograd saves: drop it where the plan does, and keep it otherwise."""
        save, begun = self.save, self.loaded.begun
        if self.units.in_hooks:  # saves of fully_shard's hooks are not counted
            return as_it_is(tensor)
        if save >= len(begun) or begun[save] != self.position:
            self.slots.strayed = True
            save = bisect_left(begun, self.position)
            if save >= len(begun) or begun[save] != self.position:
                return as_it_is(tensor)  # the plan has no save here
        self.save = save + 1
        slot = self.saves[save]
        planned = self.loaded.saved_bytes[save]
        if (planned or slot >= 0) and tensor.layout is not torch.strided:
            self.slots.strayed = True
            return as_it_is(tensor)
        if planned and tensor.untyped_storage().nbytes() > planned:
            self.larger = tensor.untyped_storage().nbytes(), planned
        if self.loaded.kept_as_is[save]:
            return as_it_is(tensor)
        if slot < 0:
            # Holders of a storage are counted by tensors: the user's tensor must count beside this one.
            if save in self.loaded.program.written_over:
                tensor = alias_of(tensor)
            return _Kept(self, save, tensor)
        if not (self.slots.holds(slot, tensor) and self.slots.can_be_made(slot)):
            self.slots.strayed = True
            return as_it_is(tensor)
        waiting = self.backward.waiting
        waiting[slot] = waiting.get(slot, 0) + 1
        return _Dropped(self, save, slot, tensor)

    def skips_ahead(self, func: Any, grad: bool) -> bool:
        """Whether a call that does not match its position matches a later one; if so, skip to that.

        It does if the call before it matches there, too, on the same lines of the user's; without a known
        line, the two before it. The first call with gradients matches alone: a forward that recycles its
        results may have fewer passes without. Positions never go back: nodes may ask for earlier values.
        """
        line = short_line(users_line(followed.__code__))
        self._unmatched = [*self._unmatched[-2:], (str(func), grad, line)]
        recent, end = self._unmatched, len(self.loaded.names)
        if grad and self.position < end and not self.loaded.grad[self.position]:
            first = next((p for p in range(self.position, end) if self.loaded.grad[p]), end)
            if first < end and self._matches(first, recent[-1]):
                return self._skip_to(first)
        if len(recent) < (3 if line is None else 2):
            return False  # too few to tell: perhaps a check of data, which the recorded step left out
        for position in range(self.position + len(recent) - 1, end):
            if all(self._matches(position - i, call) for i, call in enumerate(reversed(recent))):
                return self._skip_to(position)
        return False

    def _matches(self, position: int, call: tuple[str, bool, str | None]) -> bool:
        name, grad, line = call
        program = self.loaded.program
        planned_line = program.lines[position]
        return (
            name == program.operators[position]
            and grad is program.grad[position]
            and (not planned_line or line is None or planned_line == line)
        )

    def _skip_to(self, position: int) -> bool:
        self.skipped += position - self.position
        self.missed = self.missed or any(self.calls[p] is not None for p in range(self.position, position))
        self.position = position + 1
        self._unmatched = []
        return True

    def unplanned_call(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count a call that the plan does not have, and notice its writes."""
        if operators.writes(func) or statistics_of(func, args):
            self.slots.wrote(func, args, kwargs)
        if self.unplanned is None:
            weak_self = weakref.ref(self)
            self.unplanned = UnplannedMemory(
                self.loaded.program.room, lambda: 0 if (step := weak_self()) is None else step.position
            )
        self.unplanned.call_made(operands_of(args, kwargs), results_of(out))

    @property
    def strayed_from(self) -> str:
        """How the forward differed from the plan, in words."""
        came, planned = self.position - self.skipped, len(self.calls)
        if came < planned:
            return (
                f"the forward took a path that the plan has not seen: {came} of the plan's {planned} calls "
                "of operators ran"
            )
        return (
            f"the forward ran all of the plan's {planned} calls of operators, but some of their arguments, "
            "or of the tensors that autograd saved, are not those of the plan, as where an input or a weight "
            "requires a gradient and did not when the plan was made"
        )

    def finished(self) -> None:
        """End the forward: see whether the plan was followed."""
        if self.unplanned is not None:
            self.unplanned.finished()
        if self.position < len(self.calls):
            self.missed = self.missed or any(call is not None for call in self.calls[self.position :])
            self.skipped += len(self.calls) - self.position
            self.position = len(self.calls)
        self.backward.followed = not self.missed and not self.slots.strayed and self.save == len(self.saves)

    def tell_of_more(self) -> None:
        """Warn if a forward that was followed, at the planned shapes, takes more memory than planned."""
        if self.larger is not None:
            self.loaded.tell_of_larger(*self.larger)
        if self.unplanned is not None and (excess := self.unplanned.excess_bytes):
            self.loaded.tell_once(
                "besides",
                "the forward took a path that the plan has not seen: calls of operators that are none of the "
                f"plan's make {excess:,} bytes more than there is room for, and the step may take more than "
                "predicted. Plan the step as it is trained, with inputs that lead along this path",
            )

    # ---- backward -------------------------------------------------------------------------------------

    def unpack(self, packed: _Dropped) -> torch.Tensor:
        """Make a dropped tensor again for the node that asks for it."""
        if packed.handed_out is not None:  # Python code asks more than once, or before the node does
            return packed.handed_out
        slot, save, counts = packed.slot, packed.save, packed.counts()
        if counts is not None:
            check_version(counts, packed.version)
        if slot in self.slots.changed:
            raise InputsChanged(
                f"a result of shape {tuple(packed.geometry[0])} that the plan makes again in the backward "
                "was changed in place on a path that the plan has not seen: change a copy, or plan with "
                "inputs that lead along this path"
            )
        self.backward.before_save(save)
        tensor = view_of(self.backward.value_for_save(slot), packed.geometry)
        if not graph_is_kept():
            packed.handed_out = tensor
        self.backward.after_save(save, slot)
        return self.backward.for_node(save, tensor, slot)


class _Kept:
    """Autograd holds this for a kept tensor if asking for it sets off re-runs or frees slots."""

    __slots__ = ("kept", "save", "step")

    def __init__(self, step: FollowedStep, save: int, tensor: torch.Tensor) -> None:
        self.step, self.save, self.kept = step, save, as_it_is(tensor)


def as_it_is(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A saved tensor that is kept, with its version: without history, as a node that holds its own result
    would hold itself."""
    tensor = without_history(tensor)
    return tensor, tensor._version


def unpack(packed: Any) -> torch.Tensor:
    """The tensor that a node gets for its save."""
    if type(packed) is not tuple and packed.save in packed.step.backward.written:
        raise FreedError(
            "a backward asks again for a tensor over which an earlier one, that an error ended, wrote its "
            "result: call the module again"
        )
    if type(packed) is _Dropped:
        return packed.step.unpack(packed)
    if type(packed) is _Kept:
        packed.step.backward.before_save(packed.save)
        packed.step.backward.after_save(packed.save)
    tensor, version = packed.kept if type(packed) is _Kept else packed
    check_version(tensor, version)
    return packed.step.backward.for_node(packed.save, tensor) if type(packed) is _Kept else tensor


class Following(CountingMode):
    """The dispatch mode that counts the calls of a planned forward, and notes those that run again."""

    def __init__(self, step: FollowedStep) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step = step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in noted_operators and is_noted(func):
            return dispatched_casting(self.__torch_dispatch__, func, types, args, kwargs)
        if types and any(map(is_wrapper, types)):
            return NotImplemented
        step = self.step
        if (in_hooks := step.units.in_hooks) or not is_counted(func):
            if in_hooks and operators.writes(func):
                step.slots.wrote(func, args, kwargs)
            return func(*args, **kwargs) if kwargs else func(*args)
        position, grad = step.position, torch.is_grad_enabled()
        if (
            position < len(step.calls)
            and step.loaded.grad[position] is grad
            and (step.operators[position] is func or step.loaded.is_expected(position, func))
        ):
            step.position = position + 1
        elif not step.skips_ahead(func, grad):
            out = func(*args, **kwargs) if kwargs else func(*args)
            step.unplanned_call(func, args, kwargs, out)
            return out
        call = step.calls[step.position - 1]
        if call is not None:
            return step.slots.run(step.position - 1, call, func, args, kwargs)
        called = FASTER.get(func, func)
        return called(*args, **kwargs) if kwargs else called(*args)


def followed(
    loaded: LoadedProgram, forward: Callable[[], Any], units: Iterable[torch.nn.Module] = ()
) -> tuple[Any, FollowedStep]:
    """Run a forward by a plan; returns its output, and the step that followed the plan.

    Args:
        loaded: The plan's program.
        forward: The forward.
        units: The modules whose hooks gather parameters, see :class:`Units`.
    """
    step = FollowedStep(loaded, Units((module, ROOT) for module in units))
    with torch.autograd.graph.saved_tensors_hooks(step.pack, unpack), Following(step), step.units.watched():
        output = forward()
    step.finished()
    return output, step
