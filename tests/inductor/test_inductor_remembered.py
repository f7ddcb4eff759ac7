"""What Inductor works out again and again is remembered, and its programs are the same."""

import contextlib
from typing import Any

import pytest
import sympy
import torch
import torch.nn as nn
from torch._inductor import sizevars
from torch._inductor.codegen import cpp
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

import planner
from planner._torch.inductor import compiling
from planner._torch.inductor.remembered import work_remembered
from planner.lowering.inductor import InductorLowering
from planner.lowering.partition import no_recomputation, partition

pytestmark = pytest.mark.heavy

MANY = 300  # more than Inductor remembers


def test_more_expressions_are_remembered_than_by_inductor() -> None:
    x = sympy.Symbol("x0", integer=True)
    with work_remembered():
        assert cpp.stride_at_vec_range is sizevars.stride_at_vec_range
        for _ in range(2):
            found = [sizevars.stride_at_vec_range(i * x + 7, x, 16) for i in range(MANY)]
        assert found == list(range(MANY))
        info = sizevars.stride_at_vec_range.cache_info()
    assert info.hits >= MANY
    assert sizevars.stride_at_vec_range.cache_info().maxsize == 128


def test_rules_of_types_are_made_once() -> None:
    def made_anew() -> bool:
        return vars(DtypePropagationOpsHandler())["add"] is not vars(DtypePropagationOpsHandler())["add"]

    before = made_anew()
    with work_remembered():
        rules = DtypePropagationOpsHandler()
        made = vars(rules)["add"]
        assert DtypePropagationOpsHandler() is rules
        assert vars(rules)["add"] is made
    assert made_anew() == before  # where nothing is planned


@pytest.mark.parametrize("role", ["forward", "backward"])
def test_programs_are_the_same(role: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 8), nn.Softmax(-1))
    prepared = planner.prepare(model, torch.randn(8, 24), backend="inductor")._prepared
    joint = prepared.captured.graphs[0].joint
    assert joint is not None

    def source() -> str:
        lowering, halves = InductorLowering({}), partition(joint, no_recomputation(joint))
        with torch._inductor.utils.fresh_cache():
            programs = [
                lowering.emitted(halves.forward, "forward"),
                lowering.emitted(halves.backward, "backward"),
            ]
        return programs[role == "backward"][0].source.partition("async_compile =")[2]

    remembering = source()
    monkeypatch.setattr(compiling, "work_remembered", contextlib.nullcontext)
    assert remembering == source() != ""
