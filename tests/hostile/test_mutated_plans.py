"""Plan files that somebody has changed: each is refused with the field named, or does what eager does.

`test_plan_file.py` has the single cases; here files are changed at random, thousands of them, and those that
still load are applied to a real model, which then trains a step.
"""

import copy
import json
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

import planner
from planner.user_plan import Plan
from tests.plans import layered_plan

TEXT = layered_plan().dumps()
DOCUMENT: dict[str, Any] = json.loads(TEXT)

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_NUMBERS = st.integers(-2, 2) | st.integers(0, 200) | st.sampled_from([2**31, 2**63 - 1, 2**63, 10**30])
_SETTINGS = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], database=None
)


def _loaded(text: str | bytes) -> Plan | None:
    """The plan, or None where it is refused in words for people."""
    try:
        plan = Plan.loads(text, source="plan.json")
    except planner.PlanFileError as error:
        message = str(error)
        assert message.startswith("plan.json: ")
        assert message.isprintable()
        assert len(message) < 500
        return None
    # What is taken is a whole plan: it can be written and read again.
    assert Plan.loads(plan.dumps()) == plan
    return plan


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON document."""
    found: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        value = waiting.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            found.append((value, key))
            if isinstance(value[key], dict | list):
                waiting.append(value[key])
    return found


def _mutate(data: st.DataObject, document: Any, times: int) -> Any:
    """Change a document in place: values replaced, removed, doubled, swapped or moved elsewhere."""
    for _ in range(times):
        places = _places(document)
        if not places:
            break
        container, key = data.draw(st.sampled_from(places), label="place")
        other, other_key = data.draw(st.sampled_from(places), label="other place")
        match data.draw(st.sampled_from(["json", "number", "remove", "double", "swap", "graft"])):
            case "json":
                container[key] = data.draw(_JSON)
            case "number":
                container[key] = data.draw(_NUMBERS)
            case "remove":
                del container[key]
            case "double" if isinstance(container, list):
                container.insert(key, copy.deepcopy(container[key]))
            case "swap":
                value = copy.deepcopy(container[key])
                container[key] = copy.deepcopy(other[other_key])
                other[other_key] = value
            case _:
                container[key] = copy.deepcopy(other[other_key])
    return document


def _change_structure(data: st.DataObject) -> None:
    document = _mutate(data, copy.deepcopy(DOCUMENT), data.draw(st.integers(1, 3)))
    _loaded(json.dumps(document))


def _change_bytes(data: st.DataObject) -> None:
    content = TEXT.encode()
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content)))
        removed = data.draw(st.sampled_from([0, 1, 2, 40, len(content)]))
        content = content[:position] + data.draw(st.binary(max_size=6)) + content[position + removed :]
    _loaded(content)


@pytest.mark.parametrize("change", [_change_structure, _change_bytes])
@settings(_SETTINGS, max_examples=100)
@given(data=st.data())
def test_a_changed_file_is_a_plan_or_refused(
    change: Callable[[st.DataObject], None], data: st.DataObject
) -> None:
    change(data)


@pytest.mark.heavy
@settings(_SETTINGS, max_examples=300)
@given(data=st.data())
def test_thousands_of_changed_structures_are_plans_or_refused(data: st.DataObject) -> None:
    _change_structure(data)


@pytest.mark.heavy
@settings(_SETTINGS, max_examples=1000)
@given(data=st.data())
def test_thousands_of_changed_bytes_are_plans_or_refused(data: st.DataObject) -> None:
    _change_bytes(data)


class Net(nn.Module):
    """Dropout, batch norm, two outputs: what a wrong schedule would get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8))
            for _ in range(4)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return {"logits": self.head(x), "features": x.sigmoid()}


def _loss(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["logits"].square().mean()


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


# Each example compiles a model: a failing one is shown as it is, not made smaller for minutes.
_STEPS = settings(_SETTINGS, phases=[Phase.explicit, Phase.generate])
X = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))


def _after_a_step(model: nn.Module) -> list[torch.Tensor | None]:
    """Loss, gradients, buffers and generator after one step from seed 3."""
    torch.manual_seed(3)
    loss = _loss(model(X))
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    return [loss.detach(), *gradients, *model.buffers(), torch.get_rng_state()]


@cache
def _plan_document() -> dict[str, Any]:
    plan = planner.plan(_net(), (X,), budget="min", solver="sqrt_n", loss=_loss)
    assert plan.graphs[0].recomputed
    document: dict[str, Any] = json.loads(plan.dumps())
    return document


