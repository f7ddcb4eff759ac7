"""Recurrent layers on a GPU, as far as no GPU is needed: they are on the CPU, and taken to be on one."""

from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner._torch.cuda import recurrent_state
from planner._torch.cuda.recurrent_state import find_dropout_states
from planner._torch.fake import fake_mode
from planner._torch.tracing.breaks import recurrent_layers
from planner.training_step.generators import GeneratorStates


class Layers(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        width = 16 * (2 if options.get("bidirectional") else 1)
        self.recurrent = nn.ModuleList(
            kind(size, 16, num_layers=2, batch_first=True, **options) for size in (16, width)
        )
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for layer in self.recurrent:
            x = layer(x)[0].tanh()
        return self.last(x).square().mean()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.LSTM, {"dropout": 0.2}), (nn.GRU, {"bidirectional": True}), (nn.RNN, {})],
)
def test_they_run_as_written_and_the_rest_is_planned(
    kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent_layers, "runs_on_gpu", lambda module: isinstance(module, nn.RNNBase))
    torch.manual_seed(0)
    module, x = Layers(kind, **options), torch.randn(4, 8, 16)
    plan = planner.plan(module, args=(x,), budget="min", costs="roofline")
    assert plan.coverage == "partly-captured"
    assert any("a recurrent layer on a GPU" in note for note in plan.notes)
    report = planner.verify(module, args=(x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.predicted_dynamic_peak_bytes == report.measured_dynamic_peak_bytes


def test_only_those_whose_weights_are_on_a_gpu() -> None:
    assert not recurrent_layers.runs_on_gpu(nn.LSTM(4, 4))
    with fake_mode():
        weights = nn.ParameterList([torch.empty(4, 4, device="cuda")])
    layer = nn.LSTM(4, 4)
    layer._parameters["weight_ih_l0"] = weights[0]
    assert recurrent_layers.runs_on_gpu(layer)
    assert not recurrent_layers.runs_on_gpu(nn.Linear(4, 4))
    find_dropout_states(layer)  # without data there is nothing to find
    assert not recurrent_state.dropout_states()


def test_the_state_of_dropout_is_found_among_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_mode():
        x, state = torch.empty(1, 1, 1, device="cuda"), torch.empty(8, dtype=torch.uint8, device="cuda")
        find = recurrent_state._Find()
        with pytest.raises(recurrent_state._FoundError), find:
            torch._cudnn_rnn(*(x, [x, x], 2, None, x, x, 2, 1, 0, 1, False, 0.5, True, False, [], state))
    assert find.state is state


def test_the_state_of_dropout_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.arange(4, dtype=torch.uint8)
    monkeypatch.setitem(recurrent_state._states, torch.device("cpu"), state)
    before = GeneratorStates.now()
    assert before.same_as(GeneratorStates.now())
    state.zero_()
    assert not before.same_as(GeneratorStates.now())
    before.restore()
    assert state.tolist() == [0, 1, 2, 3]
