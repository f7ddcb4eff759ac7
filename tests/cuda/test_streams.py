"""Values that are made again on one stream and read on another, with streams that stand in."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner._torch.cuda.streams import MadeOn


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
