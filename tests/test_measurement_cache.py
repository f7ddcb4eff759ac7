"""The file that remembers measured workspaces."""

import json
from pathlib import Path

import pytest

from planner.costs.workspace import OpMemory, WorkspaceMeter
from planner.training_step.call import Call
from tests.test_workspace import aten, meta


def test_a_file_is_read_once_and_again_when_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache.json"
    calls = [Call(aten.neg.default, (meta(3),)), Call(aten.abs.default, (meta(3),))]
    WorkspaceMeter("cpu", path).measure(calls[:1])
    read, original = [], json.load
    monkeypatch.setattr(json, "load", lambda file: read.append(1) or original(file))
    for _ in range(3):
        assert WorkspaceMeter("cpu", path).measure(calls[:1]) == [OpMemory(0, (12,))]
    assert len(read) == 1
    document = json.loads(path.read_text())
    (entries,) = document["environments"].values()
    entries.update({key: [7, 12] for key in entries})
    path.write_text(json.dumps(document))
    assert WorkspaceMeter("cpu", path).measure(calls[:1]) == [OpMemory(7, (12,))]
    WorkspaceMeter("cpu", path).measure(calls)
    assert WorkspaceMeter("cpu", path).measure(calls[:1]) == [OpMemory(7, (12,))]
