"""The plan's values in one step, and the notes of the calls that make them.

Nothing is taken on trust. A tensor counts as the value of a slot only if it lies in the very storage that the
noted call made, and only noted calls have written to that since.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from planner._torch import operators
from planner._torch.cuda.streams import MadeOn
from planner._torch.execution import noise_operators
from planner._torch.execution.bernoulli_draws import FASTER
from planner._torch.execution.settings import settings
from planner._torch.tensors import alias_inside, fills_storage
from planner._torch.versions import version_of
from planner.errors import FreedError
from planner.graph.replay.rng import state_before
from planner.replay import masks
from planner.replay.calls import (
    can_run_again,
    draws,
    is_batch_norm,
    is_factory,
    results_of,
    statistics_of,
    why_not_noted,
    written_operands,
)
from planner.replay.loaded_program import LoadedProgram
from planner.replay.noted import Held, InSlot, Recipe, arguments_of, changed_error
from planner.replay.program import PlannedCall


class Slots:
    """The values of a plan in one step, by number.

    Attributes:
        tensors: By slot, its tensor; None where that was freed.
        kept: Slots that hold what the forward itself made.
        recipes: By position, the noted calls.
        unpack: By the slot of a mask that is kept as bits, makes the mask of its bits.
        changed: Slots that an unplanned call has written to.
        strayed: Whether a tensor was not the value that the plan has at its place.
    """

    def __init__(self, loaded: LoadedProgram) -> None:
        self._masked, self._bits = loaded.masks, loaded.program.bits
        self._makers = loaded.program.makers
        self.tensors: dict[int, torch.Tensor | None] = {}
        self.kept: set[int] = set()
        self.recipes: dict[int, Recipe] = {}
        self.unpack: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        self.changed: set[int] = set()
        self.strayed = False
        self._made_on = MadeOn()
        self._refs: dict[int, Any] = {}  # weak references to the storages
        self._versions: dict[int, int | None] = {}
        self._counted_elsewhere: set[int] = set()  # kept: Python's tensor has another version counter

    # ---- forward --------------------------------------------------------------------------------------

    def run(self, position: int, call: PlannedCall, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a planned call of the forward: note it, keep its results, or pack its mask, as planned."""
        state = recipe = None
        writes = operators.writes(func) and not is_batch_norm(func)
        if call.noted and can_run_again(func) and why_not_noted(func, args, kwargs) is None:
            if draws(func):
                state = state_before(func, args, kwargs)
            operands = iter(call.operands)
            own = (*call.written, *(s for maker, made in call.before if maker in self.recipes for s in made))
            noted = [self._noted(a, operands, own) for a in args]
            named = {k: self._noted(v, operands, own) for k, v in kwargs.items()} if kwargs else kwargs
            made = Recipe(func, noted, named, state, settings())
            # What is made for it alone is written over later: held itself, it could not be read again.
            read = {view.slot for view in arguments_of(made, InSlot)} if call.before else set[int]()
            there = all(maker in self.recipes and read.issuperset(alone) for maker, alone in call.before)
            if there and (not writes or self._holds_all_written(call, func, args, kwargs)):
                recipe = made
        called = FASTER.get(func, func)
        out = called(*args, **kwargs) if kwargs else called(*args)
        if recipe is not None:
            self.recipes[position] = recipe
        if call.results:
            self._note_results(call, func, out)
        if call.packs is not None:
            self._pack_bits(*call.packs, func, out, args)
        if call.written:
            self._written(call, func, args, kwargs, recipe)
        return out

    def _note_results(self, call: PlannedCall, func: Any, out: Any) -> None:
        made = (out,) if isinstance(out, torch.Tensor) else tuple(results_of(out))
        for j, slot, kept in call.results:
            if j >= len(made):
                self.strayed = True
                break
            tensor = made[j]
            self._refs[slot] = weakref.ref(tensor.untyped_storage())
            self._versions[slot] = version_of(tensor)
            if kept:
                self.tensors[slot] = alias_inside(tensor)
                self.kept.add(slot)
                self._made_on.note(slot, tensor)
                if is_factory(func):
                    self._counted_elsewhere.add(slot)

    def _written(self, call: PlannedCall, func: Any, args: Any, kwargs: Any, recipe: Recipe | None) -> None:
        for slot, tensor in zip(call.written, written_operands(func, args, kwargs), strict=False):
            if slot < 0 or not self.holds(slot, tensor):
                continue
            self._watch(slot, tensor, writes=True)
            if call.noted and recipe is None:
                self._refs.pop(slot)  # a re-run would lack this write: the slot matches nothing any more
            elif (version := self._versions[slot]) is not None:
                self._versions[slot] = version + 1  # PyTorch counts it when this call has returned

    def _holds_all_written(self, call: PlannedCall, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call writes to slots alone: a re-run must write to nothing else."""
        written = written_operands(func, args, kwargs)
        return len(written) == len(call.written) and all(
            slot >= 0 and self.holds(slot, tensor) for slot, tensor in zip(call.written, written, strict=True)
        )

    def _pack_bits(self, slot: int, bits: int, func: Any, out: torch.Tensor, args: Any) -> None:
        """Keep as bits the mask that a call has just made, or written for the last time."""
        nonzero = masks.nonzero_value(func, out, args)
        if nonzero is not None and slot in self._masked and self.holds(slot, out) and fills_storage(out):
            self.tensors[bits] = noise_operators.pack(out, nonzero)
            self._made_on.note(bits, out)
            self.unpack[slot] = partial(
                noise_operators.unpack, count=out.numel(), dtype=out.dtype, nonzero=nonzero
            )

    def holds(self, slot: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a slot's storage, as the noted calls left it."""
        ref, version = self._refs.get(slot), version_of(tensor)
        return ref is not None and ref() is tensor.untyped_storage() and version == self._versions[slot]

    def can_be_made(self, slot: int) -> bool:
        """Whether a slot's value can be made again: of its bits, or by calls that were all noted."""
        if slot in self.unpack and self.tensors.get(self._bits[slot]) is not None:
            return True
        return all(maker in self.recipes for maker in self._makers.get(slot, (-1,)))

    def _watch(self, slot: int, tensor: torch.Tensor, *, writes: bool = False) -> None:
        """Hold a kept slot by the tensor whose version counter counts the user's writes: Python's tensor of a
        factory's result, or the one that is written (a result of ``_unsafe_view`` has its own counter)."""
        if slot in self._counted_elsewhere or (writes and slot in self.kept):
            self._counted_elsewhere.discard(slot)
            self.tensors[slot] = alias_inside(tensor)

    def _noted(self, argument: Any, operands: Iterator[int], own: Sequence[int]) -> Any:
        """Note an argument of a call. ``own`` are the slots that the call itself writes, or that are made for
        it alone."""
        if isinstance(argument, torch.Tensor):
            slot = next(operands, -1)
            in_slot = slot >= 0 and self.holds(slot, argument)
            if in_slot and (slot in own or slot in self.kept or self.can_be_made(slot)):
                self._watch(slot, argument)
                return InSlot(slot, argument)
            if slot >= 0:
                self.strayed = True
            return Held(argument)
        if isinstance(argument, list | tuple):
            return [self._noted(a, operands, own) for a in argument]
        return argument

    def wrote(self, func: Any, args: Any, kwargs: Any) -> None:
        """Notice the writes of an unplanned call: re-runs would lack them."""
        for tensor in written_operands(func, args, kwargs):
            storage = tensor.untyped_storage()
            self.changed.update(slot for slot, ref in self._refs.items() if ref() is storage)
        for tensor in statistics_of(func, args):  # PyTorch does not count these
            storage = tensor.untyped_storage()
            for noted in self.recipes.values():
                for held in () if is_batch_norm(noted.func) and noted.args[5] else arguments_of(noted, Held):
                    if held.tensor.untyped_storage() is storage:
                        held.version = -1  # reading it again is an error

    # ---- backward -------------------------------------------------------------------------------------

    def put(self, slot: int, made: torch.Tensor) -> None:
        """Fill a slot with a tensor that was made again."""
        self.tensors[slot] = made
        self._made_on.note(slot, made)
        self.kept.discard(slot)

    def checked(self, slot: int) -> torch.Tensor | None:
        """The tensor of a slot, if there is one.

        Raises:
            InputsChanged: The forward made it, and it was changed in place since.
        """
        base = self.tensors.get(slot)
        if base is not None and slot in self.kept and version_of(base) != self._versions[slot]:
            raise changed_error(base)
        self._made_on.wait(slot, base)
        return base

    def checked_or_unpacked(self, slot: int) -> torch.Tensor | None:
        """The tensor of a slot, unpacked where only its bits are there."""
        base = self.checked(slot)
        if base is None and slot in self.unpack:
            bits = self.tensors.get(self._bits[slot])
            self._made_on.wait(self._bits[slot], bits)
            return None if bits is None else self.unpack[slot](bits)
        return base

    def recipe(self, position: int) -> Recipe:
        """The noted call of a position.

        Raises:
            FreedError: An earlier backward has freed it.
        """
        recipe = self.recipes.get(position)
        if recipe is None:
            raise FreedError(
                "a backward asks again for what it was handed before: call backward(retain_graph=True) "
                "before, or call the module again"
            )
        return recipe
