"""One call of an operator, as a recording keeps it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner._torch.operators import OpOverload, sized_by_data
from planner._torch.tensors import call_tensors
from planner._torch.without_data.answers import asks_for_data

Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One operator with its arguments; tensors among them may be fake, and may be nested in lists.

    Attributes:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        sizes: Of what it returned, where data decided them; None where its arguments alone do.
    """

    func: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sizes | None = None


def sizes_by_data(func: Any, args: Sequence[Any], result: Any) -> Sizes | None:
    """The sizes of the tensors that a call returned, where data decided them."""
    if not sized_by_data(func) or not asks_for_data(func, args):
        return None
    sizes = sizes_of(result)
    return sizes if all(type(size) is int for shape in sizes for size in shape) else None


def sizes_of(result: Any) -> Sizes:
    """The sizes of the tensors among an operator's results."""
    return tuple(tuple(tensor.shape) for tensor in call_tensors(result))
