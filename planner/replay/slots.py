"""What a followed step holds of its plan's values, and what it notes of the calls that make them.

Nothing is taken on trust. A tensor counts as the value of a slot only if it lies in the very storage that the
noted call made, and nothing was written to that since but by calls that are noted, too.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from planner._torch import operators
from planner._torch.execution import noise_operators
from planner._torch.execution.bernoulli_draws import FASTER
from planner._torch.execution.settings import settings
from planner._torch.tensors import fills_storage
from planner.errors import FreedError
from planner.replay import masks
from planner.replay.calls import (
    can_run_again,
    draws,
    has_generator,
    is_batch_norm,
    is_factory,
    results_of,
    statistics_of,
    written_operands,
)
from planner.replay.noted import Held, Look, Mask, Recipe, alias, among, changed, state_of_generators
from planner.replay.program import Call
from planner.replay.steps import Steps


class Slots:
    """The values of a plan in one step, by number.

    Attributes:
        tensors: What is in each slot; None where it was let go of.
        kept: Slots in which is what the forward itself made.
        recipes: By position, the calls that can run again.
        masks: By slot, those that are kept as bits.
        changed: Slots that a call has written to which the plan has not seen.
        strayed: Whether something was not the value that the plan has there.
    """

    def __init__(self, steps: Steps) -> None:
        self._masked, self._bits = steps.masks, steps.program.bits
        self._makers = steps.program.makers
        self.tensors: dict[int, torch.Tensor | None] = {}
        self.kept: set[int] = set()
        self.recipes: dict[int, Recipe] = {}
        self.masks: dict[int, Mask] = {}
        self.changed: set[int] = set()
        self.strayed = False
        self._refs: dict[int, Any] = {}  # weak references to storages
        self._versions: dict[int, int] = {}
        self._copied: set[int] = set()  # kept ones of which Python has a tensor that counts by itself

    # ---- forward --------------------------------------------------------------------------------------

    def run(self, position: int, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call of the forward that the plan has something to do with, and note it."""
        state = recipe = None
        writes = operators.writes(func) and not is_batch_norm(func)
        if call.recorded and can_run_again(func) and not (draws(func) and has_generator(args, kwargs)):
            if draws(func):
                state = state_of_generators(args, kwargs)
            operands = iter(call.operands)
            own = (*call.written, *(s for maker, made in call.before if maker in self.recipes for s in made))
            noted = [self._noted(a, operands, own) for a in args]
            named = {k: self._noted(v, operands, own) for k, v in kwargs.items()} if kwargs else kwargs
            if not writes or self._holds_all_written(call, func, args, kwargs):
                recipe = Recipe(func, noted, named, state, settings())
        called = FASTER.get(func, func)
        out = called(*args, **kwargs) if kwargs else called(*args)
        if recipe is not None:
            self.recipes[position] = recipe
        if call.results:
            self._made(call, func, out)
        if call.packs is not None:
            self._pack_bits(*call.packs, func, out, args)
        if call.written:
            self._written(call, func, args, kwargs, recipe)
        return out

    def _made(self, call: Call, func: Any, out: Any) -> None:
        made = (out,) if isinstance(out, torch.Tensor) else tuple(results_of(out))
        for j, slot, kept in call.results:
            if j >= len(made):
                self.strayed = True
                break
            tensor = made[j]
            self._refs[slot] = weakref.ref(tensor.untyped_storage())
            self._versions[slot] = tensor._version
            if kept:
                self.tensors[slot] = alias(tensor)
                self.kept.add(slot)
                if is_factory(func):
                    self._copied.add(slot)

    def _written(self, call: Call, func: Any, args: Any, kwargs: Any, recipe: Recipe | None) -> None:
        for slot, tensor in zip(call.written, written_operands(func, args, kwargs), strict=False):
            if slot < 0 or not self.holds(slot, tensor):
                continue
            self._watch(slot, tensor, writes=True)
            if call.recorded and recipe is None:
                self._refs.pop(slot)  # run again it would lack this
            else:
                self._versions[slot] += 1  # PyTorch counts it when this call has returned

    def _holds_all_written(self, call: Call, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether all that a call writes is in slots: run again it must write to nothing else."""
        written = written_operands(func, args, kwargs)
        return len(written) == len(call.written) and all(
            slot >= 0 and self.holds(slot, tensor) for slot, tensor in zip(call.written, written, strict=True)
        )

    def _pack_bits(self, slot: int, bits: int, func: Any, out: torch.Tensor, args: Any) -> None:
        """Keep a mask as bits that the call which has just run has made, or written for the last time."""
        kept = masks.kept_by(func, out, args)
        if kept is not None and slot in self._masked and self.holds(slot, out) and fills_storage(out):
            self.tensors[bits] = noise_operators.pack(out, kept)
            self.masks[slot] = Mask(out, kept)

    def holds(self, slot: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a slot's storage, as the noted calls left it."""
        ref = self._refs.get(slot)
        return (
            ref is not None and ref() is tensor.untyped_storage() and tensor._version == self._versions[slot]
        )

    def can_be_made(self, slot: int) -> bool:
        """Whether what a slot holds is there as bits, or all calls that make it were noted."""
        if slot in self.masks:
            return True
        makers = self._makers.get(slot, (-1,))
        return all(maker in self.recipes for maker in makers)

    def _watch(self, slot: int, tensor: torch.Tensor, *, writes: bool = False) -> None:
        """Hold a kept slot by a tensor that Python has, whose count of writes tells of them; by the one that
        is written, as what ``_unsafe_view`` returns counts by itself."""
        if slot in self._copied or (writes and slot in self.kept):
            self._copied.discard(slot)
            self.tensors[slot] = alias(tensor)

    def _noted(self, argument: Any, operands: Iterator[int], own: Sequence[int]) -> Any:
        """An argument of a call that runs again; ``own`` are the slots that the call itself writes, or that
        are made for it alone."""
        if isinstance(argument, torch.Tensor):
            slot = next(operands, -1)
            there = slot >= 0 and self.holds(slot, argument)
            if there and (slot in own or slot in self.kept or self.can_be_made(slot)):
                self._watch(slot, argument)
                return Look(slot, argument)
            if slot >= 0:
                self.strayed = True
            return Held(argument)
        if isinstance(argument, list | tuple):
            return [self._noted(a, operands, own) for a in argument]
        return argument

    def wrote(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note a write of a call that the plan has not seen: what was saved before lacks it."""
        for tensor in written_operands(func, args, kwargs):
            storage = tensor.untyped_storage()
            self.changed.update(slot for slot, ref in self._refs.items() if ref() is storage)
        for tensor in statistics_of(func, args):  # PyTorch does not count these
            storage = tensor.untyped_storage()
            for recipe in self.recipes.values():
                for held in () if is_batch_norm(recipe.func) else among(recipe, Held):
                    if held.tensor.untyped_storage() is storage:
                        held.version = -1

    # ---- backward -------------------------------------------------------------------------------------

    def put(self, slot: int, made: torch.Tensor) -> None:
        """Put what was made again into a slot."""
        self.tensors[slot] = made
        self.kept.discard(slot)

    def taken(self, slot: int) -> torch.Tensor | None:
        """What is in a slot; of what the forward put there, as it was by then.

        Raises:
            InputsChanged: It was changed in place since.
        """
        base = self.tensors.get(slot)
        if base is not None and slot in self.kept and base._version != self._versions[slot]:
            raise changed(base)
        return base

    def there(self, slot: int) -> torch.Tensor | None:
        """What is in a slot, also where it is there as bits."""
        base = self.taken(slot)
        if base is None and slot in self.masks:
            bits = self.tensors.get(self._bits[slot])
            return None if bits is None else self.masks[slot].unpacked(bits)
        return base

    def recipe(self, position: int) -> Recipe:
        """The noted call of a position.

        Raises:
            FreedError: A backward has let go of it.
        """
        recipe = self.recipes.get(position)
        if recipe is None:
            raise FreedError(
                "a backward asks again for what it was handed before: call backward(retain_graph=True) "
                "before, or call the module again"
            )
        return recipe
