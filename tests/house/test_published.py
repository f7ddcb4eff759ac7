"""Published figures of a transformer layer, predicted: Korthikanti et al. (2022)."""

import pytest

from benchmarks.frontiers.published import SHAPES, activation_bytes, formula, layer_times, layers


def test_activations_are_those_of_the_published_formula() -> None:
    shape = (512, 16, 2048, 16)
    assert activation_bytes(layers(2, *shape)) == pytest.approx(formula(*shape), rel=1e-3)


@pytest.mark.heavy
@pytest.mark.parametrize(("flash", "shapes"), [(False, SHAPES), (True, SHAPES[::4])])
def test_of_both_forms_of_attention(flash: bool, shapes: tuple[tuple[int, int, int, int], ...]) -> None:
    for shape in shapes:
        found = activation_bytes(layers(2, *shape, flash=flash))
        assert found == pytest.approx(formula(*shape, flash), rel=1e-3), shape


@pytest.mark.heavy
def test_recomputing_in_the_layer_takes_what_the_paper_measured_and_less_by_a_plan() -> None:
    ways = layer_times(count=2)["ways"]
    for way in ways.values():
        assert way["overhead"] == pytest.approx(way["published"], abs=0.06)
        assert way["planned_peak_bytes"] <= way["peak_bytes"]
        assert way["planned_overhead"] < way["overhead"]
    assert ways["full"]["peak_bytes"] < ways["selective"]["peak_bytes"]
