"""``backend="cudagraphs"`` for a planned module: which of its graphs are recorded, and for which shapes."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from planner._torch.cuda.recorder import recorder_for
from planner.compiled.calls import Calls
from planner.planfile.plan import GraphRecord, PlanRecord
from planner.runtime.recorded_graph import RecordedGraph, say


class Recordings:
    """The recorded graphs of a planned module, each of one shape and with a pool of its own.

    Args:
        plan: The plan.
        model: The module.
        calls: Its calls.
        warn: Tells the user what does not run as recorded.
    """

    def __init__(
        self,
        plan: PlanRecord,
        model: weakref.ref[torch.nn.Module],
        calls: Calls,
        warn: Callable[[str], None],
    ) -> None:
        self._plan, self._model, self._calls, self._warn = plan, model, calls, warn
        self._graphs: dict[tuple[str, int], tuple[list[Any], RecordedGraph]] = {}
        self._told = False

    def graph(self, record: GraphRecord | None, inputs: Sequence[Any]) -> RecordedGraph | None:
        """The recorded graph of a planned graph at the shapes of some inputs; None if it is not recorded.

        A graph that is captured again at the same shapes, as after hooks came, replaces the earlier one.

        Args:
            record: The plan's graph; None for one of other operations than were planned.
            inputs: Inputs of those shapes.
        """
        shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in inputs]
        device = next((t.device for t in self._own()), torch.device("cpu"))
        key = ("", 0) if record is None else (record.structure, record.occurrence)
        before, graph = self._graphs.get(key, (shapes, None))
        if reason := self._why_not(device, record) or (
            "inputs are of other shapes" if before != shapes else ""
        ):
            if not self._told:
                self._told = True
                say(self._warn, reason)
            return None
        if graph is not None:
            graph.forget()
        make: Any = partial(recorder_for, device)
        copies = self._plan.resident.gradient_bytes > 0
        made = RecordedGraph(device, make, self._own, self._calls, self._warn, copies_gradients=copies)
        self._graphs[key] = shapes, made
        return made

    def forget(self) -> None:
        """Free what was recorded."""
        for _, graph in self._graphs.values():
            graph.forget()

    def _own(self) -> Iterable[torch.Tensor]:
        model = self._model()
        return [] if model is None else [*model.parameters(), *model.buffers()]

    def _why_not(self, device: torch.device, record: GraphRecord | None) -> str:
        if recorder_for(device) is None:
            return f"the module is on the {device.type}, and CUDA graphs are a GPU's"
        if record is None:
            return "it is of other operations than were planned"
        if len(record.executions) > 1 or record.occurrences > 1:
            return "layers share a graph"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "several processes train"
        return ""
