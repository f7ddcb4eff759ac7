"""Models that quantisation prepares for training: what it puts around modules is traced, not left out."""

import copy
import warnings

import pytest
import torch
import torch.nn as nn
from torch.ao.quantization import (
    disable_observer,
    fuse_modules_qat,
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    prepare_qat,
)
from torch.ao.quantization.quantize_fx import prepare_qat_fx

import planner
from planner.verification.measure import measure_peak

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.heavy,
]


class _Classifier(nn.Module):
    """Convolutions, normalisation, and a number for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU())
        self.head = nn.Linear(8, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(images)).mean((2, 3))).square().mean()


def _prepared(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = _Classifier().train()
    if kind == "traced":
        mapping = get_default_qat_qconfig_mapping("fbgemm")
        prepared: nn.Module = prepare_qat_fx(model, mapping, (torch.randn(4, 3, 16, 16),))
        return prepared
    version = {"fused": 1, "not fused": 0}[kind]
    model.qconfig = get_default_qat_qconfig("fbgemm", version=version)
    return prepare_qat(fuse_modules_qat(model, [["first.0", "first.1", "first.2"], ["second.0", "second.1"]]))


def _trained(model: nn.Module, batches: torch.Tensor) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for n, batch in enumerate(batches):
        if n == 3:
            model.apply(disable_observer)
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _are_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("kind", ["fused", "not fused", "traced"])
def test_the_weights_and_what_was_observed_are_those_of_the_unplanned_steps(kind: str) -> None:
    theirs, batches = _prepared(kind), torch.randn(4, 4, 3, 16, 16)
    with torch.no_grad():
        theirs(batches[0])
    ours = copy.deepcopy(theirs)
    plan = planner.plan(ours, batches[0], budget="min", optimizer="sgd")
    assert plan.recomputed_operations
    assert len(plan.graphs) == 1 or kind == "not fused"
    report = planner.verify(ours, batches[0], plan=plan)
    assert report.ok, report.problems
    plan.apply(ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        found = _trained(ours, batches[:3])
    _are_equal(found, _trained(theirs, batches[:3]))


@pytest.mark.parametrize("kind", ["fused", "traced"])
def test_what_observes_each_channel_first_finds_out_how_many_there_are(kind: str) -> None:
    theirs, batches = _prepared(kind), torch.randn(4, 4, 3, 16, 16)
    ours = copy.deepcopy(theirs)
    plan = planner.plan(ours, batches[0], budget="min", optimizer="sgd")
    plan.apply(ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error", planner.PlanWarning)
        found = copy.deepcopy(_trained(ours, batches))
    _are_equal(found, _trained(theirs, batches))
    peak = measure_peak(lambda: ours(batches[0]).backward(), "cpu").peak_bytes
    assert peak <= plan.predicted.dynamic_peak_bytes
