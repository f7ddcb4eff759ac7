"""Switches of PyTorch's, before planning or between steps: the plan is followed, or it is said why not."""

import contextlib
import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import planner
from tests.side_by_side import (
    Layers,
    assert_same,
    counting_runs,
    layers,
    left_by,
    no_plan_warnings,
    plan_of,
    steps,
)

Context = contextlib.AbstractContextManager[Any]


@contextlib.contextmanager
def stance(*names: str, **options: Any) -> Iterator[None]:
    torch.compiler.set_stance(*names, **options)
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


STANCES: dict[str, Callable[[], Context]] = {
    **{
        name: partial(stance, name)
        for name in ("force_eager", "eager_on_recompile", "fail_on_recompile", "eager_then_compile")
    },
    "force_backend": partial(stance, force_backend="eager"),
    "skip_guard_eval_unsafe": partial(stance, "default", skip_guard_eval_unsafe=True),
    "disable": lambda: torch._dynamo.config.patch(disable=True),
}


def _two_layers() -> tuple[nn.Module, nn.Module, tuple[torch.Tensor], Any]:
    torch.compiler.reset()
    model, args, loss = layers(partial(Layers, 2))
    return model, copy.deepcopy(model), args, loss


@pytest.mark.graphs
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "when"), [(name, ("planning", "second step")[i % 2]) for i, name in enumerate(STANCES)]
)
def test_a_plan_is_followed_in_any_stance(name: str, when: str) -> None:
    model, twin, args, _ = _two_layers()
    with contextlib.ExitStack() as stack, counting_runs() as runs, no_plan_warnings():
        if when == "planning":
            stack.enter_context(STANCES[name]())
        plan_of(model, args).apply(model)
        ours = [left_by(model, steps(args))]
        if when == "second step":
            stack.enter_context(STANCES[name]())
        ours.append(left_by(model, steps(args)))
    assert runs.backward == 4
    for left in ours:
        assert_same(left, left_by(twin, steps(args)))


@pytest.mark.parametrize(
    "name", ["install_free_tensors", "prepare_freezing", "use_graph_deduplication", "verify_correctness"]
)
def test_what_dynamo_tries_out_hinders_no_plan(name: str) -> None:
    model, twin, args, _ = _two_layers()
    with torch._dynamo.config.patch(**{name: True}), counting_runs() as runs, no_plan_warnings():
        plan_of(model, args).apply(model)
        ours = left_by(model, steps(args))
    assert runs.backward == 2
    assert_same(ours, left_by(twin, steps(args)))


def test_the_users_own_code_is_compiled_as_the_stance_says() -> None:
    called = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        called.append(graph)
        return graph.forward

    model, _, args, _ = _two_layers()
    plan_of(model, args).apply(model)
    with stance("force_eager"):
        torch.compile(torch.sin, backend=backend)(args[0])
        model(*args).backward()
    assert not called


@pytest.mark.heavy
@pytest.mark.parametrize("switch", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_a_plan_is_followed_where_the_environment_switches_compilation_off(switch: str) -> None:
    code = """
import os
from tests.behaviour.paths import test_switches as here
model, twin, args, _ = here._two_layers()
with here.counting_runs() as runs, here.no_plan_warnings():
    here.plan_of(model, args).apply(model)
    ours = here.left_by(model, here.steps(args))
assert runs.backward == 2
here.assert_same(ours, here.left_by(twin, here.steps(args)))
assert os.environ["%s"] == "1"
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        ["env", f"{switch}=1", sys.executable, "-c", code % switch],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


class PassingOn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Context]] = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "PassingOn": PassingOn,
    "_CloneArgBeforeMutateMode": torch.autograd.graph.allow_mutation_on_saved_tensors,
}


@pytest.mark.filterwarnings("ignore:.*were there already")
@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_a_step_under_a_dispatch_mode_says_so(name: str, lazily: bool) -> None:
    model, twin, args, _ = _two_layers()
    if lazily:
        planner.auto_checkpoint(model, budget="min", solver="sqrt_n", accumulate=True)
    else:
        plan_of(model, args).apply(model)
    with counting_runs() as runs:
        for followed in (0, 2, 2, 4):
            under_mode = runs.backward == followed
            with MODES[name]() if under_mode else contextlib.nullcontext():
                said = pytest.warns(planner.PlanWarning, match=f"{name} is on.*without the plan")
                with said if under_mode else no_plan_warnings():
                    ours = left_by(model, steps(args))
            assert runs.backward == followed
            with MODES[name]() if under_mode else contextlib.nullcontext():
                assert_same(ours, left_by(twin, steps(args)))


@pytest.mark.parametrize("name", MODES)
def test_planning_under_a_dispatch_mode_names_it(name: str) -> None:
    model, _, args, _ = _two_layers()
    with MODES[name](), pytest.raises(planner.CaptureError, match=f"{name} is on"):
        plan_of(model, args)
    plan_of(model, args)
