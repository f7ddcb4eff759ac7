"""Loops that graphs break in: Dynamo looks at each item only when its iteration begins.

The code after a break in one iteration is a frame of its own, which is given the iterator with the remaining
items. Where iterations are alike, as over layers that are regions, one capture serves all of them but the
last: its guard asks for as many items as the capture took, or more.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts
from torch._dynamo.source import TupleIteratorGetItemSource
from torch._dynamo.utils import tuple_iterator, tuple_iterator_getitem, tuple_iterator_len
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import ListIteratorVariable, TupleIteratorVariable

from planner._torch.patches import replace


@functools.cache
def look_at_items_one_by_one(is_ours: Callable[[Any], bool]) -> None:
    """Where a graph ends in a loop over layers, do not look at the remaining layers.

    When Dynamo resumes after a break, it makes variables of all remaining items of an iterator, and captures
    again for each number of them: work quadratic in the number of layers. Here an item that the loop has not
    reached is passed on untouched, and the number of items is guarded only where the loop reached the end.
    """
    all_at_once = VariableBuilder.wrap_tuple_iterator

    def when_come_to(self: Any, value: Any) -> Any:
        if not is_ours(self.tx):
            return all_at_once(self, value)
        items = _Untouched(
            LazyVariableTracker.create(
                tuple_iterator_getitem(value, i),
                TupleIteratorGetItemSource(self.get_source(), i),
                tx=self.tx,
            )
            for i in range(tuple_iterator_len(value))
        )
        result = TupleIteratorVariable(items, source=self.source)
        self.install_guards(functools.partial(_as_far_as_it_went, iterator=result, items=items))
        return self.tx.output.side_effects.track_mutable(value, result)

    replace(VariableBuilder, "wrap_tuple_iterator", when_come_to)


@functools.cache
def move_iterators_that_are_unpacked(is_ours: Callable[[Any], bool]) -> None:
    """Leave an iterator where eager leaves it, also after a call that takes all of it.

    Dynamo does not tell the code after a graph of ``tuple(iterator)``, ``[*iterator]`` and
    ``items.extend(iterator)``: a loop over that iterator would get the taken items again.
    """
    unpacked = ListIteratorVariable.unpack_var_sequence

    def and_moved(self: Any, tx: Any) -> list[Any]:
        items = unpacked(self, tx)
        if items and self.source is not None and self.is_mutable() and is_ours(tx):
            tx.output.side_effects.mutation(self)
            self.index = len(self.items)
        return items

    replace(ListIteratorVariable, "unpack_var_sequence", and_moved)


class _Untouched(list[Any]):
    """A list whose items are looked at one by one: code of Dynamo that makes variables of all items of a list
    passes by lists of other classes."""

    were_taken_together = False

    def __iter__(self) -> Iterator[Any]:
        self.were_taken_together = True
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self.were_taken_together |= not isinstance(index, int)
        return super().__getitem__(index)


def _as_far_as_it_went(
    builder: Any, guard: Any, *, iterator: TupleIteratorVariable, items: _Untouched
) -> None:
    """Make the guard of an iterator, when the trace is over: how many items it must have."""
    taken = iterator.index
    if iterator.is_exhausted or items.were_taken_together or iterator.items is not items:
        GuardBuilder.TUPLE_ITERATOR_LEN(builder, guard)
        return

    def has_as_many(value: Any) -> bool:
        return type(value) is tuple_iterator and tuple_iterator_len(value) >= taken

    text = [f"___tuple_iterator_len({builder.arg_ref(guard)}) >= {taken}"]
    builder.get_guard_manager(guard).add_lambda_guard(
        has_as_many, get_verbose_code_parts(text, guard), guard.user_stack
    )
