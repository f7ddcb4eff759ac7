"""Gradients leave a backward of regions block by block, and are reduced while it runs."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.early_gradients import FORMS, Backward, early_gradients
from tests.ranks import run_ranks, say_each, what_a_rank_says

MODELS = ("llama",)


def _rank(folder: Path) -> None:
    say_each(MODELS, _backwards, folder)


def _backwards(name: str) -> str:
    found = [early_gradients(name, form, wrapped=True, tiny=True) for form in FORMS]
    return json.dumps([dataclasses.asdict(backward) for backward in found])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank says of each model; all in one pair of processes."""
    return run_ranks(_rank, tmp_path_factory, "early gradients")


def _said(outcomes: Path, name: str, rank: int) -> list[Backward]:
    text = what_a_rank_says(outcomes, name, rank)
    assert text.startswith("["), text
    return [Backward(**fields) for fields in json.loads(text)]


@pytest.mark.heavy
@pytest.mark.parametrize("name", MODELS)
def test_the_first_gradient_comes_after_one_region_and_the_head(name: str, outcomes: Path) -> None:
    for rank in range(2):
        unplanned, whole, regions, replayed = _said(outcomes, name, rank)
        assert unplanned.block is not None
        assert regions.first is not None
        assert regions.block is not None
        assert replayed.block is not None
        # A product of the forward is two of the backward, and a plan may run it once more.
        assert regions.first <= regions.block <= 1.5 * unplanned.block < regions.products
        assert whole.block == whole.products  # which regions are there to change
        assert replayed.first == unplanned.first
        assert replayed.block <= 1.5 * unplanned.block


@pytest.mark.heavy
@pytest.mark.parametrize("name", MODELS)
def test_buckets_are_reduced_before_half_of_the_backward(name: str, outcomes: Path) -> None:
    for rank in range(2):
        *_, regions, replayed = _said(outcomes, name, rank)
        for found in (regions, replayed):
            assert found.reduced is not None
            assert found.reduced < found.products / 2
