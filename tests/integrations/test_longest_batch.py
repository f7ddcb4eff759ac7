"""A plan for the longest sequence that a trainer will see, made of a shorter batch."""

import pytest
import torch
import torch.nn as nn
from transformers import TrainingArguments

import planner
from planner._torch import modules
from planner.integrations.huggingface import PlannerCallback
from planner.integrations.padding import Padded
from planner.lazy.first_call import PlannedAtFirstCall
from planner.runtime.install import installed_plan


class Words(nn.Module):
    """Embeds words, with a mask and a float for each sequence beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 16), nn.Linear(16, 10)

    def forward(self, words: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.embedding(words)) * mask[..., None]
        return (self.head(hidden).square().mean((1, 2)) * weight).sum()


def _batch(tokens: int) -> dict[str, torch.Tensor]:
    return {
        "words": torch.ones(3, tokens, dtype=torch.long),
        "mask": torch.ones(3, tokens),
        "weight": torch.ones(3),
    }


def test_the_callback_plans_for_the_longest() -> None:
    model = Words().train()
    callback = PlannerCallback("min", max_length=12, solver="sqrt_n")
    callback.on_train_begin(TrainingArguments(use_cpu=True, report_to=[]), None, None, model=model)
    assert isinstance(modules.installed_call(model), PlannedAtFirstCall)
    model(**_batch(8)).backward()
    plan = installed_plan(model)
    assert plan is not None
    assert {tuple(record.shape) for record in plan.model.inputs} == {(3, 12), (3,)}
    planner.remove(model)


def test_what_is_padded() -> None:
    args, kwargs = Padded(12)((), _batch(8))
    assert [tuple(t.shape) for t in kwargs.values()] == [(3, 12), (3, 12), (3,)]
    assert args == ()
    for same in (_batch(12), _batch(13), {"weight": torch.ones(3)}):
        _, found = Padded(12)((), same)
        assert all(found[name] is value for name, value in same.items())
    for wrong in (0, "long", True):
        with pytest.raises(TypeError, match="expected the number of tokens"):
            PlannerCallback("60%", max_length=wrong)  # type: ignore[arg-type]


def test_each_column_is_padded_by_its_own_length() -> None:
    columns, other = [_batch(8), _batch(10), _batch(13)], torch.ones(3, 8)
    ((found, labels), _) = Padded(12)((columns, other), {})
    assert [tuple(t.shape) for column in found for t in column.values()] == [
        *[(3, 12), (3, 12), (3,)] * 2, (3, 13), (3, 13), (3,),
    ]  # fmt: skip
    assert columns[0]["words"].shape == (3, 8)
    assert labels is other
