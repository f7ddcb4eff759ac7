"""Generated code: it computes what the graph does, and frees what it no longer needs."""

import gc
import linecache
import operator
import weakref
from typing import Any

import pytest
import torch

from planner.lowering import codegen
from planner.lowering.codegen import compile_graph, generate
from tests.side_by_side import layers, plan_of


def _graph(build) -> torch.fx.GraphModule:  # type: ignore[no-untyped-def]
    graph = torch.fx.Graph()
    build(graph)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


aten = torch.ops.aten


def test_arguments_are_boxed_and_the_list_is_emptied() -> None:
    def build(g: torch.fx.Graph) -> None:
        x, y = g.placeholder("x"), g.placeholder("y")
        g.output([g.call_function(aten.add.Tensor, (x, y)), None, 3])

    function = compile_graph(_graph(build), "forward")
    arguments = [torch.ones(2), torch.ones(2)]
    result = function(arguments)
    assert arguments == []
    assert torch.equal(result[0], torch.full((2,), 2.0))
    assert list(result[1:]) == [None, 3]


def test_every_intermediate_is_freed_at_its_last_use() -> None:
    seen: list[bool] = []
    references: list[weakref.ref[torch.Tensor]] = []

    def remember(x: torch.Tensor) -> torch.Tensor:
        references.append(weakref.ref(x))
        return x

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(references[0]() is None)
        return x

    def build(g: torch.fx.Graph) -> None:
        x = g.placeholder("x")
        a = g.call_function(torch.exp, (x,))
        b = g.call_function(remember, (a,))
        c = g.call_function(torch.sin, (b,))
        g.output([g.call_function(look, (c,))])

    compile_graph(_graph(build), "forward")([torch.ones(3)])
    assert seen == [True]


def test_members_of_a_tuple_that_nobody_asks_for_are_freed_at_once() -> None:
    def build(g: torch.fx.Graph) -> None:
        x = g.placeholder("x")
        both = g.call_function(aten.native_dropout.default, (x, 0.5, True))
        both.meta["val"] = (torch.empty(0), torch.empty(0))
        first = g.call_function(operator.getitem, (both, 0))
        g.output([first])

    source, _ = generate(_graph(build).graph, _graph(build), "forward")
    assert "del" in source.split("native_dropout")[1]
    assert "[0]" not in source


def test_constants_that_have_no_literal() -> None:
    def build(g: torch.fx.Graph) -> None:
        x = g.placeholder("x")
        y = g.call_function(aten.clamp.default, (x, float("-inf"), float("inf")))
        z = g.call_function(aten._to_copy.default, (y,), {"dtype": torch.float64})
        g.output([z])

    (result,) = compile_graph(_graph(build), "forward")([torch.ones(2)])
    assert result.dtype is torch.float64


def test_a_failure_shows_the_generated_line() -> None:
    import traceback

    def build(g: torch.fx.Graph) -> None:
        x, y = g.placeholder("x"), g.placeholder("y")
        g.output([g.call_function(aten.mm.default, (x, y))])

    try:
        compile_graph(_graph(build), "backward")([torch.ones(2, 3), torch.ones(2, 3)])
    except RuntimeError:
        text = traceback.format_exc()
    assert "<planner backward" in text
    assert "mm" in text


@pytest.mark.heavy
def test_a_program_that_is_gone_leaves_no_source() -> None:
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))

    def sources() -> list[str]:
        return [name for name in linecache.cache if name.startswith("<planner gone")]

    function = compile_graph(torch.fx.GraphModule({}, graph), "gone")
    assert len(sources()) == 1
    del function
    gc.collect()  # its globals hold it
    assert not sources()


def test_the_programs_of_a_plan_have_no_superfluous_views(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: dict[str, torch.fx.Graph] = {}

    def watched(graph: torch.fx.Graph, module: torch.fx.GraphModule, name: str) -> Any:
        graphs[name] = graph
        return generate(graph, module, name)

    model, args, _ = layers()
    plan = plan_of(model, args)
    monkeypatch.setattr(codegen, "generate", watched)
    plan.apply(model)
    model(*args).backward()
    assert set(graphs) == {"forward", "backward"}
    for name, graph in graphs.items():
        results: Any = graph.output_node().args[0]
        handed_out = results[:1] if name == "forward" else results  # to the user, and to the autograd engine
        for node in graph.nodes:
            if node.target in (aten.detach.default, aten.alias.default):
                assert node in handed_out, node  # only that is a tensor of its own
            if node.target in (aten.view.default, aten.expand.default, aten.t.default):
                (source, *_) = node.args
                assert node.meta["val"].shape != source.meta["val"].shape or node.target is aten.t.default
                assert node.target is not aten.t.default or source.target is not aten.t.default
                assert node.users, f"nobody reads {node}"
