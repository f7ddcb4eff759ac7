"""Which seconds a plan is made by, if nothing else is said."""

from pathlib import Path

import pytest
import torch

import planner
from planner.planning import cost_source, one_backend
from tests.small import small_gpt

pytestmark = [pytest.mark.timed, pytest.mark.heavy]


def _plan(**options: object) -> planner.Plan:
    model, args, _ = small_gpt()
    return planner.plan(model, args, budget="60%", solver="sqrt_n", **options)  # type: ignore[arg-type]


def test_operations_are_timed_where_the_device_is_at_hand() -> None:
    assert _plan().target.costs == "measured"
    assert _plan(costs="auto").target.costs == "measured"


def test_a_plan_says_how_many_operations_were_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    original = one_backend.find_costs
    monkeypatch.setattr(
        one_backend,
        "find_costs",
        lambda *args, **kwargs: original(*args, **kwargs | {"most_seconds": 0.0}),
    )
    assert any("were not timed" in note and "costs='measured'" in note for note in _plan().notes)
    assert not any("were not timed" in note for note in _plan(costs="measured").notes)


def test_a_device_that_is_elsewhere_has_its_roofline() -> None:
    assert _plan(device="A100-80GB").target.costs == "roofline"


def test_what_would_take_long_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_source, "MOST_TIMED_SECONDS", 0.0)
    assert _plan().target.costs.startswith("roofline")
    assert _plan(costs="measured").target.costs == "measured"


def test_one_of_several_ranks_does_not_time_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that measure make different plans, which is an error when they train."""
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    assert _plan().target.costs.startswith("roofline")


def test_the_largest_batch_and_estimates_time_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("something is timed")

    monkeypatch.setattr(cost_source, "MeasuredCosts", refuse)
    model, args, _ = small_gpt()
    planner.estimate(model, args)
    planner.max_batch(
        model, lambda batch: tuple(a[:1].repeat(batch, 1) for a in args), "8MiB", solver="sqrt_n", most=4
    )
