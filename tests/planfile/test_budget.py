"""Budgets as people write them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner
from planner.planfile.budget import Budget, format_bytes, parse_budget

BASELINE = 1000 * 2**20


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (12345, 12345),
        (np.int64(12345), 12345),
        ("12345", 12345),
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("512 MiB", 512 * 2**20),
        (" 1.5 GiB ", 3 * 2**29),
        (".5TiB", 2**39),
        ("2048KiB", 2**21),
        ("100 B", 100),
        ("60%", 600 * 2**20),
        ("0.1 %", 2**20),
        ("150%", 1500 * 2**20),
        ("9999999999999%", 2**63 - 1),
        ("+3KB", 3000),
    ],
)
def test_amounts(value: int | str, expected: int) -> None:
    assert parse_budget(value, BASELINE).bytes == expected


@pytest.mark.parametrize("text", ["min", "MIN", " min "])
def test_min_has_no_bytes(text: str) -> None:
    assert parse_budget(text, BASELINE) == Budget(bytes=None, text="min")


def test_the_text_is_kept_as_written() -> None:
    assert parse_budget(" 1.5 GiB ", BASELINE).text == "1.5 GiB"


@pytest.mark.parametrize(
    ("value", "key_words"),
    [
        ("12 bananas", ["'12 bananas'", "cannot be understood", "8GiB", "60%", "min"]),
        ("", ["''", "cannot be understood"]),
        ("8G", ["8GiB", "8GB", "powers of 1024"]),
        ("minimum", ["'minimum'"]),
        ("1e9", ["'1e9'"]),
        ("nan", ["'nan'"]),
        ("inf%", ["'inf%'"]),
        ("1.5", ["whole number of bytes"]),
        ("-5GiB", ["'-5GiB'", "not more than zero"]),
        ("0%", ["not more than zero"]),
        ("0.0000001KB", ["not more than zero"]),
        (0, ["budget 0 ", "not more than zero"]),
        (-1, ["budget -1 ", "not more than zero"]),
        (2**63, ["more than any machine has"]),
        ("99999999999999TiB", ["more than any machine has"]),
        ("9" * 5000, ["..."]),
        (True, ["True"]),
        (0.6, ["0.6", "float", "60%"]),
        (float("nan"), ["nan", "float"]),
        (None, ["None"]),
        (["8GiB"], ["list"]),
    ],
)
def test_what_is_refused_says_why(value: object, key_words: list[str]) -> None:
    with pytest.raises(planner.BudgetError) as caught:
        parse_budget(value, BASELINE)  # type: ignore[arg-type]
    for word in key_words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_budget_error_is_a_planner_error_and_a_value_error() -> None:
    assert issubclass(planner.BudgetError, planner.PlannerError)
    assert issubclass(planner.BudgetError, ValueError)


@pytest.mark.heavy
@given(st.text(max_size=30))
def test_any_text_gives_a_budget_or_a_budget_error(text: str) -> None:
    try:
        budget = parse_budget(text, BASELINE)
    except planner.BudgetError:
        return
    assert budget.bytes is None or 0 < budget.bytes < 2**63


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (146613862, "139.8 MiB"),
        (8 * 2**30, "8.0 GiB"),
        (2**52, "4096.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes_for_people(amount: int, shown: str) -> None:
    assert format_bytes(amount) == shown


def test_infeasible_budget_survives_pickling() -> None:
    import pickle

    error = planner.InfeasibleBudget("too small", minimum_bytes=20, budget_bytes=10)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.minimum_bytes, copy.budget_bytes) == ("too small", 20, 10)
