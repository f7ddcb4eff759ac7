"""The calls of one planned module, and which of their backwards have run."""

import threading
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
KEPT = (
    "a backward with retain_graph=True holds what the plan would free (create_graph=True sets it), and the "
    "step may take more than predicted: as much as the forward keeps, and the gradients that you keep of "
    "each loss. Add up the losses and call backward once; where each loss needs gradients of its own, as in "
    "PCGrad, call the planned part once for each loss, with its backward before the next, or plan for so "
    "much less"
)

_NONE: Mapping[str, Any] = {}


class Token:
    """An object that lives as long as an autograd node, because a hook of the node holds it."""

    __slots__ = ("__weakref__",)
    begun = False


class Call:
    """One call of the module.

    Attributes:
        tokens: Objects that live as long as autograd may still run a backward of the call.
        done: Whether any of these backwards ran.
        executions: How often each graph ran in it.
        of_leaves: Whether an argument is a leaf that requires a gradient, as for a penalty of the gradient.
    """

    __slots__ = ("done", "executions", "of_leaves", "tokens")

    def __init__(self, of_leaves: bool = False) -> None:
        self.done, self.of_leaves = False, of_leaves
        self.executions: dict[object, int] = {}
        self.tokens: list[weakref.ref[Any]] = []

    def follow(self, step: object) -> None:
        """Have a replayed step be the token: autograd holds it as long as it may have to recompute.

        Its attribute ``begun`` says whether its backward has begun.
        """
        self.tokens.append(weakref.ref(step))

    def awaits_backward(self) -> bool:
        """Whether its backward has yet to run, and can."""
        alive = (token() for token in self.tokens)
        return not self.done and any(token is not None and not token.begun for token in alive)

    def is_held(self) -> bool:
        """Whether autograd may still run a backward of it."""
        return any(token() is not None for token in self.tokens)


class _Here(threading.local):
    def __init__(self) -> None:
        self.last = Call()


class Calls:
    """The calls of one planned module.

    Args:
        warn: Called, once each, when a call begins while as many as planned await their backward, and when a
            backward with ``retain_graph=True`` keeps memory that it could have freed.
        in_flight: How many calls the plan allows to await their backward; None: one.

    """

    def __init__(self, warn: Callable[[str], None], in_flight: int | None = None) -> None:
        self._warn, self._in_flight = warn, in_flight
        self._warned_of_more = self._warned_of_kept = False
        self._begun: list[Call] = []
        self._left: set[bool] = set()  # the kinds of calls, by ``of_leaves``, that run without the plan
        self._here = _Here()

    @property
    def last(self) -> Call:
        """The call that began last in this thread."""
        return self._here.last

    def leave(self, call: Call) -> None:
        """Have calls of this kind run without the plan from now on."""
        self._left.add(call.of_leaves)

    def return_to_all(self) -> None:
        """Have calls of all kinds run by the plan again."""
        self._left.clear()

    def is_left(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether calls with such arguments are left to the module: they run without the plan."""
        return bool(self._left) and _of_leaves(args, kwargs) in self._left

    def begin(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = _NONE) -> None:
        """A call of the module begins."""
        earlier = [call for call in self._begun if call.awaits_backward()]
        if not self._warned_of_more and len(earlier) >= (self._in_flight or 1):
            self._warned_of_more = True
            self._warn(_TWO if self._in_flight is None else _MORE.format(count=self._in_flight))
        self._here.last = Call(_of_leaves(args, kwargs))
        self._begun = [*earlier, self._here.last]

    def next_execution(self, graph: object) -> int:
        """Count one more run of a graph in the last call; returns how many runs came before."""
        executions = self.last.executions
        count = executions.get(graph, 0)
        executions[graph] = count + 1
        return count

    def kept(self) -> None:
        """Note that a backward kept memory that it could have freed."""
        if not self._warned_of_kept:
            self._warned_of_kept = True
            self._warn(KEPT)


def _of_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor among arguments is a leaf that requires a gradient, as for a penalty of it."""
    return any(tensor.requires_grad and tensor.is_leaf for tensor in tensors_in((args, dict(kwargs))))
