"""What steps of modules with a plan compute: the same as without."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner import PlanWarning
from tests.installed import assert_equal, gpt, plan_for
from tests.side_by_side import assert_same, layers, left_by, peak_of, plan_of, steps


@pytest.mark.heavy
def test_a_module_called_twice_in_one_step() -> None:
    model, args, _ = gpt()
    twin = copy.deepcopy(model)
    plan_for().apply(model)
    other = args[::-1]
    for network in (model, twin):
        torch.manual_seed(2)
        (network(*args) + network(*other)).backward()
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.heavy
def test_gradients_that_are_there_count_as_resident() -> None:
    model, args, kwargs = gpt()
    model(*args).backward()
    plan = planner.plan(model, args, kwargs, budget="500%", solver="none")
    assert plan.resident.gradient_bytes == sum(p.nbytes for p in model.parameters())


def test_retain_graph_and_gradients_of_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 8))
    x = torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(1)
    model(x).square().sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad, None
    planner.auto_checkpoint(model, (x,), budget="min", solver="sqrt_n", loss=lambda y: y.square().sum())
    torch.manual_seed(1)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    assert torch.equal(x.grad, expected)
    loss.backward()
    assert torch.equal(x.grad, 2 * expected)


@pytest.mark.heavy
def test_frozen_and_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(30, 16)
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.layers[0].requires_grad_(False)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.words(words)
            for layer in self.layers:
                x = F.gelu(layer(x))
            return F.cross_entropy((x @ self.words.weight.T).flatten(0, 1), words.flatten())

    torch.manual_seed(0)
    model, args = Tied(), (torch.randint(0, 30, (4, 8)),)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert model.layers[0].weight.grad is None


@pytest.mark.heavy
def test_autocast_is_honoured_in_recomputation() -> None:
    model, args, kwargs = gpt()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = planner.plan(model, args, kwargs, budget="min", solver="sqrt_n")
        report = planner.verify(model, args, kwargs, plan=plan, repeats=0)
    assert plan.graphs[0].recomputed
    assert report.ok, report.problems
    assert plan.model.autocast == ["cpu:bfloat16"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.heavy
def test_dropout_rounds_as_in_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(p), nn.Tanh()) for p in (0.1, 0.039, 0.5)]
    model, args = nn.Sequential(*layers).to(dtype), (torch.randn(32, 16, dtype=dtype),)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems


@pytest.mark.heavy
def test_a_plan_that_was_tampered_with_cannot_change_results() -> None:
    torch.manual_seed(0)
    norm = torch.nn.utils.parametrizations.spectral_norm
    model, args = nn.Sequential(norm(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 4)), (torch.randn(8, 16),)
    plan = planner.plan(model, args, budget="500%", solver="none")
    graph = plan.graphs[0]
    power_iteration = next(i for i, op in enumerate(graph.ops) if "mv" in op.name)
    changed = graph.model_copy(update={"backward": [power_iteration, *graph.backward]})
    tampered = plan.model_copy(update={"graphs": [changed]})
    with pytest.warns(PlanWarning, match="without recomputation"):
        report = planner.verify(model, args, plan=tampered, repeats=0)
    assert report.ok, report.problems


def test_what_another_graph_has_at_the_same_place_says_nothing_of_the_plan() -> None:
    model, args, _ = layers()
    plan = plan_of(model, args)
    plan.apply(model)
    for layer in model.layers:  # type: ignore[union-attr]
        layer[2].p = 0.0
    twin = planner.remove(copy.deepcopy(model))
    with pytest.warns(PlanWarning, match="that the plan re-runs it re-runs the"):
        ours = left_by(model, steps(args))
    assert_same(ours, left_by(twin, steps(args)))
    assert peak_of(model, args) <= plan.predicted.dynamic_peak_bytes


@pytest.mark.heavy
def test_interpolation_is_computed_as_in_eager() -> None:
    modes = ("nearest", "bilinear", "bicubic")

    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, mode in zip(self.layers, modes, strict=True):
                x = torch.tanh(layer(x))
                up = F.interpolate(x, scale_factor=2, mode=mode)
                x = F.avg_pool2d(up, 2) + x
            return x

    torch.manual_seed(0)
    model, args = Up(), (torch.randn(2, 4, 12, 12),)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    names = {op.name for op in plan.graphs[0].ops}
    assert all(any(f"upsample_{mode}" in name for name in names) for mode in modes), names
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems


@pytest.mark.heavy
def test_buffers_that_the_forward_updates_are_not_read_again() -> None:
    torch.manual_seed(0)
    norm = torch.nn.utils.parametrizations.spectral_norm
    layers = [nn.Sequential(norm(nn.Linear(32, 32)), nn.Tanh()) for _ in range(4)]
    model, args = nn.Sequential(*layers), (torch.randn(64, 32),)
    plan = planner.plan(model, args, budget="min", solver="sqrt_n")
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    joint_reads = [op.name for op in plan.graphs[0].ops if "mv" in op.name]
    assert joint_reads, "the power iteration was captured"


class _Image(torch.Tensor):
    """A tensor with another name, as torchvision's images."""


@pytest.mark.parametrize("planned", [torch.Tensor, _Image])
def test_inputs_of_a_subclass_of_tensors(planned: type[torch.Tensor]) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    model, x = nn.Sequential(*layers), torch.randn(32, 16)
    twin = copy.deepcopy(model)
    twin(x.as_subclass(_Image)).square().mean().backward()
    plan = planner.plan(
        model, (x.as_subclass(planned),), loss=lambda y: y.square().mean(), budget="min", solver="sqrt_n"
    )
    plan.apply(model)
    model(x.as_subclass(_Image)).square().mean().backward()
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
