"""A break deep inside calls is found once, not once more in each frame on the way.

Where a call cannot be traced, Dynamo ends the graph before it and runs the call. Then it traces the called
frame, up to the same place, ends that graph before the next call, and so on: the way down is traced once for
each frame on it. Half of a capture of Hugging Face's models goes into this, whose masks read data ten calls
below. But the first trace already tells where all of these frames will end.
"""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType
from typing import Any

from torch._dynamo.exc import Unsupported
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

from planner._torch.patches import replace

_CALLS = "_planner_calls"
"""The attribute of a translator that counts what its frame called."""
_INSIDE = "_planner_inside"
"""The attribute of an error that lists the frames inside the traced one that it passed, innermost first."""


@dataclass(frozen=True)
class _Break:
    """A call that cannot be traced.

    Attributes:
        code, offset: The code of the calling frame, and the place of its instruction in bytes.
        called: The code of the called frame.
        before: How often the instruction called that code before, as in a loop.
        reason, stack: Why it cannot be traced, and where.
    """

    code: CodeType
    offset: int
    called: CodeType
    before: int
    reason: str
    stack: Any


_expected: list[_Break] = []
"""Breaks of frames that will be traced next, the outermost first."""


def forget_known_breaks() -> None:
    """Forget them: another forward comes next."""
    _expected.clear()


@functools.cache
def break_where_it_broke(is_ours: Callable[[Any], bool]) -> None:
    """Have our captures break at once at calls that are known to break.

    Args:
        is_ours: Whether an instruction translator traces for a planned module.
    """
    owner: Any = InstructionTranslatorBase
    run, log_break = owner.run, owner.log_graph_break

    def run_unless_known(self: Any) -> None:
        if self.parent is None or not is_ours(self):
            run(self)
            return
        before = _calls_before(self.parent, self.f_code)
        if _expected and self.parent.parent is None:
            _fail_where_known(self.parent, self.f_code, before)
        try:
            run(self)
        except Unsupported as error:
            frame = self.f_code, self.current_instruction.offset, before
            vars(error).setdefault(_INSIDE, []).append(frame)
            raise

    def log_and_note(self: Any, code_options: Any, reason: str, exc: Exception) -> None:
        inside = getattr(exc, _INSIDE, ())
        if inside and self.parent is None:
            why = str(getattr(exc, "msg", exc)), getattr(exc, "real_stack", None)
            _expected[:] = [
                _Break(code, offset, called, before, *why)
                for (code, offset, _), (called, _, before) in pairwise(reversed(inside))
            ]
        log_break(self, code_options, reason=reason, exc=exc)

    replace(owner, "run", run_unless_known)
    replace(owner, "log_graph_break", log_and_note)


def _calls_before(caller: Any, called: CodeType) -> int:
    """How often the present instruction of a frame has called that code before; counts this call."""
    counts = vars(caller).setdefault(_CALLS, Counter())
    call = caller.current_instruction.offset, called
    counts[call] += 1
    return int(counts[call]) - 1


def _fail_where_known(caller: Any, called: CodeType, before: int) -> None:
    call = caller.f_code, caller.current_instruction.offset, called, before
    for i, known in enumerate(_expected):
        if (known.code, known.offset, known.called, known.before) == call:
            del _expected[: i + 1]
            raise Unsupported(known.reason, real_stack=known.stack)
