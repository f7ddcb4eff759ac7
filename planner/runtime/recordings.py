"""Which graphs of a planned module run as CUDA graphs (``backend="cudagraphs"``), and for which shapes."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from planner._torch.cuda.recorder import recorder_for
from planner.compiled.calls import Calls
from planner.planfile.plan import GraphRecord, PlanRecord
from planner.runtime.recorded_graph import RecordedGraph, warn_unrecorded


class Recordings:
    """The recorded graphs of a planned module, each for the shapes at which it was first captured.

    Args:
        plan: The plan.
        model: The module.
        calls: Its calls.
        warn: Called with the text of a warning, once for the first graph that is not recorded.
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
        self._warned = False

    def new_graph(self, record: GraphRecord | None, inputs: Sequence[Any]) -> RecordedGraph | None:
        """A new :class:`RecordedGraph` for a graph that Dynamo captured; None if it is not to be recorded.

        Dynamo may capture a graph again at the same shapes, as after a hook was registered. The new one then
        replaces the earlier one, and frees its recordings.

        Args:
            record: The graph in the plan; None if its operations are not as planned.
            inputs: The inputs that it was captured with.
        """
        shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in inputs]
        device = next((t.device for t in self._parameters_and_buffers()), torch.device("cpu"))
        key = ("", 0) if record is None else (record.structure, record.occurrence)
        first_shapes, earlier = self._graphs.get(key, (shapes, None))
        reason = self._why_not(device, record)
        if not reason and shapes != first_shapes:
            reason = "inputs are of other shapes"
        if reason:
            if not self._warned:
                self._warned = True
                warn_unrecorded(self._warn, reason)
            return None
        if earlier is not None:
            earlier.forget()
        new_recorder: Any = partial(recorder_for, device)
        graph = RecordedGraph(
            device,
            new_recorder,
            self._parameters_and_buffers,
            self._calls,
            self._warn,
            copies_gradients=self._plan.resident.gradient_bytes > 0,
        )
        self._graphs[key] = shapes, graph
        return graph

    def forget(self) -> None:
        """Free all recordings and their memory."""
        for _, graph in self._graphs.values():
            graph.forget()

    def _parameters_and_buffers(self) -> Iterable[torch.Tensor]:
        model = self._model()
        return [] if model is None else [*model.parameters(), *model.buffers()]

    def _why_not(self, device: torch.device, record: GraphRecord | None) -> str:
        """Why a graph is not recorded at any shapes; empty if it may be."""
        if recorder_for(device) is None:
            return f"the module is on the {device.type}, and CUDA graphs are a GPU's"
        if record is None:
            return "it is of other operations than were planned"
        if len(record.executions) > 1 or record.occurrences > 1:
            return "layers share a graph"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "several processes train"
        return ""