def _change_schedule(data: st.DataObject, document: dict[str, Any]) -> dict[str, Any]:
    """Change what decides how the model runs; the rest of a plan is there to be read."""
    graph = document["graphs"][0]
    backward, operations = graph["backward"], graph["ops"]
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(backward) - 1))
        operation = data.draw(st.integers(0, len(operations) - 1))
        match data.draw(
            st.sampled_from(["insert", "remove", "move", "unused", "by use", "name", "identity"])
        ):
            case "insert":
                backward.insert(position, operation)
            case "remove":
                del backward[position]
            case "move":
                backward.insert(data.draw(st.integers(0, len(backward) - 1)), backward.pop(position))
            case "unused":
                graph["unused_outputs"] = data.draw(st.lists(st.integers(0, 5), max_size=4))
            case "by use":
                graph["per_use_inputs"] = data.draw(st.lists(st.integers(0, 45), max_size=6))
            case "name":
                operations[operation]["name"] = operations[position % len(operations)]["name"]
            case _:
                graph[data.draw(st.sampled_from(["structure", "fingerprint"]))] = data.draw(
                    st.text("0123456789abcdef", min_size=1, max_size=64)
                )
    return document


def _apply_a_changed_plan(data: st.DataObject) -> None:
    plan = _loaded(json.dumps(_change_schedule(data, copy.deepcopy(_plan_document()))))
    if plan is None:
        event("refused when loaded")
        return
    model, eager = _net(), _after_a_step(_net())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", planner.PlanWarning)
        try:
            found = _after_a_step(plan.apply(model))
        except planner.PlannerError:
            # Refused: the model without the plan trains as if nothing had been.
            event("refused when applied or run")
            model = planner.remove(model)
            assert all(p.grad is None for p in model.parameters())
            return
    event("trained")
    for ours, theirs in zip(found, eager, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)  # type: ignore[arg-type]


@pytest.mark.heavy
@settings(_STEPS, max_examples=8)
@given(data=st.data())
def test_many_changed_schedules_train_as_eager_or_are_refused(data: st.DataObject) -> None:
    _apply_a_changed_plan(data)


def _trained(document: dict[str, Any], reported: str | None) -> list[torch.Tensor | None]:
    plan = Plan.loads(json.dumps(document))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", planner.PlanWarning)
        found = _after_a_step(plan.apply(_net()))
    texts = [str(w.message) for w in caught if w.category is planner.PlanWarning]
    assert [reported in text for text in texts] == [True] if reported else not texts
    return found


@pytest.mark.parametrize(
    ("per_use", "reported"),
    [pytest.param([*range(40), 3, 3], "input 39", marks=pytest.mark.heavy), ([], None)],
    ids=["all and more", "none"],
)
def test_per_use_gradients_of_any_inputs_are_those_of_eager(per_use: list[int], reported: str | None) -> None:
    document = copy.deepcopy(_plan_document())
    document["graphs"][0]["per_use_inputs"] = per_use
    for ours, theirs in zip(_trained(document, reported), _after_a_step(_net()), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)  # type: ignore[arg-type]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("output", "dimensions", "gaps", "reported"),
    [
        (0, [1, 0], {}, "has other strides"),
        (0, [0, 1], {"inside": [0, 24]}, "has other strides"),
        (0, [0, 1], {"inside": [0, 2**62]}, "output 0"),
        (900, [0, 1], {}, "output 900"),
    ],
)
def test_layouts_of_gradients_that_are_wrong_do_no_harm(
    output: int, dimensions: list[int], gaps: dict[str, Any], reported: str | None
) -> None:
    document = copy.deepcopy(_plan_document())
    document["graphs"][0]["gradient_layouts"] = [{"output": output, "dimensions": dimensions, **gaps}]
    for ours, theirs in zip(_trained(document, reported), _after_a_step(_net()), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize("dimensions", [[0, 0], [1], [0, 2], [-1, 0], [0, 64], list(range(65)), "ab", None])
def test_orders_of_dimensions_that_are_none_are_refused(dimensions: object) -> None:
    document = copy.deepcopy(DOCUMENT)
    document["graphs"][0]["gradient_layouts"] = [{"output": 0, "dimensions": dimensions}]
    with pytest.raises(planner.PlanFileError, match=r"graphs\[0\].gradient_layouts\[0\].dimensions"):
        Plan.loads(json.dumps(document))


@pytest.mark.parametrize("gaps", [{"inside": [8]}, {"inside": [-1, 8]}, {"inside": None}, {"step": 0}])
def test_gaps_in_gradients_that_are_none_are_refused(gaps: dict[str, object]) -> None:
    document = copy.deepcopy(DOCUMENT)
    document["graphs"][0]["gradient_layouts"] = [{"output": 0, "dimensions": [0, 1], **gaps}]
    with pytest.raises(planner.PlanFileError, match=r"graphs\[0\].gradient_layouts\[0\].(inside|step)"):
        Plan.loads(json.dumps(document))
