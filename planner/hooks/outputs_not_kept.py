"""Outputs that a plan does not keep: tensors without data stand for them. Reading data is an error."""

from collections.abc import Sequence
from typing import Any

import torch

from planner._torch.joint import aot_metadata
from planner.compiled.graph_hook import GraphHook, HookContext
from planner.errors import PlanMismatch
from planner.graph.trace import TracedGraph

_NO_DATA = (
    "this output of the model was not kept: the plan computes it in pieces (split='loss'), and the training "
    "loop was planned to use nothing but the loss (outputs='dropped'). Plan with split='none', or compute "
    "what you want of it in a forward under torch.no_grad(), which runs without the plan"
)

_LIKE = ("empty_like", "full_like", "ones_like", "rand", "zeros_like")


class OutputNotKept(torch.Tensor):
    """An output without data. It knows its sizes and type; an operation on data is an error that says why."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise PlanMismatch(_NO_DATA) from error
        results = result if isinstance(result, tuple | list) else (result,)
        if all(r.is_meta for r in results if isinstance(r, torch.Tensor)):
            return result
        if isinstance(result, torch.Tensor) and func.__name__.startswith(("new_", *_LIKE)):
            return result.as_subclass(torch.Tensor)  # of its sizes only
        raise PlanMismatch(_NO_DATA)  # PyTorch adds a number without data to a tensor by doing nothing


class OutputsNotKept(GraphHook):
    """Puts such outputs in the place of those that the graph does without."""

    def __init__(self) -> None:
        self._shapes: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}

    def on_traced(self, traced: TracedGraph) -> None:
        positions = aot_metadata.output_positions(traced.joint, traced.forward_outputs)
        self._shapes = {positions[i]: (tuple(t.shape), t.dtype) for i, t in traced.dropped.items()}

    def results(self, node: Any, args: tuple[Any, ...], results: Sequence[Any]) -> Sequence[Any]:
        if not self._shapes:
            return results
        replaced = list(results)
        for i, (shape, dtype) in self._shapes.items():
            replaced[i] = torch.empty(shape, dtype=dtype, device="meta").as_subclass(OutputNotKept)
        return replaced


def hook(context: HookContext) -> GraphHook:  # noqa: ARG001
    """A hook for every graph that may refuse a second backward."""
    return OutputsNotKept()
