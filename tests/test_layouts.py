"""Results without data have the strides of the kernels' results, also where the inputs are transposed."""

import itertools

import pytest
import torch
import torch.nn as nn

import planner
from planner._torch import fake
from planner._torch.tracing.meta_patches import layouts_of_kernels

aten = torch.ops.aten


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("training", [True, False])
def test_batch_normalisations_are_laid_out_as_on_the_cpu(rank: int, training: bool) -> None:
    for order in itertools.permutations(range(rank)):
        x = torch.randn([2, 3, 4, 5][:rank]).permute(order)
        scale = torch.ones(x.shape[1])
        forward = (x, scale, scale, scale.clone(), scale.clone(), training, 0.1, 1e-5)
        results = aten.native_batch_norm.default(*forward)
        for gradient in (torch.randn(x.shape), torch.randn_like(x)):
            backward = (gradient, x, scale, scale, scale, *results[1:], training, 1e-5, [True, True, True])
            for operator, arguments in (
                (aten.native_batch_norm.default, forward),
                (aten.native_batch_norm_backward.default, backward),
            ):
                mode = fake.fake_mode()
                fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
                with mode, layouts_of_kernels():
                    found = operator(*fakes)[0]
                assert found.stride() == operator(*arguments)[0].stride(), (operator, x.stride())


class Patches(nn.Module):
    """Normalises transposed activations, as forecasting models do, which a linear layer then has to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.ModuleList(nn.Linear(16, 32) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(3))
        self.narrow = nn.ModuleList(nn.Linear(32, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for widen, norm, narrow in zip(self.widen, self.norms, self.narrow, strict=True):
            y = norm(widen(x).transpose(1, 2)).transpose(1, 2)
            x = x + narrow(y).tanh() + (y * y)[..., :16]
        return x.square().mean()


@pytest.mark.parametrize(("solver", "budget"), [("none", "500%"), ("sqrt_n", "min")])
@pytest.mark.heavy
def test_copies_of_transposed_results_are_predicted(solver: str, budget: str) -> None:
    torch.manual_seed(0)
    model, x = Patches().train(), torch.randn(32, 24, 16)
    plan = planner.plan(model, (x,), budget=budget, solver=solver)
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes
    assert report.baseline_measured_dynamic_peak_bytes == plan.baseline.dynamic_peak_bytes
