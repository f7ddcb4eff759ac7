"""Options in a plan file that somebody else wrote: none runs a program, none decides more than code."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner._torch.inductor.compiling import _OURS, UNLESS_GIVEN, unusable_options
from planner._torch.inductor.harmless_options import _NUMBERS, _SWITCHES, decides_code_alone
from planner.choices import CUDA_GRAPHS
from planner.errors import PlanMismatch
from planner.planning.options import PlanOptions
from planner.user_plan import Plan


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).train()


@cache
def _text() -> str:
    return planner.plan(_model(), (torch.ones(4, 8),), budget="100%", costs="roofline").dumps()


def _document(options: dict[str, object], backend: str = "inductor") -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_text())
    document["target"] |= {"backend": backend, "backend_options": options}
    return document


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_a_plan_file_runs_no_program_of_its_authors_choice(tmp_path: Path, backend: str) -> None:
    script, ran = tmp_path / "compiler", tmp_path / "ran"
    script.write_text(f"#!/bin/sh\ntouch {ran}\nexit 1\n")
    script.chmod(0o755)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(_document({"cpp.cxx": str(script)}, backend)))
    model = _model()
    with pytest.raises(
        PlanMismatch, match=r"'cpp\.cxx'.*compiler.*give it again: plan\.apply\(model, backend"
    ) as found:
        Plan.load(file).apply(model)(torch.ones(4, 8)).sum().backward()
    assert not ran.exists()
    assert str(script) in str(found.value)
    assert planner.remove(model) is model
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(PlanMismatch, match=r"'cpp\.cxx'"):
        planner.verify(model, (torch.ones(4, 8),), plan=Plan.load(file))
    assert not ran.exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpp.cxx", "/bin/sh"),
        ("cpp.march", "native -wrapper /bin/sh"),
        ("cpp.enable_floating_point_contract_flag", "off -fplugin=/tmp/x.so"),
        ("cpp.enable_unsafe_math_opt_flag", True),
        ("cpp.threads", 2**31),
        ("cpp_wrapper", True),
        ("cuda.cuda_cxx", "/tmp/nvcc"),
        ("cuda.cutlass_dir", "/tmp/cutlass"),
        ("trace.enabled", True),
        ("trace.debug_dir", "/tmp"),
        ("global_cache_dir", "/tmp"),
        ("worker_log_path", "/etc/passwd"),
        ("fx_graph_remote_cache", True),
        ("max_autotune", True),
        ("compile_threads", 10**6),
        ("assert_indirect_indexing", False),
        ("size_asserts", False),
        ("use_fast_math", True),
        ("post_grad_custom_pre_pass", "os.system"),
        ("inductor_choices_class", "os.system"),
        ("epilogue_fusion", 1),
        ("epilogue_fusion", "True"),
        ("unroll_reductions_threshold", 10**9),
        ("unroll_reductions_threshold", True),
        ("realize_reads_threshold", -1),
        ("epilogue-fusion", False),
        ("no_such_option", True),
        ("\x1b]8;;http://evil\x1b\\", True),
    ],
)
def test_an_option_that_decides_more_than_code_is_refused_by_name(name: str, value: object) -> None:
    model = _model()
    with pytest.raises(PlanMismatch) as found:
        Plan.loads(json.dumps(_document({name: value}))).apply(model)
    message = str(found.value)
    assert repr(name) in message
    assert message.isprintable()
    assert "give it again" in message
    assert planner.remove(model) is model


def test_what_is_allowed_are_options_of_inductor_that_no_plan_sets_itself() -> None:
    for name in _SWITCHES:
        assert decides_code_alone(name, False)
        assert unusable_options({name: True}) is None
    for name, most in _NUMBERS.items():
        assert decides_code_alone(name, most)
        assert not decides_code_alone(name, most + 1)
        assert unusable_options({name: most}) is None
    # Inductor itself records nothing: by this option a plan does.
    assert {*_SWITCHES, *_NUMBERS} & _OURS.keys() == {CUDA_GRAPHS}
    assert set(UNLESS_GIVEN) <= _SWITCHES
    document = _document({"epilogue_fusion": False, "max_fusion_size": 8})
    assert Plan.loads(json.dumps(document)).apply(_model()) is not None


def test_options_that_are_given_again_are_the_plans() -> None:
    document = _document({"max_autotune_pointwise": True, "epilogue_fusion": False})
    plan, model = Plan.loads(json.dumps(document)), _model()
    given: dict[str, bool | int | float | str] = {"max_autotune_pointwise": True}
    assert plan.apply(model, backend_options=given) is model
    for wrong in ({"max_autotune_pointwise": False}, {"max_autotune_pointwise": 1}, {"debug": True}):
        with pytest.raises(PlanMismatch, match="as they are in the plan"):
            plan.apply(_model(), backend_options={**given, **wrong})
    # What is installed was looked at, and a plan that was made here knows what the user gave.
    assert planner.remove(model) is model
    made = copy.copy(plan).remember(PlanOptions(backend="inductor", backend_options=given))
    assert made.apply(model) is model
