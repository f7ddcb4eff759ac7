"""Parameters of a planned module can be exchanged in place: there are no weak references to them."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from tests.side_by_side import Layers, assert_same, layers, left_by, plan_of, steps

pytestmark = pytest.mark.heavy

Exchange = Callable[[nn.Module], object]


class Twice(Layers):
    """Uses its weights twice, in graphs of their own."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = super().run(x)
        torch._dynamo.graph_break()
        return super().run(x)


@pytest.fixture
def _swapped() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def _one_by_one(model: nn.Module) -> None:
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 2))


def _loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


@pytest.mark.usefixtures("_swapped")
@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
@pytest.mark.parametrize(
    ("exchange", "first"),
    [
        (_one_by_one, 0),
        *(pytest.param(way, 2, marks=pytest.mark.heavy) for way in (_loaded, nn.Module.double)),
    ],
)
def test_before_steps_and_between_them(exchange: Exchange, first: int) -> None:
    model, (x,), _ = layers()
    twin = copy.deepcopy(model)
    plan_of(model, (x,)).apply(model)

    def loop(network: Any) -> Any:
        before = steps((x,), first)(network) if first else ()
        network.zero_grad()
        exchange(network)
        return before, steps((x.to(next(network.parameters()).dtype),))(network)

    assert_same(left_by(model, loop), left_by(twin, loop))


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (Layers, {"regions": ["layers.*"]}),
        pytest.param(Twice, {}, marks=pytest.mark.heavy),
        pytest.param(Layers, {"optimizer": "adamw"}, marks=pytest.mark.heavy),
    ],
)
@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
def test_whatever_was_planned(build: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    model, (x,), _ = layers(build)
    plan_of(model, (x,), **options).apply(model)
    for rows in (64, 48):
        model(x[:rows]).backward()
    model.zero_grad()
    _one_by_one(model)


def test_a_module_that_was_planned_at_its_first_call() -> None:
    model, (x,), _ = layers()
    planner.auto_checkpoint(model, budget="min", solver="sqrt_n")
    model(x).backward()
    model.zero_grad()
    _one_by_one(model)
