"""What a graph hands out to what follows has eager's strides, in dimensions of one element too."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

import planner
from planner.errors import PlanWarning

pytestmark = pytest.mark.heavy

FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.reshape(1, 12, 20, 16).transpose(1, -1),
    "permuted": lambda x: x.view(12, 1, 20, 16).permute(3, 1, 0, 2),
    "a part": lambda x: x.view(12, 20, 16)[3:4],
    "unsqueezed": lambda x: x.view(12, 20, 16).transpose(0, 1).unsqueeze(2),
    "itself": lambda x: x.view(1, 240, 16),
}


class Broken(nn.Module):
    """Hands a view of a result from one graph to another, and notes its strides in between."""

    def __init__(self, form: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.form, self.layer, self.seen = form, nn.Linear(16, 16), list[tuple[int, ...]]()

    @torch.compiler.disable
    def note(self, x: torch.Tensor) -> None:
        self.seen.append(x.stride())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handed = self.form(torch.tanh(self.layer(x)))
        self.note(handed)
        return (handed - handed.mean()).tanh().square().mean()


@pytest.mark.parametrize("name", FORMS)
def test_results_have_the_strides_of_eager(name: str) -> None:
    torch.manual_seed(0)
    model, x = Broken(FORMS[name]), torch.randn(240, 16)
    planned = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        plan = planner.plan(planned, (x,), budget="min")
        plan.apply(planned)
        planned.seen.clear()
        for trained in (model, planned):
            trained(x).backward()
    assert planned.seen == model.seen
    for theirs, ours in zip(model.parameters(), planned.parameters(), strict=True):
        assert theirs.grad is not None
        assert ours.grad is not None
        assert torch.equal(theirs.grad, ours.grad)


def test_results_that_are_views_may_be_written_to() -> None:
    class Written(Broken):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            handed = self.form(self.layer(x))
            self.note(handed)
            handed.mul_(2.0)
            return handed.square().mean()

    torch.manual_seed(0)
    model, x = Written(FORMS["transposed"]), torch.randn(240, 16)
    planned = copy.deepcopy(model)
    planner.plan(planned, (x,), budget="100%", solver="none").apply(planned)
    for trained in (model, planned):
        trained(x).backward()
    assert model.layer.weight.grad is not None
    assert planned.layer.weight.grad is not None
    assert torch.equal(model.layer.weight.grad, planned.layer.weight.grad)
