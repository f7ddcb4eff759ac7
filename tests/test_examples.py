"""The examples of trainers: with a plan they train to the weights that they train to without."""

import runpy
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.side_by_side import no_plan_warnings

_EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["hugging_face", "accelerate_loop", "lightning_module"])
def test_an_example_trains_to_the_same_weights(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # there is one in a process
    train = runpy.run_path(str(_EXAMPLES / f"{name}.py"))["train"]
    theirs: torch.nn.Module = train(None, steps=3)
    capfd.readouterr()
    with no_plan_warnings():
        ours: torch.nn.Module = train("60%", steps=3)
    assert "planned for 60%" in capfd.readouterr().err
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for (key, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
