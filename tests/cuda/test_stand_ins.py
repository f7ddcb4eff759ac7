"""What only a GPU has, with streams and states that stand in."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner._torch.cuda.recorder import at_same_address
from planner._torch.cuda.streams import MadeOn
from planner._torch.tracing import generator_states


def test_a_stream_waits_for_the_one_that_made_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, recorded = list[Any](), list[Any]()
    here: Any = SimpleNamespace(name="here", wait_stream=waited.append)
    other: Any = SimpleNamespace(name="other", wait_stream=waited.append)
    value: Any = SimpleNamespace(is_cuda=True, device="cuda:0", record_stream=recorded.append)
    made = MadeOn()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: other)
    made.note(1, value)
    made.wait(1, value)
    assert not waited
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: here)
    for number, tensor in ((2, value), (1, None), (1, value)):
        made.wait(number, tensor)
    assert (waited, recorded) == ([other], [here])


def test_on_a_cpu_nothing_is_noted() -> None:
    made = MadeOn()
    made.note(1, torch.ones(2))
    assert not made._streams


def test_a_state_that_has_not_changed_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting it would have cuDNN make its dropout state anew."""
    state, put = torch.arange(4), list[torch.Tensor]()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", put.append)
    generator_states._Cuda.set_rng_state(state.clone())
    assert not put
    generator_states._Cuda.set_rng_state(state + 1)
    assert len(put) == 1


def test_a_lazy_conjugate_is_one_at_the_same_address() -> None:
    tensor = torch.randn(3, dtype=torch.complex64).conj()
    there = at_same_address(tensor)
    assert there.data_ptr() == tensor.data_ptr()
    assert torch.equal(there, tensor)
