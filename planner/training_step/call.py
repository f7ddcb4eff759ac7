"""One call of an operator, as a recording keeps it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner._torch.operators import OpOverload


@dataclass(frozen=True, slots=True)
class Call:
    """One operator with its arguments; tensors among them may be fake, and may be nested in lists."""

    func: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
