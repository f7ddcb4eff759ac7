"""Recurrent layers on a GPU, as far as no GPU is needed: they are on the CPU, and taken to be on one."""

from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner._torch.cuda import recurrent_state
from planner._torch.cuda.recurrent_state import make_dropout_states
from planner._torch.fake import fake_mode
from planner._torch.tracing.breaks import calls_left_out
from planner.training_step.recorder import StepRecorder

pytestmark = pytest.mark.heavy


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


@pytest.mark.graphs
@pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.LSTM, {"dropout": 0.2}), (nn.GRU, {"bidirectional": True}), (nn.RNN, {})],
)
def test_they_run_as_written_and_the_rest_is_planned(
    kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_left_out, "runs_on_gpu", lambda module: isinstance(module, nn.RNNBase))
    torch.manual_seed(0)
    module, x = Layers(kind, **options), torch.randn(4, 8, 16)
    plan = planner.plan(module, args=(x,), budget="min", costs="roofline")
    assert plan.coverage == "partly-captured"
    assert any("a recurrent layer on a GPU" in note for note in plan.notes)
    report = planner.verify(module, args=(x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.predicted_dynamic_peak_bytes == report.measured_dynamic_peak_bytes


def test_only_those_whose_weights_are_on_a_gpu() -> None:
    assert not calls_left_out.runs_on_gpu(nn.LSTM(4, 4))
    with fake_mode():
        weights = nn.ParameterList([torch.empty(4, 4, device="cuda")])
    layer = nn.LSTM(4, 4)
    layer._parameters["weight_ih_l0"] = weights[0]
    assert calls_left_out.runs_on_gpu(layer)
    assert not calls_left_out.runs_on_gpu(nn.Linear(4, 4))
    layer.num_layers, layer.dropout = 2, 0.5
    make_dropout_states(layer)  # without data there is nothing to make


def test_what_comes_before_the_operator_runs_alone() -> None:
    with fake_mode():
        x, state = torch.empty(1, 1, 1, device="cuda"), torch.empty(8, dtype=torch.uint8, device="cuda")
        with pytest.raises(recurrent_state._ReachedError), recurrent_state._UpToOperator():
            torch._cudnn_rnn(
                *((x + 1), [x, x], 2, None, x, x, 2, 1, 0, 1, False, 0.5, True, False, [], state)
            )


def _backward(x: torch.Tensor, weight: list[torch.Tensor], *_: Any) -> Any:
    """As cuDNN's: gradients of weights are views of one buffer, and those of states are there unasked for."""
    buffer = torch.zeros(sum(w.numel() for w in weight) + 100)
    parts = buffer[100:].split([w.numel() for w in weight])
    views = [part.view_as(w) for part, w in zip(parts, weight, strict=True)]
    return torch.empty_like(x), torch.empty(7), torch.empty(9), views


def test_gradients_of_weights_are_recorded_as_one_buffer_and_what_nobody_asks_for_is_not() -> None:
    x, weights = torch.zeros(3, 2, 4), [torch.zeros(8, 4), torch.zeros(8, 2)]
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_cudnn_rnn_backward", _backward, "CPU")
        recorder = StepRecorder(fake_mode(), [x, *weights])
        with recorder:
            form = [2, 2, 0, 1, False, 0.0, True, False, [], None, x, [True, False, False, True]]
            result = torch.ops.aten._cudnn_rnn_backward(x, weights, 2, x, x, x, x, x, None, None, *form)
            kept = result[3][0].detach()
            del result
            kept.add(1.0)
    (call, *_) = recorder.recording.events
    sizes = [recorder.recording.storages[i].bytes for i in call.allocates]
    assert sizes == [x.numel() * 4, (100 + 32 + 16) * 4]
    died = [recorder.recording.storages[i].died_after for i in call.allocates]
    assert died == [1, None]


def test_the_state_of_dropout_takes_the_place_of_the_last() -> None:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_cudnn_init_dropout_state", lambda *_, **__: torch.zeros(64), "CPU")
        recorder = StepRecorder(fake_mode(), [])
        with recorder:
            state = torch.ops.aten._cudnn_init_dropout_state(0.5, True, 1, dtype=torch.uint8, device="cpu")
            state.add(1.0)
    assert [len(event.allocates) for event in recorder.recording.events] == [0, 1]
    assert recorder.recording.events[1].reads == (-1,)
