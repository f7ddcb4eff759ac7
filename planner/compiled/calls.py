"""The calls of one planned module, and which of their backwards have run."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from planner.training_step.step import tensors_in

_TWO = (
    "a forward of the planned module began while an earlier one awaits its backward: both hold their memory, "
    "and the step may take more than predicted. Plan one module that makes both calls, make them one batch, "
    "or let go of outputs that are not differentiated. A stage of a pipeline is planned with in_flight="
)
_MORE = (
    "a forward of the planned module began while {count} earlier ones await their backward, and the plan is "
    "for in_flight={count}: the step may take more than predicted. Plan for as many micro-batches as the "
    "schedule has in flight: with GPipe all, with 1F1B as many as there are stages from this one to the last"
)


_NONE: Mapping[str, Any] = {}


class Token:
    """Lives as long as an autograd node."""

    __slots__ = ("__weakref__",)
    begun = False


class Call:
    """One call: tokens of the nodes of its graphs, whether any of their backwards ran, how often each graph
    ran, and whether a tensor was passed whose gradient is wanted for itself."""

    __slots__ = ("done", "executions", "of_leaves", "tokens")

    def __init__(self, of_leaves: bool = False) -> None:
        self.done, self.of_leaves = False, of_leaves
        self.executions: dict[object, int] = {}
        self.tokens: list[weakref.ref[Any]] = []

    def follow(self, step: object) -> None:
        """A step is replayed. It lives as long as autograd holds what it is to make again, and says whether
        its backward has ``begun``."""
        self.tokens.append(weakref.ref(step))

    def awaits_backward(self) -> bool:
        there = (token() for token in self.tokens)
        return not self.done and any(one is not None and not one.begun for one in there)


class Calls:
    """The calls of one planned module.

    Args:
        warn: Called, once each, when a call begins while as many as are planned await their backward, and
            when a backward keeps what it could have freed.
        in_flight: How many calls are planned to have had their forward, and not their backward.
    """

    def __init__(self, warn: Callable[[str], None], in_flight: int | None = None) -> None:
        self._warn, self._in_flight = warn, in_flight
        self._warned_of_more = self._warned_of_kept = False
        self._earlier: list[Call] = []
        self._left: set[bool] = set()
        self.last = Call()

    def leave(self, call: Call) -> None:
        """The plan is not for such calls: they run as they are from now on."""
        self._left.add(call.of_leaves)

    def return_to_all(self) -> None:
        """Calls of all kinds run by the plan again."""
        self._left.clear()

    def is_left(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the plan is not for calls with such arguments."""
        return bool(self._left) and _of_leaves(args, kwargs) in self._left

    def begin(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = _NONE) -> None:
        """A call of the module begins."""
        self._earlier = [call for call in (*self._earlier, self.last) if call.awaits_backward()]
        if not self._warned_of_more and len(self._earlier) >= (self._in_flight or 1):
            self._warned_of_more = True
            self._warn(_TWO if self._in_flight is None else _MORE.format(count=self._in_flight))
        self.last = Call(_of_leaves(args, kwargs))

    def next_execution(self, graph: object) -> int:
        """How often a graph has run in the last call; it runs once more now."""
        executions = self.last.executions
        count = executions.get(graph, 0)
        executions[graph] = count + 1
        return count

    def kept(self) -> None:
        """A backward kept what it could have freed."""
        if not self._warned_of_kept:
            self._warned_of_kept = True
            self._warn(
                "a backward with retain_graph=True holds what the plan would free, and the step may take "
                "more than predicted: as much as the forward keeps, and the gradients that you keep of each "
                "loss. Add up the losses and call backward once; where each loss needs gradients of its own, "
                "as in PCGrad, call the planned part once for each loss, with its backward before the next, "
                "or plan for so much less"
            )


def _of_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor among arguments is a leaf that requires a gradient, as for a penalty of it."""
    return any(tensor.requires_grad and tensor.is_leaf for tensor in tensors_in((args, dict(kwargs))))
