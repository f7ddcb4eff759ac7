"""Numbers that a step with data reads from its tensors, handed to the same step without data.

Code asks tensors for numbers (``item``, ``if mask.all()``), and operators find sizes in data (``nonzero``).
Without data there is no answer. Where there are data on the CPU, the step runs there once, and the answers
are noted: numbers, and the forms of results. The same questions are then answered without data.

A question is recognised by its operator, the kind of its numbers and the line of the user's code; questions
of one line by their order. Code that runs after a graph that ended in a loop may report wrong lines: then the
questions of one file are recognised by their order. While Dynamo traces a graph, nothing is answered: a
question ends the graph, as it does with data.
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
from planner._torch.without_data import one_hot

NOT_KNOWN = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised without data where a question cannot be answered."""

_ASKS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
MASK_TYPES = (torch.bool, torch.uint8)
"""Types of an index that is a mask: it selects the elements where it is not zero."""
_NUMBER = torch.ops.aten._local_scalar_dense.default

_Question = tuple[object, str, str, int]
"""An operator, the kind of numbers that it asks for, and a line of the user's code."""


def asks_for_data(func: Any, args: Sequence[Any]) -> bool:
    """Whether what a call returns, or its size, depends on data."""
    if func is torch.ops.aten.index.Tensor:  # only masks among its indices decide the result's size
        return any(index is not None and index.dtype in MASK_TYPES for index in args[1])
    return not _ASKS.isdisjoint(getattr(func, "tags", ()))


class Answers:
    """The answers of a step that ran with data, in order."""

    def __init__(self) -> None:
        self._noted: dict[tuple[object, ...], list[Answer]] = {}  # by line, and by file
        self._next: Counter[tuple[object, ...]] = Counter()
        self._used: dict[str, None] = {}

    def begin_again(self) -> None:
        """Begin a pass over the step: its questions come in the same order again."""
        self._next.clear()

    def note(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Note the result of a call."""
        forms = result if func is _NUMBER else tree_map_only(torch.Tensor, _Form, result)
        question = _question(func, args)
        answer = Answer(forms, question)
        for key in (question, question[:-1]):
            self._noted.setdefault(key, []).append(answer)

    def answer(self, func: Any, args: Sequence[Any]) -> "Answer | None":
        """The answer to the present question; None where the step with data asked it less often, and while
        Dynamo traces a graph."""
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
        noted = self._noted.get(key, ())
        return noted[place] if place < len(noted) else None

    def uses(self, answer: "Answer") -> None:
        """Note that an answer is used, since its value is not known otherwise."""
        *_, file, line = answer.question
        self._used[f"{file}:{line}"] = None

    @property
    def lines(self) -> list[str]:
        """The lines of the user's code whose answers were used, as in ``net.py:12``."""
        return list(self._used)


class Answer:
    """The result of one call: a number, or the forms of tensors."""

    def __init__(self, forms: Any, question: _Question) -> None:
        self._forms, self.question = forms, question

    def made(self, mode: TorchDispatchMode) -> Any:
        """The result, made without data under a mode."""
        with mode:
            return tree_map_only(_Form, lambda form: form.made(), self._forms)


class _Form:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._sizes, self._strides, self._dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype

    def made(self) -> torch.Tensor:
        return torch.empty_strided(self._sizes, self._strides, dtype=self._dtype)


class _Noting(TorchDispatchMode):
    """A mode that notes the numbers and sizes that a step with data reads."""

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
    """A mode under which the checks of ``one_hot`` are not noted: it reads its numbers on the CPU to check
    them, but neither on a GPU nor without data."""

    def __init__(self, noting: _Noting) -> None:
        super().__init__()
        self._noting = noting

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.nn.functional.one_hot:
            return func(*args, **(kwargs or {}))
        return self._one_hot(*args, **one_hot.named(kwargs))

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
    """A context that notes the numbers and sizes that a step with data reads."""
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
    """The kind of a tensor's numbers; one kind for all floating-point types, since autocast may differ."""
    if not isinstance(asked, torch.Tensor):
        return ""
    return "floating" if asked.is_floating_point() else str(asked.dtype)
