"""What is counted, and said, of cuDNN's workspaces on a GPU that is not here."""

import pytest
import torch
from torch import nn

import planner
from planner.costs.cudnn_workspace import CAP, runs_in_cudnn, workspace_cap
from planner.training_step.call import Call
from planner.user_plan import Plan

MIB = 1 << 20


class Small(nn.Module):
    """Two convolutions, and one of every channel by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.each = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8)
        self.last = nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.each(self.first(x).relu()).relu()).square().mean()


def planned(device: str = "A100-80GB", budget: str = "1GiB") -> Plan:
    return planner.plan(Small(), (torch.randn(2, 3, 16, 16),), budget=budget, device=device, solver="sqrt_n")


def test_a_plan_says_what_it_cannot_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CAP, raising=False)
    plan = planned()
    (note,) = plan.notes
    assert note.startswith("4 convolutions are left to cuDNN")  # two, forward and backward
    assert "not counted" in note
    assert note.partition("which is at most ")[2].startswith("78.")  # GiB, without the context
    assert plan.predicted.dynamic_peak_bytes < MIB


def test_where_a_rule_is_known_it_counts_and_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CAP, raising=False)
    (note,) = planned("H100").notes
    assert "each counts with what a rule says that fits cuDNN 9.19 on an H200: PyTorch takes" in note
    assert "not counted" not in note


@pytest.mark.parametrize("device", ["cpu", "MI300X"])
def test_where_there_is_no_cudnn_it_says_nothing(device: str) -> None:
    assert not [note for note in planned(device).notes if "cuDNN" in note]


def test_the_most_that_cudnn_may_ask_for_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    without = planned().predicted.dynamic_peak_bytes
    monkeypatch.setenv(CAP, "64")
    plan = planned()
    assert 64 * MIB < plan.predicted.dynamic_peak_bytes <= without + 64 * MIB
    assert plan.baseline.dynamic_peak_bytes > 64 * MIB
    assert plan.notes[0].endswith(f"each counts with the most that {CAP} allows, 64.0 MiB")
    with pytest.raises(planner.InfeasibleBudget):
        planned(budget="560MiB")  # of which the context is 500


@pytest.mark.parametrize(
    ("text", "expected"), [("", None), ("256", 256 * MIB), ("0", 0), ("-1", None), ("much", None)]
)
def test_the_environment_is_read_as_cudnn_does(
    text: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CAP, text)
    assert workspace_cap() == expected


def convolution(image: torch.Tensor, weight: torch.Tensor, groups: int, transposed: bool = False) -> Call:
    rest = (None, [1, 1], [0, 0], [1, 1], transposed, [0, 0], groups)
    return Call(torch.ops.aten.convolution.default, (image, weight, *rest))


def test_convolutions_of_single_channels_are_pytorchs_own() -> None:
    image, weight = torch.empty(2, 8, 16, 16), torch.empty(8, 1, 3, 3)
    assert not runs_in_cudnn(convolution(image, weight, 8))
    assert runs_in_cudnn(convolution(image, torch.empty(8, 8, 3, 3), 1))
    assert runs_in_cudnn(convolution(image, torch.empty(8, 2, 3, 3), 4))
    assert runs_in_cudnn(convolution(image, weight, 8, transposed=True))
    assert runs_in_cudnn(convolution(image.half(), weight.half(), 8))
    last = torch.channels_last
    assert runs_in_cudnn(convolution(image.to(memory_format=last), weight, 8))
    assert not runs_in_cudnn(Call(torch.ops.aten.add.Tensor, (image, image)))
