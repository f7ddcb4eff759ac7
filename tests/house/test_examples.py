"""The examples of trainers: with a plan they train to the weights that they train to without."""

import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.side_by_side import no_plan_warnings

_EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    ["hugging_face", "accelerate_loop", "lightning_module", "diffusers_unet", "trl_sft", "sentence_pairs"],
)
def test_an_example_trains_to_the_same_weights(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # there is one in a process
    spec = importlib.util.spec_from_file_location(f"example_{name}", _EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    # Dynamo looks the module of a function up by its name.
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    train = functools.partial(module.train, packing=True) if name == "trl_sft" else module.train
    theirs: torch.nn.Module = train(None, steps=3)
    capfd.readouterr()
    budget = {"diffusers_unet": "80%", "trl_sft": "100%"}.get(name, "60%")
    with no_plan_warnings():
        ours: torch.nn.Module = train(budget, steps=3)
    assert f"planned for {budget}" in capfd.readouterr().err
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for (key, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
