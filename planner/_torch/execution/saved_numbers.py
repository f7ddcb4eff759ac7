"""Python numbers that autograd saves, each as a tensor of eight bytes whose making no dispatch mode sees.

They are found in the node of the result. But if a view is written in place, as by ``x[:, :3].mul_(2)``, the
result's node is a ``CopySlices`` of the view's base, which hides the operation's own node. So a stand-in for
the number is made, which lives as long: until the node is gone, or has run in a backward that keeps nothing.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import enable_reentrant_dispatch

from planner._torch.autograd import graph_is_kept, no_saved_tensors_hooks
from planner._torch.operators import number_as_tensor

_WRITTEN_VIEW = "torch::autograd::CopySlices"
_KEY = "stand-ins of saved numbers"
_Node = tuple[str, int]


class _StandIns(list[torch.Tensor]):
    """A list that can be referred to weakly."""


class SavedNumbers:
    """Finds the tensors that autograd saves for numbers among arguments, while a step is recorded."""

    def __init__(self) -> None:
        self._last: tuple[Callable[[], torch.Tensor | None], Mapping[str, Any], _Node | None] | None = None
        self._stand_ins: dict[_Node, weakref.ref[_StandIns]] = {}
        self._running: tuple[_Node, weakref.ref[_StandIns]] | None = None

    def note(
        self,
        operator: OpOverload,
        args: Sequence[Any],
        numbers: Mapping[str, Any],
        out: object,
        node: _Node | None,
    ) -> None:
        """Note an operation that ran: autograd saves its numbers when its dispatch has ended.

        Args:
            operator: The operator.
            args: Its positional arguments.
            numbers: The arguments that are numbers where tensors are expected, by name.
            out: Its result.
            node: The autograd node that it ran in; None in the forward.
        """
        if not isinstance(out, torch.Tensor) or out.device.type != "cpu":
            return
        if not out._is_view():
            self._last = weakref.ref(out), numbers, node
        elif torch.is_grad_enabled() and (out.is_floating_point() or out.is_complex()):
            # The user may hold only the base of the written view: it is held here until the node is found.
            self._last = partial(_itself, out._base), _saved(operator, args, numbers), node

    @property
    def noted(self) -> bool:
        """Whether an operation was noted whose numbers were not asked for yet."""
        return self._last is not None

    def found(self) -> tuple[list[torch.Tensor], _Node | None]:
        """The numbers saved for the operation that was noted last, and the node that it ran in."""
        if self._last is None:
            return [], None
        (result, numbers, node), self._last = self._last, None
        made_by = getattr(result(), "grad_fn", None)
        if made_by is not None and made_by.name() == _WRITTEN_VIEW:
            return self._made(made_by, list(numbers.values())), node
        return _saved_in(made_by, numbers), node

    def runs(self, node: _Node | None) -> None:
        """Note the node that runs now: numbers that an earlier one saved are gone once it has run."""
        if self._running is not None and self._running[0] != node:
            made = self._running[1]()
            if made is not None:
                made.clear()
            self._running = None
        if node in self._stand_ins and not graph_is_kept():
            self._running = (node, self._stand_ins.pop(node))

    def _made(self, node: Any, numbers: Sequence[Any]) -> list[torch.Tensor]:
        if not numbers or _KEY in node.metadata:
            return []
        made = _StandIns(map(number_as_tensor, numbers))
        node.metadata[_KEY] = made
        self._stand_ins[node.name(), node._sequence_nr()] = weakref.ref(made)
        return list(made)


def _itself(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor


def _saved_in(node: Any, names: Iterable[str]) -> list[torch.Tensor]:
    """The tensors of these names that a node saved. Hooks for saved tensors do not get numbers."""
    found = []
    for name in names:
        saved: Any = getattr(node, f"_raw_saved_{name}", None)
        # Older versions tell by the name alone; that the number is asked for sets off no hook.
        found.append(saved.data if hasattr(saved, "data") else getattr(node, f"_saved_{name}", None))
    return [one for one in found if isinstance(one, torch.Tensor)]


def _saved(operator: OpOverload, args: Sequence[Any], numbers: Mapping[str, Any]) -> Mapping[str, Any]:
    """The numbers that autograd saves for an operation. The operation is run without data to find them."""
    with enable_reentrant_dispatch(), torch.enable_grad(), no_saved_tensors_hooks():
        given = [torch.empty_like(a, device="meta") if isinstance(a, torch.Tensor) else a for a in args]
        written = given[0].requires_grad_().clone()
        node = operator(written, *given[1:]).grad_fn
        return {name: value for name, value in numbers.items() if _saved_in(node, [name])}
