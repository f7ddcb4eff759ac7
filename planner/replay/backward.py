"""The backward of a followed step: re-runs by the schedule, and on demand where a node asks otherwise."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from planner._torch.autocast_state import below_autograd
from planner._torch.autograd import backward_keeps_graph, engine_asks, graph_is_kept
from planner._torch.execution.settings import set_as, settings
from planner._torch.execution.written_over import WrittenOver, is_held_alone, operators_run_once
from planner.compiled.calls import KEPT
from planner.graph.replay.rng import run_from_state
from planner.graph.replay.rnn_reserve import with_reserve
from planner.replay.calls import is_batch_norm, results_of, without_statistics
from planner.replay.loaded_program import LoadedProgram
from planner.replay.noted import Held, InSlot, arguments_of, view_of
from planner.replay.program import PlannedCall, Run
from planner.replay.slots import Slots

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
    """The backward of a followed step: follows the schedule, and makes on demand what the schedule lacks.

    Attributes:
        followed: Whether the plan was followed through the whole forward; set when that has ended.
        begun: Whether a node has asked for a save.
        waiting: By slot, how many saves have not been handed out.
        written: The saves that a node has written over.
    """

    def __init__(self, loaded: LoadedProgram, slots: Slots) -> None:
        self.followed = self.begun = False
        self.waiting: dict[int, int] = {}
        self.written: set[int] = set()
        self._in_order = True  # the nodes ask in the order of the plan, and the schedule is followed
        self._asked = 0  # the next place in `asking_order`, in a backward that frees its graph
        self._loaded, self._calls, self._slots = loaded, loaded.calls, slots
        self._program, self._makers = loaded.program, loaded.program.makers
        self._settings_now: tuple[Any, ...] = ()  # PyTorch's, when the re-runs began

    def before_save(self, save: int) -> None:
        """Re-run the calls that the plan has before a save is handed out."""
        self.begun = True
        program = self._program
        if not self._in_order or (save in program.written_over and save not in program.asking_order):
            return  # a save that is only written over sets off no runs: its order does not matter
        keep = graph_is_kept()
        if keep and self.followed and backward_keeps_graph():  # not in the forward: that is planned
            self._loaded.tell_once("kept", KEPT)
        if not keep:
            place = program.asking_order.get(save, -1)
            if place != self._asked and (self.followed or place < self._asked):
                self._in_order = False  # another order: from now on nothing is freed by the schedule
                if self.followed:
                    self._loaded.tell_once("order", OTHER_ORDER)
                return
            # On another path no node asks for these saves, but later ones may need what their runs make.
            for passed in self._loaded.in_order[self._asked : place]:
                self._run_all(passed, keep)
                self._let_go(program.free.get(passed, ()))
            self._asked = place + 1
        self._run_all(save, keep)

    def value_for_save(self, slot: int) -> torch.Tensor:
        """The tensor of a slot, re-made if need be, for a save that is handed out."""
        base = self._slots.checked(slot)
        if base is None:
            base = self._make_on_demand(slot)
        self.waiting[slot] -= 1
        return base

    def after_save(self, save: int, slot: int = -1) -> None:
        """Free the slots that the plan frees once a save is handed out."""
        if graph_is_kept():
            return
        if self._in_order:
            self._let_go(self._program.free.get(save, ()))
        elif slot >= 0 and self.waiting[slot] <= 0 and self._slots.can_be_made(slot):
            self._slots.tensors[slot] = None

    def for_node(self, save: int, tensor: torch.Tensor, slot: int = -1) -> torch.Tensor:
        """The tensor that a node gets for a save: one that the node's result is written over, where the plan
        says so and nothing else holds the memory."""
        planned = save in self._program.written_over and self.followed and self._in_order
        if not planned or graph_is_kept() or torch.is_grad_enabled():
            return tensor
        if not engine_asks():
            self._loaded.tell_once("held", HELD)
            return tensor
        once = operators_run_once()

        def may_write() -> bool:  # asked when the node writes: its next save may be made of this tensor
            # ``beside``: the :class:`WrittenOver` that the node gets holds the storage, too.
            alone = once and self._slots.tensors.get(slot) is None and is_held_alone(tensor, beside=1)
            if not alone:
                self._loaded.tell_once("held", HELD)
            else:
                self.written.add(save)
            return alone

        return WrittenOver.of(tensor, may_write)

    def _let_go(self, slots: Iterable[int]) -> None:
        """Free slots. On another path nodes may ask for more than planned: a slot that the forward filled
        then stays if no noted call can make it again."""
        held, bits = self._slots, self._loaded.bits
        for slot in slots:
            if self.followed or not (slot in bits or slot in held.kept) or held.can_be_made(slot):
                held.tensors[slot] = None

    # ---- re-runs of the schedule --------------------------------------------------------------------------

    def _run_all(self, save: int, keep: bool) -> None:
        if runs := self._program.runs.get(save):
            self._settings_now = settings()
            with below_autograd():
                for run in runs:
                    self._run(run)
                    if not keep:
                        self._let_go(run.free)
                        for call in run.last_runs if self.followed else ():
                            self._slots.recipes.pop(call, None)

    def _run(self, run: Run) -> None:
        slots = self._slots
        if run.bits >= 0:
            for _, slot in run.store:
                if (bits := slots.tensors.get(run.bits)) is not None:
                    slots.put(slot, slots.unpack[slot](bits))
        elif all(call in slots.recipes for call in run.calls):  # else an earlier backward has freed them
            made = self._results(run.calls)
            for j, slot in run.store:
                if j < len(made):
                    slots.put(slot, made[j])

    def _results(self, calls: Sequence[int], made: dict[int, torch.Tensor] | None = None) -> list[Any]:
        """Run a call, then those that write over its results; returns the results. The calls read ``made``,
        tensors by slot, before the slots themselves."""
        own: dict[int, torch.Tensor] = {} if made is None else made
        for position, slots in self._call(calls[0]).before:
            first = self._run_call(position, own)
            own = {**own, **{slot: first[j] for j, slot, _ in self._call(position).results if slot in slots}}
            del first
        results = self._run_call(calls[0], own)
        if len(calls) > 1:
            own = {**own, **{slot: results[j] for j, slot, _ in self._call(calls[0]).results}}
            for position in calls[1:]:
                self._run_call(position, own)
        return results

    def _run_call(self, position: int, own: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Run one noted call again; returns the tensors that it returns."""
        recipe = self._slots.recipe(position)
        args = [self._argument(a, own) for a in recipe.args]
        kwargs = {k: self._argument(v, own) for k, v in recipe.kwargs.items()} if recipe.kwargs else {}
        func = recipe.func
        if is_batch_norm(func):
            args = list(without_statistics(tuple(args)))
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            func = partial(with_reserve, func)
        elif recipe.state is not None:
            func = partial(run_from_state, *recipe.state, func)
        if recipe.settings == self._settings_now:
            out = func(*args, **kwargs)
        else:
            with set_as(recipe.settings):
                out = func(*args, **kwargs)
        return list(results_of(out))

    def _call(self, position: int) -> PlannedCall:
        call = self._calls[position]
        assert call is not None
        return call

    def _argument(self, noted: Any, own: dict[int, torch.Tensor]) -> Any:
        if type(noted) is InSlot:
            base = own.get(noted.slot)
            if base is None:
                base = self._slots.checked(noted.slot)
            if base is None:
                base = self._make_on_demand(noted.slot)
            return view_of(base, noted.geometry)
        if type(noted) is Held:
            return noted.read()
        if type(noted) is list:
            return [self._argument(part, own) for part in noted]
        return noted

    # ---- values on demand, beside the schedule -----------------------------------------------------------

    def _make_on_demand(self, slot: int) -> torch.Tensor:
        """The tensor of a slot that the schedule has not made; values that it is made of are made, too."""
        if (present := self._slots.checked_or_unpacked(slot)) is not None:
            return present
        order = self._calls_that_make(slot)
        read_last: dict[int, int] = {slot: len(self._calls)}
        for position, calls in order.items():
            for view in (view for call in calls for view in self._read_by(call)):
                read_last[view.slot] = max(read_last.get(view.slot, -1), position)
        found: dict[int, torch.Tensor] = {}
        self._settings_now = settings()
        with below_autograd():
            for position, calls in order.items():
                results = self._results(calls, found)
                for j, s, _ in self._call(position).results:
                    found[s] = results[j]
                    if self.waiting.get(s, 0) > 0 and not self._in_order:
                        self._slots.put(s, results[j])
                del results
                for s in [s for s in found if read_last.get(s, -1) <= position]:
                    del found[s]
        return found[slot]

    def _read_by(self, position: int) -> Iterator[InSlot]:
        """The slots that a call reads, and those read by the calls that run right before it, for it alone."""
        before = dict(self._call(position).before)
        own = {slot for slots in before.values() for slot in slots}
        for call in (*before, position):
            views = arguments_of(self._slots.recipe(call), InSlot)
            yield from (view for view in views if view.slot not in own)

    def _calls_that_make(self, slot: int) -> dict[int, list[int]]:
        """The calls that make a slot and the slots that these read, in order, each with its writers."""
        needed, pending = {slot}, [slot]
        while pending:
            for position in self._makers[pending.pop()]:
                for view in self._read_by(position):
                    if view.slot not in needed and self._slots.checked_or_unpacked(view.slot) is None:
                        needed.add(view.slot)
                        pending.append(view.slot)
        return {
            position: sorted({c for _, s, _ in self._call(position).results for c in self._makers.get(s, ())})
            for position in sorted({self._makers[read][0] for read in needed})
        }
