"""A break below several calls is found once, and plans are those of finding it again from each of them."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

import planner
from planner._torch.tracing.breaks import known_breaks


class _Deepest(nn.Module):
    def __init__(self, breaks: bool = True) -> None:
        super().__init__()
        self.a, self.breaks = nn.Linear(8, 8), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).tanh()
        if self.breaks and y.sum() > 1000:
            y = y * 2
        return y.sigmoid()


class _Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.a = inner, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.inner(self.a(x).tanh()).tanh())


def _decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class _SameWrapper(_Around):
    """Two methods of one wrapper's code, of which the second breaks."""

    @_decorated
    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).tanh()

    @_decorated
    def second(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _open():
            return self.second(self.first(x))


@contextlib.contextmanager
def _open() -> Iterator[None]:
    """A context that no graph can end in."""
    yield


class _InALoop(_Around):
    """The first that the loop calls goes through."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.each = nn.ModuleList([_Around(_Deepest(breaks=False)), _Around(inner)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.each:
            x = each(x)
        return x.tanh()


class _InAFinally(_Around):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.inner(self.a(x)).tanh()
        finally:
            self.calls = 1


class _InAComprehension(_Around):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.inner(row) for row in self.a(x).chunk(2)]).tanh()


class _Twice(_Around):
    """The call that goes through comes first, and is of the same code."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(_Around(inner))
        self.other = _Around(_Deepest(breaks=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(x)
        return self.inner(x).tanh()


@pytest.fixture
def traces_of_deepest(monkeypatch: pytest.MonkeyPatch) -> dict[Any, bool]:
    """By translator, whether it traced the deepest frame as a part of another."""
    found, step = dict[Any, bool](), InstructionTranslatorBase.step

    def noted(self: Any) -> bool:
        if self.f_code is _Deepest.forward.__code__:
            found[self] = self.parent is not None
        return step(self)

    monkeypatch.setattr(InstructionTranslatorBase, "step", noted)
    return found


def _planned(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    plan = planner.plan(model, x, loss=torch.sum, budget="min", solver="sqrt_n")
    report = planner.verify(model, x, loss=torch.sum, plan=plan, repeats=0)
    assert report.ok, report.problems
    return {"graphs": plan.graphs, "notes": plan.notes, "coverage": plan.coverage, "step": plan.step}


@pytest.mark.graphs
@pytest.mark.heavy
@pytest.mark.parametrize(
    "kind",
    [
        *(_SameWrapper, _InALoop),
        *(
            pytest.param(kind, marks=pytest.mark.heavy)
            for kind in (_Around, _InAFinally, _InAComprehension, _Twice)
        ),
    ],
)
def test_plans_are_those_of_finding_it_from_each_frame(
    kind: type[_Around], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = kind(_Around(_Deepest())).train(), torch.randn(4, 8)
    known = _planned(model, x)
    assert known["coverage"] != "one-graph"
    monkeypatch.setattr(known_breaks, "_fail_where_known", lambda *_: None)
    assert known == _planned(model, x)


@pytest.mark.graphs
@pytest.mark.parametrize("known", [False, True])
def test_the_way_down_is_traced_once(
    known: bool, traces_of_deepest: dict[Any, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        monkeypatch.setattr(known_breaks, "_fail_where_known", lambda *_: None)
    model: nn.Module = _Deepest()
    for _ in range(4):
        model = _Around(model)
    planner.plan(model.train(), torch.randn(4, 8), loss=torch.sum, budget="min", solver="sqrt_n")
    assert sum(traces_of_deepest.values()) == (1 if known else 4)


def test_compiled_code_of_the_users_is_traced_as_ever(traces_of_deepest: dict[Any, bool]) -> None:
    planner.plan(nn.Linear(2, 2), torch.randn(2, 2), loss=torch.sum, budget="min")  # changes Dynamo
    torch._dynamo.reset()
    torch.compile(_Around(_Around(_Deepest())), backend="eager")(torch.randn(4, 8))
    assert sum(traces_of_deepest.values()) == 2
