"""What Inductor keeps for other processes: programs of a plan, under a key that says how they were made."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.convert_frame import compile_lock
from torch._inductor import graph as lowered_graph
from torch._inductor.codegen.cpp import CppScheduling
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

from planner._torch import fake
from planner._torch.compat import of_graphs
from planner._torch.inductor import compiling, fusion
from planner.lowering.inductor import InductorLowering

fresh_cache = of_graphs("torch._inductor.utils", "fresh_cache")


def test_a_thread_that_is_done_leaves_what_another_compiles_with(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CppScheduling.ready_to_flush
    one_compiles, two_compile, one_is_done = (threading.Event() for _ in range(3))
    patched = []

    def compile_(*_: Any, **__: Any) -> Any:
        if not one_compiles.is_set():
            one_compiles.set()
            two_compile.wait(0.3)
        else:
            two_compile.set()
            one_is_done.wait(3)
        patched.append(CppScheduling.ready_to_flush is not plain)
        return lambda args: args

    def run() -> None:
        graph, mode = torch.fx.GraphModule({}, torch.fx.Graph()), fake.fake_mode_with_sizes()
        compiling.compiled(graph, [], mode, backward=False, fusion="in-order", options={})

    def first() -> None:
        run()
        one_is_done.set()

    monkeypatch.setattr(compiling, "compile_fx_inner", compile_)
    thread = threading.Thread(target=first)
    thread.start()
    one_compiles.wait(3)
    run()
    thread.join()
    assert patched == [True, True]
    assert CppScheduling.ready_to_flush is plain


def test_nothing_else_compiles_while_a_program_is_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def take() -> None:
        taken.append(compile_lock.acquire(blocking=False))
        if taken[-1]:
            compile_lock.release()

    def compile_(*_: Any, **__: Any) -> Any:
        other = threading.Thread(target=take)
        other.start()
        other.join()
        return lambda args: args

    monkeypatch.setattr(compiling, "compile_fx_inner", compile_)
    graph = torch.fx.GraphModule({}, torch.fx.Graph())
    compiling.emitted(graph, [], fake.fake_mode_with_sizes(), backward=False, fusion="in-order", options={})
    assert taken == [False]


def test_another_version_of_what_orders_programs_has_another_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = fusion.ChoicesOfPlans().uuid()
    (tmp_path / "fusion.py").write_text("an older one")
    monkeypatch.setattr(fusion, "__file__", str(tmp_path / "fusion.py"))
    fusion._digest_of_sources.cache_clear()
    try:
        assert fusion.ChoicesOfPlans().uuid() != before
    finally:
        monkeypatch.undo()
        fusion._digest_of_sources.cache_clear()
    assert fusion.ChoicesOfPlans().uuid() == before


@torch.library.custom_op("test_inductor_cache::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    """Without a lowering: Inductor makes one when it first meets it."""
    return x / 2


half.register_fake(torch.empty_like)


def test_what_inductor_meets_for_the_first_time_is_emitted_as_later() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.abs() + 1
        return [half(y) + y.tanh() * x]

    mode = fake.fake_mode_with_sizes()
    with mode:
        inputs = [torch.empty(8, 8)]
    graph = make_fx(function)(*inputs)
    digests = {InductorLowering({}).emitted(graph, "forward")[0].digest for _ in range(2)}
    assert len(digests) == 1


def test_what_was_lowered_for_planning_is_not_lowered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = []
    run = lowered_graph.GraphLowering.run

    def count(self: Any, *args: Any) -> Any:
        lowered.append(self)
        return run(self, *args)

    monkeypatch.setattr(lowered_graph.GraphLowering, "run", count)
    mode = fake.fake_mode_with_sizes()
    with mode:
        inputs = [torch.empty(8, 8)]
    graph = make_fx(lambda x: [x.cos() * 3])(*inputs)
    found = []
    with fresh_cache():
        for lazily in (False, True):  # as while Dynamo compiles
            with _use_lazy_graph_module(lazily) if lazily else contextlib.nullcontext():
                program, dry, arguments = InductorLowering({}).emitted(graph, "forward")
            with fake.without_modes(), arguments[0].fake_mode:
                (result,) = dry(list(arguments))
            found.append((program.digest, tuple(result.shape)))
    assert len(lowered) == 1
    assert found[0] == found[1]
    assert found[0][1] == (8, 8)
