"""Private PyTorch APIs of loops that graphs break in: what is left of a loop is looked at when it is come to.

Tested with torch 2.13.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import TupleIteratorGetItemSource
from torch._dynamo.utils import tuple_iterator_getitem, tuple_iterator_len
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import TupleIteratorVariable


@functools.cache
def look_at_what_is_left_later(is_ours: Callable[[Any], bool]) -> None:
    """Do not look at all layers that are still to come each time that a graph ends in a loop over layers.

    Dynamo makes variables of all that is left of an iterator when it goes on after a break: the square of the
    number of layers. A layer that has not been come to is handed on as it is, which is what lists do.
    """
    all_at_once = VariableBuilder.wrap_tuple_iterator

    def when_come_to(self: Any, value: Any) -> Any:
        if not is_ours(self.tx):
            return all_at_once(self, value)
        self.install_guards(GuardBuilder.TUPLE_ITERATOR_LEN)
        items = [
            LazyVariableTracker.create(
                tuple_iterator_getitem(value, i),
                TupleIteratorGetItemSource(self.get_source(), i),
                tx=self.tx,
            )
            for i in range(tuple_iterator_len(value))
        ]
        result = TupleIteratorVariable(items, source=self.source)
        return self.tx.output.side_effects.track_mutable(value, result)

    VariableBuilder.wrap_tuple_iterator = when_come_to  # type: ignore[method-assign]
