"""What a step leaves in objects of others while it is planned has data afterwards, or is taken out."""

import functools
import gc
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import planner
from planner import heap
from planner.training_step import left_behind

pytestmark = pytest.mark.heavy

LIBRARY = """
import functools
import torch

CACHE = {}
LAST = None

class Tables:
    held = None
    def get(self, n):
        if self.held is None:
            self.held = torch.arange(float(n))
        return self.held

TABLES = Tables()

class Slotted:
    __slots__ = ("table",)

SLOTTED = Slotted()
SLOTTED.table = None

class OfTheClass:
    table = None

RECENT = [None]

def in_a_slot(n):
    if SLOTTED.table is None:
        SLOTTED.table = torch.full((n,), 2.0)
    return SLOTTED.table

def in_a_class(n):
    if OfTheClass.table is None:
        OfTheClass.table = torch.full((n,), 3.0)
    return OfTheClass.table

def in_a_list(n):
    if RECENT[0] is None:
        RECENT[0] = torch.full((n,), 4.0)
    return RECENT[0]

@functools.lru_cache
def recent(n):
    return torch.arange(float(n)) + 1

@functools.cache
def pair(n):
    return torch.zeros(n), {"ones": torch.ones(n)}

def in_dictionary(n):
    if n not in CACHE:
        CACHE[n] = torch.arange(float(n))
    return CACHE[n]

def positions(n):
    if "positions" not in CACHE:
        table = torch.zeros(n)
        table[0::2] = torch.sin(torch.arange(0.0, n, 2))
        table[1::2] = torch.cos(torch.arange(0.0, n, 2))
        CACHE["positions"] = (table, "sinusoidal")
    return CACHE["positions"][0]

CONSTANT = torch.arange(8.0)

def written(n, how):
    if how not in CACHE:
        table = torch.zeros(n)
        if how == "by one with data":
            table.add_(CONSTANT)
        elif how == "as out=":
            torch.add(CONSTANT, 1, out=table)
        else:
            torch._foreach_add_([table], [1.0])
        CACHE[how] = table
    return CACHE[how]

def two(n):
    if "two" not in CACHE:
        CACHE["two"] = (torch.arange(float(n)), torch.ones(n))
    numbers, ones = CACHE["two"]
    return numbers + ones
"""
NUMBERS = count()
KEPT = []  # Dynamo has code by its address
WANTED = {
    "recent": torch.arange(8.0) + 1,
    "in_dictionary": torch.arange(8.0),
    "in_a_slot": torch.full((8,), 2.0),
    "in_a_class": torch.full((8,), 3.0),
    "in_a_list": torch.full((8,), 4.0),
    "two": torch.arange(8.0) + 1,
    "positions": torch.stack(
        [torch.sin(torch.arange(0.0, 8, 2)), torch.cos(torch.arange(0.0, 8, 2))], 1
    ).flatten(),
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    name = f"tables_of_others_{next(NUMBERS)}"  # Dynamo remembers modules by name
    (tmp_path / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module(name)
    del sys.modules[name]


class Adding(nn.Module):
    """Adds what functions make."""

    def __init__(self, *make) -> None:
        super().__init__()
        self.first, self.second, self.make = nn.Linear(8, 8), nn.Linear(8, 8), [*make]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        for make in self.make:
            x = x + make(8)
        return self.second(x)


def test_holders_are_told_of_many_objects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_behind, "_AT_ONCE", 3)
    objects: list[object] = []
    for n in range(20):
        held = objects[n // 2 : n // 2 + n % 4]
        objects.append([*held, *held[:1]] if n % 3 else dict(enumerate(held)))
    place = {id(o): n for n, o in enumerate(objects)}
    expected: list[list[int]] = [[] for _ in objects]
    for n, holder in enumerate(objects):
        for referent in gc.get_referents(holder):
            if id(referent) in place:
                expected[place[id(referent)]].append(n)
    assert sum(map(len, expected)) > 20
    holders = left_behind._Holders(objects)
    assert [holders[n] for n in range(len(objects))] == expected


def planned_as_unplanned(model: nn.Module) -> None:
    """Plan, run a step with the plan and one in eval mode, and compare with a step without."""
    x = torch.randn(16, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        plan = planner.plan(model, x, budget="100%", solver="sqrt_n")
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    plan.apply(model)(x).sum().backward()
    assert expected
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    model.eval()(x)


def test_caches_of_other_files_hold_tensors_with_data(library: ModuleType) -> None:
    planned_as_unplanned(Adding(*(getattr(library, name) for name in WANTED)))
    for name, wanted in WANTED.items():
        found = getattr(library, name)(8)
        assert type(found) is torch.Tensor, name
        assert torch.equal(found, wanted), name


@pytest.mark.parametrize("by_us", [True, False], ids=["by planning around it", "by somebody else"])
def test_caches_that_are_frozen_hold_tensors_with_data(
    library: ModuleType, by_us: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of another shape is planned anew while the first call is compiled."""
    monkeypatch.setattr(heap, "_setting_aside", int(by_us))
    gc.freeze()
    planned_as_unplanned(Adding(library.positions))
    assert gc.get_freeze_count()
    assert torch.equal(library.positions(8), WANTED["positions"])


def test_an_object_and_a_nested_result_hold_tensors_with_data(library: ModuleType) -> None:
    planned_as_unplanned(Adding(lambda n: library.TABLES.get(n) + library.pair(n)[1]["ones"]))
    assert torch.equal(library.TABLES.get(8), torch.arange(8.0))
    zeros, more = library.pair(8)
    assert torch.equal(zeros, torch.zeros(8))
    assert torch.equal(more["ones"], torch.ones(8))


def test_a_cache_that_is_filled_before_a_step_fails_holds_data(library: ModuleType) -> None:
    def failing(n: int) -> torch.Tensor:
        library.in_dictionary(n)
        raise ValueError("no")

    with pytest.raises(planner.PlannerError, match="ValueError: no"):
        planner.plan(Adding(failing), torch.randn(16, 8), budget="100%")
    assert torch.equal(library.CACHE[8], torch.arange(8.0))


def test_what_a_write_adds_that_is_not_known_is_taken_out_and_said(library: ModuleType) -> None:
    ways = {
        "by one with data": torch.arange(8.0),
        "as out=": torch.arange(8.0) + 1,
        "several at once": torch.ones(8),
    }
    model = Adding(*(functools.partial(library.written, how=how) for how in ways))
    with pytest.warns(planner.PlanWarning, match="it was taken out") as said:
        planner.plan(model, torch.randn(16, 8), budget="100%", backend="replay")
    assert sum("it was taken out" in str(w.message) for w in said) == len(ways)
    assert library.CACHE == {}
    for how, wanted in ways.items():
        assert torch.equal(library.written(8, how), wanted), how


def test_what_depends_on_data_is_taken_out_and_said(library: ModuleType) -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            library.CACHE["hidden"] = library.TABLES.held = hidden
            return self.second(torch.relu(hidden))

    with pytest.warns(planner.PlanWarning) as said:
        planner.plan(Keeping(), torch.randn(16, 8), budget="100%", solver="sqrt_n")
    assert [w for w in said if f"data in {library.__name__}." in str(w.message)]
    assert library.CACHE == {}
    assert library.TABLES.held is None


@pytest.mark.parametrize("size", [None, 4])
def test_what_functions_remember_by_themselves_is_no_loss(size: int | None) -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.angles = torch.randn(16, 8)

        @functools.lru_cache(maxsize=size)  # noqa: B019  models do that
        def turned(self) -> tuple[torch.Tensor, torch.Tensor]:
            return self.angles.sin(), self.angles.cos()

        @functools.lru_cache(maxsize=size)  # noqa: B019
        def table(self, n: int) -> torch.Tensor:
            sines, cosines = self.turned()
            return sines[:n] + cosines[:n]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.first(x)) + self.table(len(x)))

    planned_as_unplanned(Remembering())


@pytest.mark.parametrize("where", ["in the graph", "after a break", "in a part that is not captured"])
def test_a_file_that_the_forward_imports_first_has_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    name = f"constants_of_others_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text("import torch\nTABLE = torch.rand(8)\n")
    monkeypatch.syspath_prepend(tmp_path)

    space = {"torch": torch}
    before = "torch._dynamo.graph_break()" if where == "after a break" else "pass"
    exec(f"def table(n):\n    {before}\n    import {name}\n    return {name}.TABLE", space)
    table = space["table"]
    KEPT.append(table)
    planned_as_unplanned(Adding(torch._dynamo.disable(table) if "not captured" in where else table))
    found = sys.modules.pop(name).TABLE
    assert type(found) is torch.Tensor
    assert bool(((found >= 0) & (found < 1)).all())
