"""Models of the zoo: planned, right, within the budget, and as predicted. ``benchmarks/zoo.py`` does all."""

import importlib.util
import random
import warnings

import pytest

import planner
from benchmarks.zoo import never_the_same, verdict
from planner.verification.verify import NOT_TWICE
from tests import zoo

FAST = ("nn_vae",)
HEAVY = ("hf_mamba", "nn_neighbour_graph", "nn_logging")
SHORTER = {"hf_mamba": 8}
"""Of these the batch is cut to so many words: each is a stretch of operations, all alike."""
AS_USED = ("nn_vae", "nn_logging")
"""Of these the peak is also measured where they are built, planned and trained without ``verify``."""
_LIBRARIES = {"hf": "transformers", "peft": "peft", "timm": "timm", "diffusers": "diffusers", "nn": "torch"}


def _check(name: str, budget: str, within: float = 0.999) -> None:
    library = _LIBRARIES[name.partition("_")[0]]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; `make venv` installs it")
    model, args, kwargs = zoo.build(name)
    if name in SHORTER:
        kwargs = {key: value[:, : SHORTER[name]] for key, value in kwargs.items()}
    random.seed(0)  # some draw from it which layers run: the same ones when planned and when verified
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*last bits", planner.PlanWarning)
        plan = planner.plan(
            model, args, kwargs, budget=budget, loss=zoo.scalar_loss, solver="sqrt_n", time_limit=2
        )
    random.seed(0)
    report = planner.verify(model, args, kwargs, plan=plan, loss=zoo.scalar_loss, repeats=0)
    assert report.ok, report.problems
    measured, predicted = report.measured_dynamic_peak_bytes, report.predicted_dynamic_peak_bytes
    assert within * predicted <= measured <= predicted
    assert plan.predicted.dynamic_peak_bytes <= plan.no_recompute.dynamic_peak_bytes
    paths = {op.module for graph in plan.graphs for op in graph.ops} | {h.module for h in plan.peak_holders}
    assert paths <= set(dict(model.named_modules()))
    if name in AS_USED:
        assert zoo.fresh_peak(name, plan) <= 1.001 * predicted + 256


@pytest.mark.heavy
@pytest.mark.parametrize("name", FAST)
def test_a_model_of_the_zoo(name: str) -> None:
    _check(name, "min")


@pytest.mark.heavy
@pytest.mark.parametrize("name", HEAVY)
def test_a_larger_model_of_the_zoo(name: str) -> None:
    _check(name, "min")


@pytest.mark.heavy
def test_a_model_of_the_zoo_whose_graphs_hand_on_transposed_gradients() -> None:
    _check("hf_deberta", "min")


def test_the_zoo_is_as_large_as_it_says() -> None:
    names = list(zoo.everything())
    assert len(names) >= 470
    assert {zoo.family_of(n) for n in names} == {"reference", *zoo.FAMILIES}
    assert set(FAST) | set(HEAVY) <= set(names)


@pytest.mark.parametrize(
    ("problems", "word"),
    [
        (["loss 0 differs: by 1" + NOT_TWICE] * 4, "not comparable"),
        (["loss 0 differs: by 1" + NOT_TWICE] * 4 + ["gradient of x differs: by 1"], "DIFFERENT"),
        (["the random generators are in another state after the planned step"], "DIFFERENT"),
    ],
)
def test_only_what_never_is_the_same_is_not_comparable(problems: list[str], word: str) -> None:
    equal = {"loss": False, "gradients": False, "generators": False}
    row = {"ok": False, "equal": equal, "not_twice": never_the_same(problems), "problems": problems[:3]}
    assert verdict({"budgets": {"min": row}}) == word
