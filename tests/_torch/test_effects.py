"""Operators that are called for their effects, as the checks of factorisations are."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

from planner._torch.joint import effects
from planner.errors import CaptureError
from tests.side_by_side import assert_trains_alike, counting_runs, no_plan_warnings, plan_of, steps


class Factors(nn.Module):
    """Every layer makes positive definite matrices and takes them apart in one of several ways."""

    def __init__(self, *uses: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.uses = uses
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in uses)

    def forward(self, x: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor:
        for layer, use in zip(self.layers, self.uses, strict=True):
            h = torch.tanh(layer(x)).reshape(-1, 4, 4)
            x = x + torch.tanh(use(h @ h.mT + torch.diag(diagonal)).reshape(x.shape[0], -1)[:, :16])
        return x.square().mean()


def _inverse_of_factor(matrix: torch.Tensor) -> torch.Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(matrix))


def _sampled(matrix: torch.Tensor) -> torch.Tensor:
    drawn = torch.distributions.MultivariateNormal(torch.zeros(4), matrix).rsample((4,))
    return drawn.movedim(0, 1)


@pytest.mark.heavy
def test_factorisations_that_check_themselves_are_planned() -> None:
    torch.manual_seed(0)
    model = Factors(torch.linalg.cholesky, torch.Tensor.inverse, _inverse_of_factor, _sampled)
    args = (torch.randn(64, 16), torch.full((4,), 3.0))
    plan = assert_trains_alike(model, args, steps(args), expected_runs=2)
    assert plan.coverage == "one-graph"


@pytest.mark.heavy
def test_a_matrix_without_a_factor_is_eagers_error() -> None:
    torch.manual_seed(0)
    model = Factors(torch.linalg.cholesky, torch.Tensor.inverse)
    x = torch.randn(64, 16)
    twin = copy.deepcopy(model)
    plan_of(model, (x, torch.full((4,), 3.0))).apply(model)
    with pytest.raises(torch.linalg.LinAlgError) as wanted:
        twin(x, torch.full((4,), -100.0))
    with counting_runs() as runs, no_plan_warnings():
        model(x, torch.full((4,), 3.0)).backward()
        with pytest.raises(torch.linalg.LinAlgError) as found:
            model(x, torch.full((4,), -100.0))
    assert str(found.value) == str(wanted.value)
    assert (runs.captures, runs.forward) == (1, 2)


class Counting(nn.Module):
    """Layers around an operator of a user's that is registered as one with effects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(torch.ops.planner_tests.counted_calls(torch.sigmoid(layer(x))))
        return x.square().mean()


def test_what_has_effects_has_them_once() -> None:
    calls: list[int] = []
    with torch.library._scoped_library("planner_tests", "FRAGMENT"):

        @torch.library.custom_op("planner_tests::counted_calls", mutates_args=())
        def counted(x: torch.Tensor) -> torch.Tensor:
            calls.append(x.numel())
            return x * 2

        counted.register_fake(torch.empty_like)
        counted.register_autograd(lambda _context, gradient: gradient * 2)
        counted.register_effect(torch.library.EffectType.ORDERED)
        torch.manual_seed(0)
        model, x = Counting(), torch.randn(64, 16)
        plan_of(model, (x,)).apply(model)
        calls.clear()
        with counting_runs() as runs, no_plan_warnings():
            model(x).backward()
    assert runs.backward == 1
    assert calls == [x.numel()] * 3


def test_tokens_that_are_left_are_an_error_that_says_what_to_do() -> None:
    graph = torch.fx.Graph()
    token = graph.placeholder("token")
    token.meta["desc"] = effects.ForwardTokenAOTInput(0)
    graph.call_function(torch.ops.higher_order.with_effects, (token, torch.ops.higher_order.print, "text"))
    graph.output((token,))
    with pytest.raises(CaptureError, match=r"print.*torch\.compiler\.disable"):
        effects.refuse_tokens(torch.fx.GraphModule(nn.Module(), graph))
