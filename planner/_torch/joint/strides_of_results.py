"""Results of a graph have the strides that its operations gave them.

AOTAutograd hands out a result that is a view of one of the graph's own tensors as a tensor by itself, made by
``_unsafe_view`` to the same sizes. That computes strides anew: in dimensions of one element they are others
than the view's. What follows the graph then differs from eager: guards, and what kernels choose by strides.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd

from planner._torch.patches import replaced
from planner._torch.versions import set_version


@contextlib.contextmanager
def strides_of_results() -> Iterator[None]:
    """A context in which graphs are compiled to hand out such results with the strides of the views."""
    compile_ = AOTDispatchAutograd.post_compile

    def post_compile(spec: Any) -> Any:
        metadata = spec.fw_metadata
        first = metadata.num_mutated_inp_runtime_indices
        views = [first + index for index in metadata.unsafe_view_out_indices]
        if not views:
            return compile_(spec)
        metadata = copy.copy(metadata)
        metadata.num_unsafe_view_outputs, metadata.unsafe_view_out_indices = 0, []
        forward = _by_themselves(spec.compiled_fw_func, views)
        return compile_(replace(spec, compiled_fw_func=forward, fw_metadata=metadata))

    with replaced(AOTDispatchAutograd, {"post_compile": staticmethod(post_compile)}):
        yield


def _by_themselves(forward: Callable[[list[Any]], Any], views: Sequence[int]) -> Callable[[list[Any]], Any]:
    """A forward that returns some of its results as tensors of the same memory that are no views."""

    def run(args: list[Any]) -> list[Any]:
        results = list(forward(args))
        for index in views:
            view = results[index]
            alone = torch.ops.aten._unsafe_view(view, view.shape)
            if alone.stride() != view.stride():
                alone.as_strided_(view.shape, view.stride(), view.storage_offset())
                set_version(alone, 0)  # nothing was written
            results[index] = alone
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
