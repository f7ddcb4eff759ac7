"""Batch normalisation by cuDNN, as eager's on a GPU, stays cuDNN's in a plan; traced here without data."""

import pytest
import torch
import torch.nn as nn
from torch._dispatch.python import enable_python_dispatcher

import planner
from planner._torch.cuda.batch_norm import cudnn_as_eager, without_statistics
from planner.user_plan import Plan

aten = torch.ops.aten


class Normalised(nn.Module):
    """Two convolutions and what eager calls for ``nn.BatchNorm2d`` on a GPU.

    Args:
        tracked: Whether there are running statistics.
    """

    def __init__(self, tracked: bool = True) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=tracked)
        self.last = nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, norm = self.first(x), self.norm
        mean, variance = norm.running_mean, norm.running_var
        assert norm.momentum is not None
        y, _, _, _ = torch.cudnn_batch_norm(
            x, norm.weight, norm.bias, mean, variance, self.training, norm.momentum, norm.eps
        )
        return self.last(y.relu()).square().mean()


def planned(model: nn.Module) -> Plan:
    with torch.device("meta"):
        x = torch.empty(8, 3, 16, 16)
    return planner.plan(
        model.to("meta"), (x,), budget="100GiB", training=model.training, recompute=["*batch_norm*"]
    )


def names(plan: Plan) -> list[str]:
    return [op.name.split(" ")[0] for op in plan.graphs[0].ops]


def test_it_is_planned_as_what_says_that_it_updates_statistics() -> None:
    plan = planned(Normalised().train())
    found = names(plan)
    assert "aten._batch_norm_with_update_functional.default" in found
    assert "aten.batch_norm_backward.default" in found
    assert not any("native_batch_norm" in name for name in found)
    again = {found[i] for i in plan.graphs[0].recomputed}
    assert "aten._batch_norm_with_update_functional.default" in again


@pytest.mark.parametrize("case", ["no statistics", "evaluation"])
def test_what_updates_nothing_stays_and_may_run_again(case: str) -> None:
    plan = planned(Normalised(tracked=case == "evaluation").train(case != "evaluation"))
    found = names(plan)
    assert "aten.cudnn_batch_norm.default" in found
    assert "aten.cudnn_batch_norm.default" in {found[i] for i in plan.graphs[0].recomputed}


def test_it_runs_again_by_cudnn_without_statistics() -> None:
    arguments = ("x", "w", "b", "mean", "variance", 0.1, 1e-5)
    operator, given = without_statistics(aten._batch_norm_with_update_functional.default, arguments)
    assert operator is aten.cudnn_batch_norm.default
    assert given == ("x", "w", "b", None, None, True, 0.1, 1e-5)


def test_results_are_those_of_the_kernel_that_updates() -> None:
    """On the CPU, where both are the native one."""
    x, weight, bias = torch.randn(4, 8, 5, 5, requires_grad=True), torch.rand(8), torch.rand(8)
    mean, variance = torch.zeros(8), torch.ones(8)
    wanted = torch.batch_norm(x, weight, bias, mean.clone(), variance.clone(), True, 0.1, 1e-5, False)
    with cudnn_as_eager(), enable_python_dispatcher():
        found = torch.cudnn_batch_norm(x, weight, bias, mean, variance, True, 0.1, 1e-5)[0]
    assert torch.equal(found, wanted)
    assert not torch.equal(mean, torch.zeros(8))
    gradients = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (found, wanted)]
    assert torch.equal(*gradients)


def test_afterwards_everything_is_as_it_was() -> None:
    before = dict(aten.cudnn_batch_norm.default.py_kernels)
    with pytest.raises(RuntimeError, match="stop"), cudnn_as_eager():
        raise RuntimeError("stop")
    assert aten.cudnn_batch_norm.default.py_kernels == before
