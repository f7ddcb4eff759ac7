"""Several calls inside one region of autocast: their gradients are added in half precision, as in eager.

Without a plan a parameter is cast once in a region, and the gradients of all its uses are added at that cast,
in half precision, before they are cast back: ``cast(half(later + earlier))``. A planned call casts for
itself, and the gradients of two calls would be added up in single precision. Where one region has a
second call, the earlier one returns the difference instead, ``cast(half(later + earlier)) - later``:
added to what the later one has returned, that is the gradient without a plan, to the bit. (Halves are
exact in single precision; so is the difference, or else its error is below half a unit in the last place
of the sum.)

One call in a region, the usual case, costs one cast of an empty tensor, and nothing in the backward.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from planner._torch import autograd
from planner._torch.autocast_state import notes_of_region
from planner._torch.joint import aot_metadata
from planner.compiled.graph_hook import GraphHook, HookContext
from planner.graph.accumulation import is_sum
from planner.graph.trace import TracedGraph

aten = torch.ops.aten


SHARED_WEIGHT_WARNING = (
    "weights are used again inside one region of autocast, by a second call of the model or by another part "
    "of it, and each time more than once, or not only where they are cast: their gradients may differ in the "
    "last bits from those without a plan. Make both calls one, of a larger batch, or each in its own region"
)


class AutocastCastCache(GraphHook):
    """The casts of one graph that autocast would cache for others, if it ran without a plan.

    Args:
        warn: Called with :data:`SHARED_WEIGHT_WARNING`, once, if it applies.

    Attributes:
        again: Whether gradients were added that cannot be added as without a plan.
    """

    def __init__(self, warn: Callable[[str], None] | None = None) -> None:
        self.again = False
        self._warn = warn
        self._alone: dict[int, torch.dtype] = {}  # by place among the gradients of tensors
        self._others: list[int] = []
        self._taken: Callable[[Any], tuple[Any, ...]] = tuple

    def on_traced(self, traced: TracedGraph) -> None:
        joint, kept = traced.joint, traced.cached_casts
        places = aot_metadata.gradient_places(joint)
        flat: Sequence[Any] = joint.graph.output_node().args[0]  # type: ignore[assignment]
        gradients = {i: flat[places[i]] for i in kept if i in places and flat[places[i]] is not None}
        inputs = [aot_metadata.input_position(n) for n in aot_metadata.forward_inputs(joint)]
        in_order = inputs == list(range(len(inputs)))
        alone = {
            i: kept[i]
            for i, gradient in gradients.items()
            if in_order
            and gradient.target is aten._to_copy.default
            and gradient.args[0].meta["val"].dtype is kept[i]
            and not is_sum(gradient.args[0])
        }
        among_tensors = aot_metadata.places_among_tensors(joint)
        self._alone = {among_tensors[i]: kind for i, kind in alone.items()}
        self._others = [i for i in gradients if i not in alone]
        positions = [*alone, *self._others]
        self.watches = bool(positions)
        if positions:  # the first twice, as itemgetter returns a tuple only for several
            self._taken = operator.itemgetter(*positions, positions[0])

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        parameters = self._taken(args)
        notes = notes_of_region(parameters[0].device.type)
        if notes is None:
            return
        region = notes.setdefault("planner", _Region())
        if region.add(_Call(node, self._alone, parameters)) and not self.again:
            self.again = True
            if self._warn is not None:
                self._warn(SHARED_WEIGHT_WARNING)


def hook(context: HookContext) -> AutocastCastCache:
    """One that warns of weights whose gradients cannot be added as without a plan."""
    return AutocastCastCache(context.warn)


def unplanned_call(parameters: Sequence[torch.Tensor]) -> bool:
    """Note a call of a planned module that runs without the plan, in evaluation mode say.

    Returns:
        Whether the region of autocast that it is in holds a planned call too that casts the same parameters.
    """
    notes = notes_of_region(parameters[0].device.type) if parameters else None
    return notes is not None and notes.setdefault("planner", _Region()).add_unplanned(parameters)


class _Call:
    """A call of a planned graph inside a region.

    Args:
        node: Its autograd node.
        alone: What it casts parameters to, by place of their gradients, where they come from that cast alone.
        parameters: These parameters, others that it casts, and the first again.
    """

    def __init__(self, node: Any, alone: Mapping[int, torch.dtype], parameters: tuple[Any, ...]) -> None:
        self.node = weakref.ref(node)
        self.alone, self.parameters = alone, parameters
        self.first: set[int] = set()
        self.watched = False

    def casts(self) -> Iterator[tuple[int, torch.dtype, int]]:
        """Of each parameter whose gradient comes from a cast alone: the gradient's place, type, identity."""
        for (place, kind), parameter in zip(self.alone.items(), self.parameters, strict=False):
            yield place, kind, id(parameter)


class _Region:
    """The calls of planned graphs inside one region of autocast."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._known = 0  # calls whose parameters are among those of the next two lines
        self._alone: set[int] = set()
        self._others: set[int] = set()
        self._unplanned: set[int] = set()
        self._sums: dict[int, torch.Tensor] = {}
        self._backward = -1

    def add(self, call: _Call) -> bool:
        """Note a call.

        Returns:
            Whether a parameter is used again whose gradients cannot be separated.
        """
        self._calls.append(call)
        return bool(len(self._calls) > 1 or self._unplanned) and self._know()

    def add_unplanned(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Note parameters that are used without a plan; returns what :meth:`add` does."""
        self._know()
        self._unplanned.update(map(id, parameters))
        return not self._unplanned.isdisjoint(self._alone | self._others)

    def _know(self) -> bool:
        unclear = again = False
        for one in self._calls[self._known :]:
            alone = {identity for _, _, identity in one.casts()}
            others = {id(p) for p in one.parameters[len(one.alone) : -1]}
            one.first = alone - self._alone
            again = bool(self._alone & alone)
            unclear = unclear or not others.isdisjoint(self._alone | self._others | self._unplanned)
            unclear = unclear or not alone.isdisjoint(self._others | self._unplanned)
            self._alone |= alone
            self._others |= others
        self._known = len(self._calls)
        if again:
            self._watch()
        return unclear

    def _watch(self) -> None:
        for one in self._calls:
            node = one.node()
            if node is not None and not one.watched:
                one.watched = True
                node.register_hook(lambda found, _, one=one: self._corrected(one, found))

    def _corrected(self, call: _Call, found: tuple[Any, ...]) -> tuple[Any, ...]:
        backward = autograd.current_backward()
        if backward != self._backward:
            self._backward = backward
            self._sums.clear()
        gradients = list(found)
        for place, kind, key in call.casts():
            gradient = gradients[place]
            if gradient is None:
                continue
            later = self._sums.pop(key, None)
            total = gradient.to(kind)
            if later is not None:
                total = later + total
                difference = total.to(gradient.dtype) - later
                gradients[place] = torch.where(later.isfinite(), difference, gradient)
            if key not in call.first:
                self._sums[key] = total
        return tuple(gradients)
