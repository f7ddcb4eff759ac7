"""A planned step at work: the forward as it was written; what it drops is made again when autograd asks.

The forward runs under a dispatch mode that counts the calls of operators. Where the plan runs a call again,
its arguments are noted. What the plan drops is dropped when autograd saves it. The backward is autograd's
own: when a node asks for what was dropped, the calls that the plan names there run again.

What is not the value that the plan has at its place (`slots.py`) is kept, as without a plan.
"""

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import torch

from planner._torch import operators
from planner._torch.autograd import CountingMode, graph_is_kept
from planner._torch.execution.bernoulli_draws import FASTER
from planner._torch.tensors import alias_of, is_wrapper, without_history
from planner.errors import FreedError, InputsChanged
from planner.replay.backward import Backward
from planner.replay.besides import Besides
from planner.replay.calls import COUNTED, is_batch_norm, is_counted, operands_of, results_of, users_line
from planner.replay.noted import geometry_of, look_at
from planner.replay.slots import Slots
from planner.replay.steps import Steps
from planner.replay.units import ROOT, Units
from planner.training_step.user_lines import short_line


class _Packed:
    """What autograd holds in the place of a tensor that it saved and the plan drops."""

    __slots__ = ("__weakref__", "geometry", "handed_out", "save", "slot", "step")

    def __init__(self, step: "FollowedStep", save: int, slot: int, tensor: torch.Tensor) -> None:
        self.step, self.save, self.slot = step, save, slot
        self.handed_out: torch.Tensor | None = None  # until autograd lets go, as of what is kept
        self.geometry = geometry_of(tensor)


class FollowedStep:
    """One forward of a planned module, and what autograd holds of it."""

    def __init__(self, steps: Steps, units: Units) -> None:
        self.steps, self.units = steps, units
        self.calls, self.operators, self.saves = steps.calls, steps.operators, steps.saves
        self.position = self.save = 0
        self.slots = Slots(steps)
        self.backward = Backward(steps, self.slots)
        self.skipped = 0  # calls of the plan that did not come
        self.missed = False  # the plan has something to do with one of them
        self.besides: Besides | None = None  # what calls take that the plan has not seen
        self.larger: tuple[int, int] | None = None  # bytes of a saved tensor, and those that were planned
        self._unmatched: list[tuple[str, bool, str | None]] = []  # the operators that came in their place

    @property
    def followed(self) -> bool:
        """Whether all calls came that the plan has something to do with, each with what the plan has there.

        Otherwise the schedule is followed as far as that can be; what it lacks is made on demand.
        """
        return self.backward.followed

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd holds of a tensor that it saves."""
        save, begun = self.save, self.steps.begun
        if self.units.in_hooks:  # what these save is not counted
            tensor = without_history(tensor)
            return tensor, tensor._version
        if save >= len(begun) or begun[save] != self.position:
            self.slots.strayed = True
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
            if save in self.steps.program.over:  # else nobody would see who holds this very one
                tensor = alias_of(tensor)
            tensor = without_history(tensor)  # the node of a result would hold itself
            if save in self.steps.asks:
                return _Kept(self, save, tensor)
            return tensor, tensor._version
        if not (self.slots.holds(slot, tensor) and self.slots.can_be_made(slot)):
            self.slots.strayed = True
            tensor = without_history(tensor)
            return tensor, tensor._version
        waiting = self.backward.waiting
        waiting[slot] = waiting.get(slot, 0) + 1
        return _Packed(self, save, slot, tensor)

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
            self.slots.wrote(func, args, kwargs)
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
        self.backward.followed = not self.missed and not self.slots.strayed and self.save == len(self.saves)

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
        if packed.handed_out is not None:  # Python code asks more than once, or before the node does
            return packed.handed_out
        slot, save = packed.slot, packed.save
        if slot in self.slots.changed:
            raise InputsChanged(
                f"a result of shape {tuple(packed.geometry[0])} that the plan makes again in the backward "
                "was changed in place on a path that the plan has not seen: change a copy, or plan with "
                "inputs that lead along this path"
            )
        self.backward.before(save)
        tensor = look_at(self.backward.handed_out(slot), packed.geometry)
        if not graph_is_kept():
            packed.handed_out = tensor
        self.backward.after(save, slot)
        return self.backward.for_node(save, tensor, slot)


class _Kept:
    """A tensor that the plan keeps and behind whose being asked for it has something to do."""

    __slots__ = ("save", "step", "tensor", "version")

    def __init__(self, step: FollowedStep, save: int, tensor: torch.Tensor) -> None:
        self.step, self.save, self.tensor, self.version = step, save, tensor, tensor._version


def unpack(packed: Any) -> torch.Tensor:
    """What a node gets that asks for a tensor that it saved."""
    if type(packed) is not tuple and packed.save in packed.step.backward.written:
        raise FreedError(
            "a backward asks again for a tensor over which an earlier one, that an error ended, wrote its "
            "result: call the module again"
        )
    if type(packed) is _Packed:
        return packed.step.unpack(packed)
    if type(packed) is _Kept:
        packed.step.backward.before(packed.save)
        packed.step.backward.after(packed.save)
        tensor, version = packed.tensor, packed.version
    else:
        tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version "
            f"{version} instead"
        )
    return packed.step.backward.for_node(packed.save, tensor) if type(packed) is _Kept else tensor


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
                step.slots.wrote(func, args, kwargs)
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
            return step.slots.run(step.position - 1, call, func, args, kwargs)
        called = FASTER.get(func, func)
        return called(*args, **kwargs) if kwargs else called(*args)


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
