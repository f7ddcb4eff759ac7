"""The runners of the graphs of one step: made by a Dynamo backend, described, emptied."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from planner._torch.module_paths import ModuleNames, name_modules
from planner._torch.tracing.named_functions import call_what_was_captured
from planner.capture.captured_step import CapturedGraph
from planner.capture.graphs.graph_runner import GraphRunner
from planner.compiled.views_outside import views_outside
from planner.lowering.lowerings import Lowering


def captured_graphs(runners: Sequence[GraphRunner], ran: Collection[int]) -> list[CapturedGraph]:
    """A :class:`CapturedGraph` for each runner.

    Args:
        runners: All runners.
        ran: The indices of those that the recorded step ran.
    """
    alike = {i: [k for k in sorted(ran) if runners[k].structure == runners[i].structure] for i in ran}
    return [
        CapturedGraph(
            r.structure,
            alike[r.index].index(r.index) if r.index in ran else 0,
            len(alike[r.index]) if r.index in ran else 0,
            r.spec,
            r.joint if r.index in ran else None,
            bool(r.gradients.received),
            r.overwritten_results,
        )
        for r in runners
    ]


def let_go(runners: Iterable[GraphRunner]) -> None:
    """Empty runners that no step will call any more."""
    for runner in runners:
        runner.let_go()


def collector(
    runners: list[GraphRunner],
    module: torch.nn.Module,
    lower: Lowering,
    *,
    cuda: bool = False,
    data: bool = False,
) -> Callable[..., Any]:
    """A Dynamo backend that puts a runner in the place of every graph of a module, and into ``runners``.

    With ``cuda`` the graphs will run on CUDA, wherever their tensors without data are. With ``data``
    they compute their results, by functions that ``lower`` makes; else they return tensors without data.
    """

    names = ModuleNames(module)

    def backend(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        call_what_was_captured(graph)
        name_modules(graph, names)
        apart = views_outside(graph)
        if apart is not None:
            graph, example_inputs = apart.rest, apart.inputs(example_inputs)
        runner = GraphRunner(len(runners), graph, example_inputs, lower, cuda=cuda, data=data)
        runners.append(runner)
        return runner if apart is None else apart.around(runner)

    return backend
