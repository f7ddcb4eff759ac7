"""Modules of random operations are planned, run and compared: bits, peaks, and no warnings without cause."""

import pytest

from benchmarks.random_modules import found_in
from tests.random_operations import Kind


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "seed"),
    [("sequences", 1), ("sequences", 3), ("images", 1), ("images", 5)],
)
def test_a_module_of_random_operations(kind: Kind, seed: int) -> None:
    found = found_in(seed, kind)
    assert found is not None, "it has nothing to differentiate"
    assert not found
