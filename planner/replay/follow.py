"""A planned step at work: the forward as it was written; what it drops is made again when autograd asks.

The forward runs under a dispatch mode that counts the calls of operators. Where the plan runs a call again,
its arguments are noted. What the plan drops is dropped when autograd saves it. The backward is autograd's
own: when a node asks for what was dropped, the calls that the plan names there run again.

Nothing is taken on trust. A tensor counts as the value that the plan expects only if it lies in the very
storage that the noted call made, and nothing was written to that since but by calls that are noted, too. All
else is kept, as without a plan.
"""

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from planner._torch import operators
from planner._torch.autograd import CountingMode, graph_is_kept
from planner._torch.execution.settings import set_as, settings
from planner._torch.tensors import is_wrapper, without_history
from planner.errors import FreedError, InputsChanged, warn
from planner.graph.replay.rng import run_from_state
from planner.graph.replay.rnn_reserve import with_reserve
from planner.replay import masks
from planner.replay.besides import Besides
from planner.replay.calls import (
    COUNTED,
    can_run_again,
    is_batch_norm,
    is_counted,
    is_factory,
    operands_of,
    results_of,
    statistics_of,
    users_line,
    without_statistics,
    written_operands,
)
from planner.replay.noted import (
    Held,
    Look,
    Mask,
    Plain,
    Recipe,
    alias,
    among,
    changed,
    geometry_of,
    look_at,
    state_of_generators,
)
from planner.replay.program import Call, Program, Run
from planner.replay.units import ROOT, Units
from planner.training_step.user_lines import short_line


