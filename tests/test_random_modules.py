"""Modules of random operations are planned, run and compared: bits, peaks, and no warnings without cause."""

import pytest

from benchmarks.random_modules import found_in
from tests.random_operations import Kind


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "seed"), [("sequences", 1), ("sequences", 2), ("sequences", 4), ("images", 2), ("images", 4)]
)
def test_a_module_of_random_operations(kind: Kind, seed: int) -> None:
    found = found_in(seed, kind)
    assert found is not None, "it has nothing to differentiate"
    assert not found
