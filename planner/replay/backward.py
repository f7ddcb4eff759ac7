"""The backward of a followed step: what runs again as the plan says, or because a node asks for it."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from planner._torch.autograd import engine_asks, graph_is_kept
from planner._torch.execution.settings import set_as, settings
from planner._torch.execution.written_over import WrittenOver, is_held_alone, operators_run_once
from planner.graph.replay.rng import run_from_state
from planner.graph.replay.rnn_reserve import with_reserve
from planner.replay.calls import is_batch_norm, results_of, without_statistics
from planner.replay.noted import Held, Look, Plain, among, look_at
from planner.replay.program import Call, Run
from planner.replay.slots import Slots
from planner.replay.steps import Steps

OTHER_ORDER = (
    "the backward runs in another order than planned, as for one of several losses: what it reads is made "
    "again as it is asked for, and the step may take more than predicted. Plan the step as it is trained, "
    "with planner.step around the function that computes its losses"
)
HELD = (
    "something holds a result over which the backward writes by the plan, or Python code asks for it, or a "
    "dispatch mode or a batch of gradients runs its operators: what it writes takes memory of its own, and "
    "the step may take more than predicted. Plan the step as it is trained, or hold a copy"
)


class Backward:
    """The backward of a followed step: follows the schedule, and makes what a node asks for beside it.

    Attributes:
        followed: Whether the whole forward was as planned, as far as the plan has to do with it.
        begun: Whether a node has asked for something.
        waiting: By slot, how many saves have not been handed out.
        written: The saves that a node has written over.
    """

    def __init__(self, steps: Steps, slots: Slots) -> None:
        self.followed = self.begun = False
        self.waiting: dict[int, int] = {}
        self.written: set[int] = set()
        self._in_order = True  # the nodes ask in the order of the plan, and the schedule is followed
        self._asked = 0  # how many saves a backward has asked for that frees what it has read
        self._steps, self._calls, self._slots = steps, steps.calls, slots
        self._program, self._makers = steps.program, steps.program.makers
        self._now: tuple[Any, ...] = ()  # the settings under which a node asks

    def before(self, save: int) -> None:
        """Run again what the plan runs again before a save is handed out."""
        self.begun = True
        program = self._program
        if not self._in_order or (save in program.over and save not in program.order):
            return  # of the latter, when they are asked for is of no matter
        keep = graph_is_kept()
        if not keep:
            place = program.order.get(save, -1)
            if place != self._asked and (self.followed or place < self._asked):
                self._in_order = False  # it comes in another order: nothing more is let go of
                if self.followed:
                    self._steps.tell_once("order", OTHER_ORDER)
                return
            for passed in self._steps.in_order[self._asked : place]:  # on another path they are not asked for
                self._run_all(passed, keep)
                self._let_go(program.free.get(passed, ()))
            self._asked = place + 1
        self._run_all(save, keep)

    def handed_out(self, slot: int) -> torch.Tensor:
        """What is in a slot for a save that is handed out."""
        base = self._slots.taken(slot)
        if base is None:
            base = self._made(slot)
        self.waiting[slot] -= 1
        return base

    def after(self, save: int, slot: int = -1) -> None:
        """Let go of what the plan lets go of behind a save."""
        if graph_is_kept():
            return
        if self._in_order:
            self._let_go(self._program.free.get(save, ()))
        elif slot >= 0 and self.waiting[slot] <= 0 and self._slots.can_be_made(slot):
            self._slots.tensors[slot] = None

    def for_node(self, save: int, tensor: torch.Tensor, slot: int = -1) -> torch.Tensor:
        """What a node gets of a save: something to write its result over, where it does by the plan and
        nothing else reads the memory."""
        planned = save in self._program.over and self.followed and self._in_order
        if not planned or graph_is_kept() or torch.is_grad_enabled():
            return tensor
        if not engine_asks():
            self._steps.tell_once("held", HELD)
            return tensor
        once = operators_run_once()

        def may_write() -> bool:  # what the node asks for later may be made of it
            alone = once and self._slots.tensors.get(slot) is None and is_held_alone(tensor, beside=1)
            if not alone:
                self._steps.tell_once("held", HELD)
            else:
                self.written.add(save)
            return alone

        return WrittenOver.of(tensor, may_write)

    def _let_go(self, slots: Iterable[int]) -> None:
        """Let go of slots. On another path more may be made on demand than planned: what the forward left
        there, and no noted call makes, stays."""
        there, bits = self._slots, self._steps.bits
        for slot in slots:
            if self.followed or not (slot in bits or slot in there.kept) or there.can_be_made(slot):
                there.tensors[slot] = None

    # ---- what runs again ------------------------------------------------------------------------------

    def _run_all(self, save: int, keep: bool) -> None:
        if runs := self._program.runs.get(save):
            self._now = settings()
            with Plain():
                for run in runs:
                    self._run(run)
                    if not keep:
                        self._let_go(run.free)
                        for call in run.done if self.followed else ():
                            self._slots.recipes.pop(call, None)

    def _run(self, run: Run) -> None:
        slots = self._slots
        if run.bits >= 0:
            for _, slot in run.store:
                bits = slots.tensors.get(run.bits)
                if bits is not None:
                    slots.put(slot, slots.masks[slot].unpacked(bits))
        elif all(call in slots.recipes for call in run.calls):  # an earlier backward may have let go of it
            made = self._results(run.calls)
            for j, slot in run.store:
                if j < len(made):
                    slots.put(slot, made[j])

    def _results(self, calls: Sequence[int], others: dict[int, torch.Tensor] | None = None) -> list[Any]:
        """The results of a call and of those that write over them."""
        own: dict[int, torch.Tensor] = {} if others is None else others
        for position, slots in self._call(calls[0]).before:
            first = self._out(position, own)
            own = {**own, **{slot: first[j] for j, slot, _ in self._call(position).results if slot in slots}}
            del first
        made = self._out(calls[0], own)
        if len(calls) > 1:
            own = {**own, **{slot: made[j] for j, slot, _ in self._call(calls[0]).results}}
            for position in calls[1:]:
                self._out(position, own)
        return made

    def _out(self, position: int, own: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """What one call returns that runs again."""
        recipe = self._slots.recipe(position)
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
        return list(results_of(out))

    def _call(self, position: int) -> Call:
        call = self._calls[position]
        assert call is not None
        return call

    def _given(self, noted: Any, own: dict[int, torch.Tensor]) -> Any:
        if type(noted) is Look:
            base = own.get(noted.slot)
            if base is None:
                base = self._slots.taken(noted.slot)
            if base is None:
                base = self._made(noted.slot)
            return look_at(base, noted.geometry)
        if type(noted) is Held:
            return noted.there()
        if type(noted) is list:
            return [self._given(one, own) for one in noted]
        return noted

    # ---- what the schedule has not made ---------------------------------------------------------------

    def _made(self, slot: int) -> torch.Tensor:
        """A value that is asked for where the schedule has not made it: whatever that needs is made, too."""
        if (there := self._slots.there(slot)) is not None:
            return there
        order = self._order(slot)
        read_last: dict[int, int] = {slot: len(self._calls)}
        for position, every in order.items():
            for look in (look for c in every for look in self._read_by(c)):
                read_last[look.slot] = max(read_last.get(look.slot, -1), position)
        found: dict[int, torch.Tensor] = {}
        self._now = settings()
        with Plain():
            for position, every in order.items():
                results = self._results(every, found)
                for j, s, _ in self._call(position).results:
                    found[s] = results[j]
                    if self.waiting.get(s, 0) > 0 and not self._in_order:
                        self._slots.put(s, results[j])
                del results
                for s in [s for s in found if read_last.get(s, -1) <= position]:
                    del found[s]
        return found[slot]

    def _read_by(self, position: int) -> Iterator[Look]:
        """The noted values that a call reads, with the calls that run right before it, for it alone."""
        before = dict(self._call(position).before)
        own = {slot for slots in before.values() for slot in slots}
        for call in (*before, position):
            yield from (look for look in among(self._slots.recipe(call), Look) if look.slot not in own)

    def _order(self, slot: int) -> dict[int, list[int]]:
        """The calls that make a value and what that needs, in order, each with those that write over it."""
        needed, pending = {slot}, [slot]
        while pending:
            for position in self._makers[pending.pop()]:
                for look in self._read_by(position):
                    if look.slot not in needed and self._slots.there(look.slot) is None:
                        needed.add(look.slot)
                        pending.append(look.slot)
        return {
            position: sorted({c for _, s, _ in self._call(position).results for c in self._makers.get(s, ())})
            for position in sorted({self._makers[one][0] for one in needed})
        }
