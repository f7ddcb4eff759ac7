"""The memory of a step without a plan, and with torch.utils.checkpoint: estimated and measured."""

import json
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import planner
from planner.cli.commands import app
from planner.errors import CaptureError, PlanWarning
from planner.estimation.checkpointed import matching_modules
from planner.estimation.table import _label
from planner.problem.selection import SelectionError
from planner.training_step.inputs import InputError
from planner.verification.measure import measure_peak
from tests.small import small_gpt
from tests.zoo import words


def _measured(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    def step() -> object:
        output = model(*args, **kwargs)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
        return output

    step()
    model.zero_grad()
    return measure_peak(step, "cpu").peak_bytes


def _wrapped(model: torch.nn.Module, names: list[str]) -> torch.nn.Module:
    for name in names:
        part = model.get_submodule(name)
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


@pytest.mark.heavy
def test_the_unplanned_step_and_one_with_checkpoints_are_estimated() -> None:
    model, args, kwargs = small_gpt(layers=4)
    found = planner.estimate(model, args, kwargs, checkpoints=["blocks.[12]"])
    assert found.dynamic_peak_bytes == _measured(model, args, kwargs)
    assert found.checkpointed is not None
    assert found.checkpointed.modules == ("blocks.1", "blocks.2")
    measured = _measured(_wrapped(model, ["blocks.1", "blocks.2"]), args, kwargs)
    assert found.checkpointed.dynamic_peak_bytes == measured
    assert found.checkpointed.dynamic_peak_bytes < found.dynamic_peak_bytes
    assert 0 < found.checkpointed.overhead < 0.5
    assert found.gradient_checkpointing is None


@pytest.mark.heavy
def test_modules_add_up() -> None:
    model, args, kwargs = small_gpt(layers=4)
    found = planner.estimate(model, args, kwargs, optimizer="adam")
    whole, *parts = found.modules
    size = sum(p.nbytes for p in model.parameters())
    assert (whole.module, whole.parameter_bytes, whole.gradient_bytes) == ("", size, size)
    assert found.optimizer_bytes >= 2 * size
    blocks = [row for row in parts if row.module.startswith("blocks.") and row.module.count(".") == 1]
    assert len(blocks) == 4
    assert len({row.activation_bytes for row in blocks}) == 1
    assert 4 * blocks[0].activation_bytes < whole.activation_bytes
    assert whole.peak_bytes <= found.dynamic_peak_bytes
    shown = str(found)
    assert "  * x4" in shown  # under "blocks"
    assert "held for backward" in shown


@pytest.mark.parametrize(
    ("names", "above", "label"),
    [
        ([""], None, "(the model)"),
        (["a.0.x"], "a.0", "x"),
        (["a.0", "a.1"], "a", "*"),
        (["a.0.x", "a.1.x"], "a.*", "x"),
        (["a.0.x", "a.1.x"], "a.0", "a.*.x"),  # more than what is above it
    ],
)
def test_a_row_has_its_own_name_under_the_one_above(names: list[str], above: str | None, label: str) -> None:
    assert _label(names, above) == label


@pytest.mark.heavy
def test_suggested_modules_lower_the_peak_one_by_one() -> None:
    model, args, kwargs = small_gpt(layers=4)
    found = planner.suggest(model, args, kwargs, k=2)
    assert [len(one.modules) for one in found] == [1, 2]
    assert found[0].modules == found[1].modules[:1]
    before = _measured(model, args, kwargs)
    peaks = [before, *(one.dynamic_peak_bytes for one in found)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[2] < peaks[0]
    measured = _measured(_wrapped(model, list(found[1].modules)), args, kwargs)
    assert peaks[-1] == measured


class _Head(nn.Module):
    """Layers in a list, and logits that are larger than all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)
        )
        self.head = nn.Linear(8, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).logsumexp(1).sum()


def test_only_modules_that_are_called_are_suggested() -> None:
    found = planner.suggest(_Head(), (torch.randn(64, 8),), k=3)
    assert {name for one in found for name in one.modules} == {"layers.0", "layers.1", "layers.2"}
    peaks = [one.dynamic_peak_bytes for one in found]
    assert peaks == sorted(set(peaks), reverse=True)


class _Appending(nn.Module):
    """A layer that appends to a list of its caller's, as attention does to a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        seen.append(x)
        return x + self.mlp(x) * torch.cat(seen, 1).sigmoid().mean()


class _Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Appending() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for layer in self.layers:
            x = layer(x, seen)
        return torch.stack(seen).square().sum() + x.square().sum()


@pytest.mark.heavy
def test_what_cannot_run_twice_is_not_suggested_and_an_error_says_so() -> None:
    model, args = _Cached(), (torch.randn(64, 8),)
    torch.manual_seed(0)
    with pytest.warns(PlanWarning, match=r"not suggested are layers\.\d and the like.*use_cache = False"):
        found = planner.suggest(model, args, k=3)
    assert found
    assert all(name.endswith(".mlp") for one in found for name in one.modules)
    assert found[-1].dynamic_peak_bytes == _measured(_wrapped(model, list(found[-1].modules)), args, {})
    with pytest.raises(CaptureError, match=r"with torch\.utils\.checkpoint around layers\.1: .*use_cache"):
        planner.estimate(_Cached(), args, checkpoints=["layers.1"])


def test_a_module_of_two_names_has_either() -> None:
    model = nn.Module()
    model.a = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.b = model.a
    assert matching_modules(model, ["b"]) == ["b"]
    assert matching_modules(model, ["*"]) == ["a"]
    assert matching_modules(model, ["b", "a"]) == ["b"]


def test_names_that_match_nothing_are_refused_before_the_long_work() -> None:
    model, args, kwargs = small_gpt(layers=4)
    with pytest.raises(SelectionError, match=r"'block\.1'.*near to it are blocks\.1"):
        planner.estimate(model, args, kwargs, checkpoints=["block.1"])
    with pytest.raises(SelectionError, match=r"'blocks', a container .* as 'blocks\.\*'"):
        planner.estimate(model, args, kwargs, checkpoints=["blocks"])
    with pytest.raises(ValueError, match="k=0"):
        planner.suggest(model, args, kwargs, k=0)
    with pytest.raises(InputError, match="checkpoints"):
        planner.estimate(model, args, kwargs, checkpoints=3)  # type: ignore[arg-type]


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_what_hugging_face_checkpoints_is_estimated(name: str) -> None:
    import transformers

    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300}
    head = "MaskedLM" if name == "Bert" else "CausalLM"
    kind = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}For{head}")
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).train()
    tokens = words(2, 32, 300)
    kwargs = {"input_ids": tokens, "labels": tokens}
    found = planner.estimate(model, (), kwargs)
    assert found.dynamic_peak_bytes == _measured(model, (), kwargs)
    assert found.gradient_checkpointing is not None
    model.gradient_checkpointing_enable()
    measured = _measured(model, (), kwargs)
    assert found.gradient_checkpointing.dynamic_peak_bytes == measured


@pytest.mark.heavy
def test_the_command_shows_and_prints() -> None:
    run = CliRunner().invoke
    shown = run(app, ["estimate", "tests.installed:gpt", "--suggest", "1"])
    assert shown.exit_code == 0, shown.output
    assert "torch.utils.checkpoint on those modules" in shown.output
    assert "suggested: blocks." in shown.output
    printed = run(app, ["estimate", "tests.installed:gpt", "--checkpoint", "blocks.*", "--json"])
    found = json.loads(printed.stdout)
    assert found["checkpointed"]["modules"] == ["blocks.0", "blocks.1"]
    assert found["checkpointed"]["dynamic_peak_bytes"] < found["dynamic_peak_bytes"]
    both = run(app, ["estimate", "tests.installed:gpt", "--checkpoint", "blocks.0", "--suggest", "1"])
    assert both.exit_code == 2
    assert "give one of them" in both.output