class Steps:
    """The program of a plan, with the operators of this process in the place of their names."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.calls, self.saves = program.calls, program.saves
        self._told: set[str] = set()
        self.grad, self.saved_bytes = program.grad, program.saved_bytes
        self.names, self.begun = program.operators, program.begun
        self.operators: list[Any] = [None] * len(program.operators)  # as they are first met
        self.asks = frozenset(program.runs) | frozenset(program.free)
        self.bits = frozenset(program.bits.values())
        self.in_order = sorted(program.order, key=lambda save: program.order[save])
        self.masks = {
            slot
            for slot in program.bits
            if masks.is_noise([program.operators[p] for p in program.makers.get(slot, ())])
            or len(program.makers.get(slot, ())) == 1
        }

    def out_of_order(self) -> None:
        """A backward asks for what was saved in another order than planned; say so, once."""
        self.tell_once(
            "order",
            "the backward runs in another order than planned, as for one of several losses: what it reads is "
            "made again as it is asked for, and the step may take more than predicted. Plan the step as it "
            "is trained, with planner.step around the function that computes its losses",
        )

    def tell_of_larger(self, size: int, planned: int) -> None:
        """Say, once, that data or something else sets sizes."""
        self.tell_once(
            "larger",
            f"a tensor that autograd saves takes {size:,} bytes instead of {planned:,}, although the inputs "
            "have the planned shapes: data or something else in the model set sizes, and the step may take "
            "more than predicted. Plan it where it takes most, or for a lower budget",
        )

    def tell_once(self, of: str, text: str) -> None:
        """Warn, once of each."""
        if of not in self._told:
            self._told.add(of)
            warn(text)

    def is_expected(self, position: int, func: Any) -> bool:
        """Whether an operator is the one of a position."""
        if str(func) != self.names[position]:
            return False
        self.operators[position] = func
        return True


class _Packed:
    """What autograd holds in the place of a tensor that it saved and the plan drops."""

    __slots__ = ("__weakref__", "geometry", "handed_out", "save", "slot", "step")

    def __init__(self, step: "FollowedStep", save: int, slot: int, tensor: torch.Tensor) -> None:
        self.step, self.save, self.slot = step, save, slot
        self.handed_out: torch.Tensor | None = None  # until autograd lets go, as of what is kept
        self.geometry = geometry_of(tensor)


class FollowedStep:
    """One forward of a planned module and its backward.

    Attributes:
        followed: Whether all calls came that the plan has something to do with, each with what the plan has
            there. Otherwise the schedule is followed as far as that can be; what it lacks is made on demand.
    """

    def __init__(self, steps: Steps, units: Units) -> None:
        self.steps, self.units = steps, units
        self.calls, self.operators, self.saves = steps.calls, steps.operators, steps.saves
        self.position = self.save = 0
        self.strayed = False  # something was not the value that the plan has there
        self.skipped = 0  # calls of the plan that did not come
        self.missed = False  # the plan has something to do with one of them
        self.besides: Besides | None = None  # what calls take that the plan has not seen
        self.larger: tuple[int, int] | None = None  # bytes of a saved tensor, and those that were planned
        self._unmatched: list[tuple[str, bool, str | None]] = []  # the operators that came in their place
        self.followed = False  # the whole forward was as planned, as far as the plan has to do with it
        self.in_order = True  # the backward asks in the order of the plan, and follows the schedule
        self.asked = 0  # how many saves a backward has asked for that frees what it has read
        self.refs: dict[int, Any] = {}  # by slot, a weak reference to its storage
        self.versions: dict[int, int] = {}
        self.slots: dict[int, torch.Tensor | None] = {}
        self.kept: set[int] = set()  # slots in which is what the forward itself made
        self.copied: set[int] = set()  # those of them of which Python has a tensor that counts by itself
        self.recipes: dict[int, Recipe] = {}
        self.masks: dict[int, Mask] = {}  # by slot: those that are kept as bits
        self.waiting: dict[int, int] = {}  # by slot: how many saves have not been handed out
        self.changed: set[int] = set()  # slots that a call has written to which the plan has not seen
        self.begun = False  # a backward asked for something
        self._now: tuple[Any, ...] = ()  # the settings under which it asks

    # ---- forward --------------------------------------------------------------------------------------

    def run(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call of the forward that the plan has something to do with."""
        position = self.position - 1
        state = recipe = None
        writes = operators.writes(func) and not is_batch_norm(func)
        if call.recorded and can_run_again(func):
            if operators.may_draw(func):
                state = state_of_generators(args, kwargs)
            operands = iter(call.operands)
            own = call.written
            noted = [self._noted(a, operands, own) for a in args]
            named = {k: self._noted(v, operands, own) for k, v in kwargs.items()} if kwargs else kwargs
            if not writes or self._writes_slots(call, func, args, kwargs):
                recipe = Recipe(func, noted, named, state, settings())
        out = func(*args, **kwargs) if kwargs else func(*args)
        if recipe is not None:
            self.recipes[position] = recipe
        if call.results and not writes:
            made = (out,) if isinstance(out, torch.Tensor) else tuple(results_of(out))
            for j, slot, kept in call.results:
                if j >= len(made):
                    self.strayed = True
                    break
                tensor = made[j]
                self.refs[slot] = weakref.ref(tensor.untyped_storage())
                self.versions[slot] = tensor._version
                if kept:
                    self.slots[slot] = alias(tensor)
                    self.kept.add(slot)
                    if is_factory(func):
                        self.copied.add(slot)
        if call.packs is not None:
            self._pack_bits(*call.packs, func, out, args)
        if call.written:
            for slot, tensor in zip(call.written, written_operands(func, args, kwargs), strict=False):
                if slot < 0 or not self._is(slot, tensor):
                    continue
                self._watch(slot, tensor, writes=True)
                if call.recorded and recipe is None:
                    self.refs.pop(slot)  # run again it would lack this
                else:
                    self.versions[slot] += 1  # PyTorch counts it when this call has returned
        return out

    def _writes_slots(self, call: Call, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether all that a call writes is in slots: run again it must write to nothing else."""
        written = written_operands(func, args, kwargs)
        return len(written) == len(call.written) and all(
            slot >= 0 and self._is(slot, tensor) for slot, tensor in zip(call.written, written, strict=True)
        )

    def _pack_bits(self, slot: int, bits: int, func: Any, out: torch.Tensor, args: Any) -> None:
        """Keep a mask as bits that the call which has just run has made, or written for the last time."""
        kept = masks.kept_by(func, out, args)
        if kept is not None and slot in self.steps.masks and self._is(slot, out) and masks.fills_storage(out):
            self.slots[bits] = masks.pack(out, kept)
            self.masks[slot] = Mask(out, kept)

    def _is(self, slot: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a slot's storage, as the noted calls left it."""
        ref = self.refs.get(slot)
        return (
            ref is not None and ref() is tensor.untyped_storage() and tensor._version == self.versions[slot]
        )

    def _watch(self, slot: int, tensor: torch.Tensor, *, writes: bool = False) -> None:
        """Hold a kept slot by a tensor that Python has, whose count of writes tells of them; by the one that
        is written, as what ``_unsafe_view`` returns counts by itself."""
        if slot in self.copied or (writes and slot in self.kept):
            self.copied.discard(slot)
            self.slots[slot] = alias(tensor)

    def _noted(self, argument: Any, operands: Iterator[int], own: Sequence[int]) -> Any:
        """An argument of a call that runs again; ``own`` are the slots that the call itself writes."""
        if isinstance(argument, torch.Tensor):
            slot = next(operands, -1)
            there = slot >= 0 and self._is(slot, argument)
            if there and (slot in own or slot in self.kept or self._can_be_made(slot)):
                self._watch(slot, argument)
                return Look(slot, argument)
            if slot >= 0:
                self.strayed = True
            return Held(argument)
        if isinstance(argument, list | tuple):
            return [self._noted(a, operands, own) for a in argument]
        return argument

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd holds of a tensor that it saves."""
        save, begun = self.save, self.steps.begun
        if self.units.in_hooks:  # what these save is not counted
            tensor = without_history(tensor)
            return tensor, tensor._version
        if save >= len(begun) or begun[save] != self.position:
            self.strayed = True
            save = bisect_left(begun, self.position)
            if save >= len(begun) or begun[save] != self.position:
                tensor = without_history(tensor)
                return tensor, tensor._version  # the plan has no save here
        self.save = save + 1
        slot = self.saves[save]
        planned = self.steps.saved_bytes[save]
        if planned and tensor.untyped_storage().nbytes() > planned:
            self.larger = tensor.untyped_storage().nbytes(), planned
        if slot < 0:
            tensor = without_history(tensor)  # the node of a result would hold itself
            if save in self.steps.asks:
                return _Kept(self, save, tensor)
            return tensor, tensor._version
        if not (self._is(slot, tensor) and self._can_be_made(slot)):
            self.strayed = True
            tensor = without_history(tensor)
            return tensor, tensor._version
        self.waiting[slot] = self.waiting.get(slot, 0) + 1
        return _Packed(self, save, slot, tensor)

    def _can_be_made(self, slot: int) -> bool:
        if slot in self.masks:
            return True
        makers = self.steps.program.makers.get(slot, (-1,))
        return all(maker in self.recipes for maker in makers)

    def wrote(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note a write of a call that the plan has not seen: what was saved before lacks it."""
        for tensor in written_operands(func, args, kwargs):
            storage = tensor.untyped_storage()
            self.changed.update(slot for slot, ref in self.refs.items() if ref() is storage)
        for tensor in statistics_of(func, args):  # PyTorch does not count these
            storage = tensor.untyped_storage()
            for recipe in self.recipes.values():
                for held in () if is_batch_norm(recipe.func) else among(recipe, Held):
                    if held.tensor.untyped_storage() is storage:
                        held.version = -1

    def found_again(self, func: Any, grad: bool) -> bool:
        """Whether a call that is not the one of its position is one of a later position.

        It is where the call and the one right before it follow each other there, from the same lines of the
        user's, or that and two before it where these are not known; and where it is the first with gradients,
        as of a forward that recycles its results fewer times. Positions only grow: what an earlier one stands
        for may still be asked for.
        """
        line = short_line(users_line(followed.__code__))
        self._unmatched = [*self._unmatched[-2:], (str(func), grad, line)]
        recent, end = self._unmatched, len(self.steps.names)
        if grad and self.position < end and not self.steps.grad[self.position]:
            first = next((p for p in range(self.position, end) if self.steps.grad[p]), end)
            if first < end and self._is_like(first, recent[-1]):
                return self._go_on_at(first)
        if len(recent) < (3 if line is None else 2):
            return False  # few calls more, as a check of data that a step without data leaves out
        for position in range(self.position + len(recent) - 1, end):
            if all(self._is_like(position - i, call) for i, call in enumerate(reversed(recent))):
                return self._go_on_at(position)
        return False

    def _is_like(self, position: int, call: tuple[str, bool, str | None]) -> bool:
        name, grad, line = call
        program = self.steps.program
        there = program.lines[position]
        return (
            name == program.operators[position]
            and grad is program.grad[position]
            and (not there or line is None or there == line)
        )

    def _go_on_at(self, position: int) -> bool:
        self.skipped += position - self.position
        self.missed = self.missed or any(self.calls[p] is not None for p in range(self.position, position))
        self.position = position + 1
        self._unmatched = []
        return True

    def came_besides(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """A call came that is none of the plan's."""
        if operators.writes(func) or is_batch_norm(func):
            self.wrote(func, args, kwargs)
        if self.besides is None:
            there = weakref.ref(self)
            self.besides = Besides(
                self.steps.program.room, lambda: 0 if (step := there()) is None else step.position
            )
        self.besides.made(operands_of(args, kwargs), results_of(out))

    @property
    def strayed_from(self) -> str:
        """What was not as planned, in words."""
        came, planned = self.position - self.skipped, len(self.calls)
        if came < planned:
            return (
                f"the forward took a path that the plan has not seen: of the plan's {planned} calls of "
                f"operators {came} ran"
            )
        return (
            f"the forward ran all of the plan's {planned} calls of operators, but not all that they were "
            "given, or that autograd saved of them, is what the plan has there, as where an input or a "
            "weight requires a gradient and did not when the plan was made"
        )

    def finished(self) -> None:
        """The forward is over."""
        if self.besides is not None:
            self.besides.finished()
        if self.position < len(self.calls):
            self.missed = self.missed or any(call is not None for call in self.calls[self.position :])
            self.skipped += len(self.calls) - self.position
            self.position = len(self.calls)
        self.followed = not self.missed and not self.strayed and self.save == len(self.saves)

    def tell_of_more(self) -> None:
        """Say what takes more than planned in a forward that was followed, at the planned shapes."""
        if self.larger is not None:
            self.steps.tell_of_larger(*self.larger)
        if self.besides is not None and self.besides.over:
            self.steps.tell_once(
                "besides",
                "the forward took a path that the plan has not seen: calls of operators that are none of the "
                f"plan's make {self.besides.over:,} bytes more than there is room for, and the step may take "
                "more than predicted. Plan the step as it is trained, with inputs that lead along this path",
            )

    # ---- backward -------------------------------------------------------------------------------------

    def unpack(self, packed: _Packed) -> torch.Tensor:
        """What a node gets that asks for what was dropped."""
        slot, save = packed.slot, packed.save
        if slot in self.changed:
            raise InputsChanged(
                f"a result of shape {tuple(packed.geometry[0])} that the plan makes again in the backward "
                "was changed in place on a path that the plan has not seen: change a copy, or plan with "
                "inputs that lead along this path"
            )
        self.before(save)
        base = self._in_slot(slot)
        if base is None:
            base = self._made_again(slot)
        tensor = look_at(base, packed.geometry)
        if not graph_is_kept():
            packed.handed_out = tensor
        self.waiting[slot] -= 1
        self.after(save, slot)
        return tensor

    def before(self, save: int) -> None:
        """Run again what the plan runs again before a save is handed out."""
        self.begun = True
        if not self.in_order:
            return
        keep = graph_is_kept()
        if not keep:
            place = self.steps.program.order.get(save, -1)
            if place != self.asked and (self.followed or place < self.asked):
                self.in_order = False  # it comes in another order: nothing more is let go of
                if self.followed:
                    self.steps.out_of_order()
                return
            for passed in self.steps.in_order[self.asked : place]:  # on another path these are not asked for
                self._run_all(passed, keep)
                self._let_go(self.steps.program.free.get(passed, ()))
            self.asked = place + 1
        self._run_all(save, keep)

    def _run_all(self, save: int, keep: bool) -> None:
        if runs := self.steps.program.runs.get(save):
            self._now = settings()
            with Plain():
                for run in runs:
                    self._run_again(run, keep)

    def _let_go(self, slots: Iterable[int]) -> None:
        """Let go of slots. On another path more may be made on demand than planned: what the forward left
        there, and no noted call makes, stays."""
        for slot in slots:
            if self.followed or not (slot in self.steps.bits or slot in self.kept) or self._can_be_made(slot):
                self.slots[slot] = None

    def after(self, save: int, slot: int = -1) -> None:
        """Let go of what the plan lets go of behind a save."""
        if graph_is_kept():
            return
        if self.in_order:
            self._let_go(self.steps.program.free.get(save, ()))
        elif slot >= 0 and self.waiting[slot] <= 0 and self._can_be_made(slot):
            self.slots[slot] = None

    def _run_again(self, run: Run, keep: bool) -> None:
        if run.bits >= 0:
            for _, slot in run.store:
                bits = self.slots.get(run.bits)
                if bits is not None:
                    self.slots[slot] = self.masks[slot].unpacked(bits)
                    self.kept.discard(slot)
        elif all(
            call in self.recipes for call in run.calls
        ):  # a backward before this one may have let go of it
            made = self._results(run.calls)
            for j, slot in run.store:
                if j < len(made):
                    self.slots[slot] = made[j]
                    self.kept.discard(slot)
            del made
        if not keep:
            self._let_go(run.free)
            if run.last and self.followed:
                for call in run.calls:
                    self.recipes.pop(call, None)

    def _results(self, calls: Sequence[int], others: dict[int, torch.Tensor] | None = None) -> list[Any]:
        """The results of a call and of those that write over them."""
        made: list[Any] = []
        own: dict[int, torch.Tensor] = {} if others is None else others
        for number, position in enumerate(calls):
            recipe = self._recipe(position)
            args = [self._given(a, own) for a in recipe.args]
            kwargs = {k: self._given(v, own) for k, v in recipe.kwargs.items()} if recipe.kwargs else {}
            func = recipe.func
            if is_batch_norm(func):
                args = list(without_statistics(tuple(args)))
            if func is torch.ops.aten.mkldnn_rnn_layer.default:
                func = partial(with_reserve, func)
            elif recipe.state is not None:
                func = partial(run_from_state, *recipe.state, func)
            if recipe.settings == self._now:
                out = func(*args, **kwargs)
            else:
                with set_as(recipe.settings):
                    out = func(*args, **kwargs)
            if number == 0:
                made = [out] if isinstance(out, torch.Tensor) else list(results_of(out))
                if len(calls) > 1:
                    call = self.calls[position]
                    assert call is not None
                    own = {**own, **{slot: made[j] for j, slot, _ in call.results}}
        return made

    def _given(self, noted: Any, own: dict[int, torch.Tensor]) -> Any:
        if type(noted) is Look:
            base = own.get(noted.slot)
            if base is None:
                base = self._in_slot(noted.slot)
            if base is None:
                base = self._made_again(noted.slot)
            return look_at(base, noted.geometry)
        if type(noted) is Held:
            return noted.there()
        if type(noted) is list:
            return [self._given(one, own) for one in noted]
        return noted

    def _made_again(self, slot: int) -> torch.Tensor:
        """A value that is asked for where the schedule has not made it: whatever that needs is made, too."""
        if (there := self._there(slot)) is not None:
            return there
        makers = self.steps.program.makers
        needed, pending = {slot}, [slot]
        while pending:
            for position in makers[pending.pop()]:
                for look in among(self._recipe(position), Look):
                    if look.slot not in needed and self._there(look.slot) is None:
                        needed.add(look.slot)
                        pending.append(look.slot)
        found: dict[int, torch.Tensor] = {}
        runs: dict[
            int, tuple[Call, list[int]]
        ] = {}  # by position, with the calls that write over the results
        read_last: dict[int, int] = {slot: len(self.calls)}
        for position in sorted({makers[one][0] for one in needed}):
            first = self.calls[position]
            assert first is not None
            every = sorted({c for _, s, _ in first.results for c in makers.get(s, ())})
            runs[position] = first, every
            for look in (look for c in every for look in among(self._recipe(c), Look)):
                read_last[look.slot] = max(read_last.get(look.slot, -1), position)
        self._now = settings()
        with Plain():
            for position, (first, every) in runs.items():
                for (_, s, _), made in zip(first.results, self._picked(every, found, first), strict=True):
                    found[s] = made
                    if self.waiting.get(s, 0) > 0 and not self.in_order:
                        self.slots[s] = made
                        self.kept.discard(s)
                for s in [s for s in found if read_last.get(s, -1) <= position]:
                    del found[s]
                del made
        return found[slot]

    def _recipe(self, position: int) -> "Recipe":
        recipe = self.recipes.get(position)
        if recipe is None:
            raise FreedError(
                "a backward asks again for what it was handed before: call backward(retain_graph=True) "
                "before, or call the module again"
            )
        return recipe

    def _picked(
        self, calls: Sequence[int], found: dict[int, torch.Tensor], first: Call
    ) -> list[torch.Tensor]:
        made = self._results(calls, found)
        return [made[j] for j, _, _ in first.results]

    def _in_slot(self, slot: int) -> torch.Tensor | None:
        """What is in a slot; of what the forward put there, as it was by then.

        Raises:
            InputsChanged: It was changed in place since.
        """
        base = self.slots.get(slot)
        if base is not None and slot in self.kept and base._version != self.versions[slot]:
            raise changed(base)
        return base

    def _there(self, slot: int) -> torch.Tensor | None:
        base = self._in_slot(slot)
        if base is not None:
            return base
        if slot in self.masks and (bits := self.slots.get(self.steps.program.bits[slot])) is not None:
            return self.masks[slot].unpacked(bits)
        return None


class _Kept:
    """A tensor that the plan keeps and behind whose being asked for it has something to do."""

    __slots__ = ("save", "step", "tensor", "version")

    def __init__(self, step: FollowedStep, save: int, tensor: torch.Tensor) -> None:
        self.step, self.save, self.tensor, self.version = step, save, tensor, tensor._version


def unpack(packed: Any) -> torch.Tensor:
    """What a node gets that asks for a tensor that it saved."""
    if type(packed) is _Packed:
        return packed.step.unpack(packed)
    if type(packed) is _Kept:
        packed.step.before(packed.save)
        packed.step.after(packed.save)
        tensor, version = packed.tensor, packed.version
    else:
        tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version "
            f"{version} instead"
        )
    return tensor


class Following(CountingMode):
    """Counts the calls of a planned forward, and notes those that run again."""

    def __init__(self, step: FollowedStep) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step = step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(is_wrapper, types)):
            return NotImplemented
        counted = COUNTED.get(func)
        if counted is None:
            counted = is_counted(func)
        if not counted:
            return func(*args, **kwargs) if kwargs else func(*args)
        step = self.step
        if step.units.in_hooks:
            if operators.writes(func):
                step.wrote(func, args, kwargs)
            return func(*args, **kwargs) if kwargs else func(*args)
        position, grad = step.position, torch.is_grad_enabled()
        if (
            position < len(step.calls)
            and step.steps.grad[position] is grad
            and (step.operators[position] is func or step.steps.is_expected(position, func))
        ):
            step.position = position + 1
        elif not step.found_again(func, grad):
            out = func(*args, **kwargs) if kwargs else func(*args)
            step.came_besides(func, args, kwargs, out)
            return out
        call = step.calls[step.position - 1]
        if call is not None:
            return step.run(call, func, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)


def followed(
    steps: Steps, forward: Callable[[], Any], units: Iterable[torch.nn.Module] = ()
) -> tuple[Any, FollowedStep]:
    """Run a forward by a plan; returns its output, and what followed it.

    Args:
        steps: The plan's.
        forward: The forward.
        units: The modules whose hooks gather parameters, see :class:`Units`.
    """
    step = FollowedStep(steps, Units((module, ROOT) for module in units))
    with (
        torch.autograd.graph.saved_tensors_hooks(step.pack, unpack),
        Following(step),
        step.units.watched(),
    ):
        output = forward()
    step.finished()
    return output, step
