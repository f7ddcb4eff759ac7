"""What a step with data read from its tensors, told to one without data.

Code asks tensors for numbers (``item``, ``if mask.all()``), and operators find sizes in data (``nonzero``).
Without data nobody knows. Where there are data on the CPU, the step runs there once, and what it was told is
written down: numbers, and the forms of results. The same questions are then answered without data. A question
is known by its operator, the kind of its numbers and the line of the user's code, and those of one line by
their order. Where code goes on after a graph that ended in a loop, its lines may be told wrong: then those of
one file are known by their order. While a graph is traced nothing is answered: there a question ends the
graph, as it does with data.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from planner._torch.own_code import is_of_pytorch, is_of_this_package

NOT_KNOWN = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised without data where a question cannot be answered."""

_ASKS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_MASKS = (torch.bool, torch.uint8)
_NUMBER = torch.ops.aten._local_scalar_dense.default

_Question = tuple[object, str, str, int]
"""An operator, the kind of numbers that it asks for, and a line of the user's code."""


def asks_for_data(func: Any, args: Sequence[Any]) -> bool:
    """Whether what a call returns, or its size, depends on data."""
    if func is torch.ops.aten.index.Tensor:  # the numbers among its indices say nothing of the result's size
        return any(index is not None and index.dtype in _MASKS for index in args[1])
    return not _ASKS.isdisjoint(getattr(func, "tags", ()))


class Answers:
    """What a step was told when it ran with data, in its order."""

    def __init__(self) -> None:
        self._told: dict[tuple[object, ...], list[Answer]] = {}  # of each line, and of each file
        self._next: Counter[tuple[object, ...]] = Counter()
        self._used: dict[str, None] = {}

    def begin_again(self) -> None:
        """A pass over the step begins."""
        self._next.clear()

    def note(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Write down what a call returned."""
        told = result if func is _NUMBER else tree_map_only(torch.Tensor, _Form, result)
        question = _question(func, args)
        answer = Answer(told, question)
        for key in (question, question[:-1]):
            self._told.setdefault(key, []).append(answer)

    def answer(self, func: Any, args: Sequence[Any]) -> "Answer | None":
        """The answer to a question that is asked now; None where it was not asked so often, or a graph is
        being traced."""
        if TracingContext.try_get() is not None:
            return None
        question = _question(func, args)
        of_line, of_file = self._following(question), self._following(question[:-1])
        if of_file is not None and (of_line is None or of_file.question == question):
            return of_file
        return of_line

    def _following(self, key: tuple[object, ...]) -> "Answer | None":
        place = self._next[key]
        self._next[key] += 1
        told = self._told.get(key, ())
        return told[place] if place < len(told) else None

    def uses(self, answer: "Answer") -> None:
        """An answer is given that was not known otherwise."""
        *_, file, line = answer.question
        self._used[f"{file}:{line}"] = None

    @property
    def lines(self) -> list[str]:
        """The lines of the user's code that were answered, as in ``net.py:12``."""
        return list(self._used)


class Answer:
    """What one call returned."""

    def __init__(self, told: Any, question: _Question) -> None:
        self._told, self.question = told, question

    def made(self, mode: TorchDispatchMode) -> Any:
        """What it returned, without data under a mode."""
        with mode:
            return tree_map_only(_Form, lambda form: form.made(), self._told)


class _Form:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._sizes, self._strides, self._dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype

    def made(self) -> torch.Tensor:
        return torch.empty_strided(self._sizes, self._strides, dtype=self._dtype)


class _Noting(TorchDispatchMode):
    """A mode in which what a step with data is told is written down."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers, self.pauses = answers, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.pauses and asks_for_data(func, args):
            self._answers.note(func, args, result)
        return result


class _WithoutChecks(TorchFunctionMode):
    """``one_hot`` looks at its numbers on the CPU to check them, which it does neither on a GPU nor without
    data: it is not noted."""

    def __init__(self, noting: _Noting) -> None:
        super().__init__()
        self._noting = noting

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.nn.functional.one_hot:
            return func(*args, **(kwargs or {}))
        return self._one_hot(*args, **(kwargs or {}))

    def _one_hot(self, tensor: torch.Tensor, num_classes: Any = -1) -> torch.Tensor:
        classes = int(num_classes)
        if classes == -1 and tensor.numel():
            classes = int(tensor.max()) + 1
        self._noting.pauses = True
        try:
            return torch.nn.functional.one_hot(tensor, classes)
        finally:
            self._noting.pauses = False


@contextlib.contextmanager
def answers_noted() -> Iterator[Answers]:
    """A context in which a step with data runs, and what it is told is written down."""
    answers = Answers()
    noting = _Noting(answers)
    with noting, _WithoutChecks(noting):
        yield answers


def _question(func: Any, args: Sequence[Any]) -> _Question:
    kind = _kind(args[0]) if args else ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith("<") and not is_of_pytorch(code) and not is_of_this_package(code):
            return func, kind, code.co_filename, frame.f_lineno
        frame = frame.f_back
    return func, kind, "", 0


def _kind(asked: Any) -> str:
    """What kind of numbers a tensor has: what is half under autocast there need not be half here."""
    if not isinstance(asked, torch.Tensor):
        return ""
    return "floating" if asked.is_floating_point() else str(asked.dtype)
