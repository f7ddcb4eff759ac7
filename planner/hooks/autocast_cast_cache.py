"""Gradients of several calls inside one region of autocast are added in half precision, as in eager.

Eager casts a parameter once in a region. The gradients of all its uses are added at that cast, in half
precision, and then cast back: ``cast(half(later + earlier))``. A planned call casts for itself, so the
gradients of two calls would be added in single precision. Where a region has a second call, the earlier call
returns the difference ``cast(half(later + earlier)) - later`` instead. Added to the gradient that the later
call returned, that is eager's gradient to the bit. (Halves are exact in single precision. So is the
difference, or else its error is below half a unit in the last place of the sum.)

A single call in a region, the usual case, costs one cast of an empty tensor, and nothing in the backward.
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
    """The casts of one graph that eager's autocast would cache for other calls.

    Args:
        warn: Called with :data:`SHARED_WEIGHT_WARNING`, once, if it applies.

    Attributes:
        again: Whether gradients were added that cannot be added as in eager.
    """

    def __init__(self, warn: Callable[[str], None] | None = None) -> None:
        self.again = False
        self._warn = warn
        # Types of the casts that a parameter's gradient comes from alone, by place among the gradients.
        self._cast_alone: dict[int, torch.dtype] = {}
        self._parameters_of: Callable[[Any], tuple[Any, ...]] = tuple

    def on_traced(self, traced: TracedGraph) -> None:
        joint, dtypes = traced.joint, traced.cached_casts
        places = aot_metadata.gradient_places(joint)
        flat: Sequence[Any] = joint.graph.output_node().args[0]  # type: ignore[assignment]
        gradients = {i: flat[places[i]] for i in dtypes if i in places and flat[places[i]] is not None}
        inputs = [aot_metadata.input_position(n) for n in aot_metadata.forward_inputs(joint)]
        in_order = inputs == list(range(len(inputs)))
        alone = {
            i: dtypes[i]
            for i, gradient in gradients.items()
            if in_order
            and gradient.target is aten._to_copy.default
            and gradient.args[0].meta["val"].dtype is dtypes[i]
            and not is_sum(gradient.args[0])
        }
        among_tensors = aot_metadata.places_among_tensors(joint)
        self._cast_alone = {among_tensors[i]: dtype for i, dtype in alone.items()}
        positions = [*alone, *(i for i in gradients if i not in alone)]
        self.watches = bool(positions)
        if positions:  # the first one twice: itemgetter returns a tuple only of several
            self._parameters_of = operator.itemgetter(*positions, positions[0])

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        parameters = self._parameters_of(args)
        notes = notes_of_region(parameters[0].device.type)
        if notes is None:
            return
        region = notes.setdefault("planner", _Region())
        if region.add(_Call(node, self._cast_alone, parameters)) and not self.again:
            self.again = True
            if self._warn is not None:
                self._warn(SHARED_WEIGHT_WARNING)


def hook(context: HookContext) -> AutocastCastCache:
    """A hook for every graph; it warns of weights whose gradients cannot be added as in eager."""
    return AutocastCastCache(context.warn)


def unplanned_call(parameters: Sequence[torch.Tensor]) -> bool:
    """Note a call of a planned module that runs without the plan, in evaluation mode say.

    Returns:
        Whether a planned call in the same region of autocast casts any of these parameters.
    """
    notes = notes_of_region(parameters[0].device.type) if parameters else None
    return notes is not None and notes.setdefault("planner", _Region()).add_unplanned(parameters)


class _Call:
    """A call of a planned graph inside a region.

    Args:
        node: Its autograd node.
        alone: The types that it casts parameters to whose gradient comes from that cast alone, by the place
            of the gradient.
        parameters: These parameters, then the others that it casts, then the first again.

    Attributes:
        first: Identities of the parameters that this call is the first in the region to cast. Its gradients
            are the last of them to be computed.
    """

    def __init__(self, node: Any, alone: Mapping[int, torch.dtype], parameters: tuple[Any, ...]) -> None:
        self.node = weakref.ref(node)
        self.alone, self.parameters = alone, parameters
        self.first: set[int] = set()
        self.corrects = False

    def casts(self) -> Iterator[tuple[int, torch.dtype, int]]:
        """Gradient's place, type and identity of each parameter whose gradient comes from a cast alone."""
        for (place, dtype), parameter in zip(self.alone.items(), self.parameters, strict=False):
            yield place, dtype, id(parameter)


class _Region:
    """The calls of planned graphs inside one region of autocast."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._read = 0  # the number of calls whose parameters are in the next two sets
        self._alone: set[int] = set()
        self._others: set[int] = set()
        self._unplanned: set[int] = set()
        self._sums: dict[int, torch.Tensor] = {}  # by parameter, of the running backward
        self._backward = -1

    def add(self, call: _Call) -> bool:
        """Note a call.

        Returns:
            Whether it uses a parameter again, and the gradients of the uses cannot be told apart.
        """
        self._calls.append(call)
        return bool(len(self._calls) > 1 or self._unplanned) and self._read_calls()

    def add_unplanned(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Note parameters that are used without a plan; returns what :meth:`add` does."""
        self._read_calls()
        self._unplanned.update(map(id, parameters))
        return not self._unplanned.isdisjoint(self._alone | self._others)

    def _read_calls(self) -> bool:
        """Read the parameters of calls that were added since; returns what :meth:`add` does."""
        unclear = again = False
        for call in self._calls[self._read :]:
            alone = {identity for _, _, identity in call.casts()}
            others = {id(p) for p in call.parameters[len(call.alone) : -1]}
            call.first = alone - self._alone
            again = bool(self._alone & alone)
            unclear = unclear or not others.isdisjoint(self._alone | self._others | self._unplanned)
            unclear = unclear or not alone.isdisjoint(self._others | self._unplanned)
            self._alone |= alone
            self._others |= others
        self._read = len(self._calls)
        if again:
            self._correct_gradients()
        return unclear

    def _correct_gradients(self) -> None:
        for call in self._calls:
            node = call.node()
            if node is not None and not call.corrects:
                call.corrects = True
                node.register_hook(lambda found, _, call=call: self._corrected(call, found))

    def _corrected(self, call: _Call, found: tuple[Any, ...]) -> tuple[Any, ...]:
        """The gradients that a call returns, corrected by those of later calls: backward runs these first."""
        backward = autograd.current_backward()
        if backward != self._backward:
            self._backward = backward
            self._sums.clear()
        gradients = list(found)
        for place, dtype, key in call.casts():
            gradient = gradients[place]
            if gradient is None:
                continue
            later = self._sums.pop(key, None)
            total = gradient.to(dtype)
            if later is not None:
                total = later + total
                difference = total.to(gradient.dtype) - later
                gradients[place] = torch.where(later.isfinite(), difference, gradient)
            if key not in call.first:
                self._sums[key] = total
        return tuple(gradients)
