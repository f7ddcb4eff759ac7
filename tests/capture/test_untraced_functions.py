"""Functions that PyTorch cannot trace, for an error of its own, run as written; what they call is planned."""

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn as nn

import planner
from planner.errors import PlanWarning
from tests.residual_block import Block


class Degrees(tuple[int, ...]):
    """Cannot be asked for its length, as the irreducible representations of e3nn: Dynamo asks it."""

    def __len__(self) -> int:
        raise NotImplementedError


class Untraced(nn.Module):
    """Its forward has graphs, and fails when Dynamo says under what they hold."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.degrees = Degrees((2, 1))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for degree in self.degrees:
            x = x * degree
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Inside(nn.Module):
    """One of two parts cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.untraced = Block(), Untraced(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.untraced(self.plain(x))


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        yield


@pytest.mark.graphs
@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("kind", [Untraced, Inside])
def test_what_an_untraced_function_calls_is_planned(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(32, 16, requires_grad=True)
    plan = planner.plan(model, (x,), budget="min")
    assert plan.overhead > 0
    assert "Untraced.forward" in plan.untraced
    said = [note for note in plan.notes if "tracing Untraced.forward failed" in note]
    assert len(said) == 1
    assert "test_untraced_functions.py" in said[0]
    report = planner.verify(model, (x,), plan=plan, repeats=1)
    assert not report.problems
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes
    assert report.measured_dynamic_peak_bytes < report.baseline_measured_dynamic_peak_bytes


@pytest.mark.usefixtures("no_warnings")
def test_a_plan_from_a_file_knows_what_is_not_traced(tmp_path: object) -> None:
    torch.manual_seed(0)
    model, x = Untraced(), torch.randn(32, 16)
    plan = planner.Plan.load(_saved(planner.plan(model, (x,), budget="min"), f"{tmp_path}/plan.json"))
    planned = copy.deepcopy(model)
    plan.apply(planned)
    for _ in range(3):
        for trained in (model, planned):
            trained.zero_grad()
            trained(x).backward()
    for theirs, ours in zip(model.parameters(), planned.parameters(), strict=True):
        assert theirs.grad is not None
        assert ours.grad is not None
        assert torch.equal(theirs.grad, ours.grad)


@torch.library.custom_op("planner_tests::sum_of_many", mutates_args=())
def sum_of_many(terms: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(terms).sum(0)


class SumsMany(nn.Module):
    """Calls an operator without a shape function, with many tensors, which the error lists."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.weight = Block(), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            added = torch.ops.planner_tests.sum_of_many([x * number for number in range(100)])
        return (self.block(x) * added * self.weight).square().mean()


@pytest.mark.graphs
@pytest.mark.skipif(torch.__version__ >= (2, 15), reason="the operator is a graph break there, and no error")
def test_a_long_error_is_shortened() -> None:
    plan = planner.plan(SumsMany(), (torch.randn(4, 16),), budget="min")
    said = [note for note in plan.notes if "tracing SumsMany.forward failed" in note]
    assert len(said) == 1
    assert said[0].endswith(" ...")
    assert len(said[0]) == 2000
    assert "SumsMany.forward" in plan.untraced


def test_what_the_plan_does_not_know_to_be_untraced_is_said() -> None:
    torch.manual_seed(0)
    model, x = Untraced(), torch.randn(32, 16)
    model.degrees = (2, 1)  # type: ignore[assignment]
    plan = planner.plan(model, (x,), budget="min")
    assert not plan.untraced
    model.degrees = Degrees((2, 1))
    plan.apply(model)
    with pytest.warns(PlanWarning, match="cannot be captured"):
        model(x).backward()


def _saved(plan: planner.Plan, path: str) -> str:
    plan.save(path)
    return path
