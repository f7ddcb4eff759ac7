"""Files that keep plans: on full disks, and in folders that are only read."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner.runtime.install import installed_plan
from tests.side_by_side import Layers, layers

pytestmark = pytest.mark.heavy
BY: dict[str, Any] = {"budget": "min", "solver": "sqrt_n"}


def _model() -> nn.Module:
    return layers(lambda: Layers(2))[0]


def test_a_plan_that_cannot_be_kept_is_trained_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("planner.planfile.atomic_file.os.fsync", full)
    model = planner.auto_checkpoint(_model(), cache=tmp_path / "plan.json", **BY)
    model(torch.randn(64, 32)).backward()
    said = f"; {tmp_path}/plan.json: cannot be written: No space left on device: it will be planned again\n"
    assert capsys.readouterr().err.endswith(said)
    assert installed_plan(model) is not None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_only_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: Any) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    planner.auto_checkpoint(_model(), torch.randn(64, 32), cache=tmp_path / "plan.json", **BY)
    monkeypatch.setattr("planner.planfile.atomic_file.os.open", read_only)
    model = planner.auto_checkpoint(_model(), cache=tmp_path / "plan.json", **BY)
    model(torch.randn(64, 32)).backward()
    assert "Layers trains by" in capsys.readouterr().err
    with pytest.raises(planner.PlanFileError, match=r"other.json: cannot be written: Read-only file system"):
        planner.auto_checkpoint(_model(), cache=tmp_path / "other.json", **BY)
