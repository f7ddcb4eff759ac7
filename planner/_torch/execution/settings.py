"""PyTorch's settings of how to compute, for the process or the thread.

They decide which kernel an operator takes, how it rounds, and which type new tensors have. A re-run runs
under the settings of the first run.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch


class _Precision:
    """Reads the precision of some kernels: their own, or that of all kernels."""

    def __init__(self, read: Callable[..., str], kernels: tuple[str, str]) -> None:
        self._read, self._kernels = read, kernels
        self.reads = partial(read, *kernels)  # each call that a step notes reads all settings

    def __call__(self) -> str:
        return self.reads()

    def own(self) -> str:
        """Their own; "none" where they have none. To see that, what is above them is changed."""
        device, part = self._kernels
        if device == "generic":
            return self()
        above = _Precision(self._read, ("generic" if part == "all" else device, "all"))
        if above.own() == "none":  # as all kernels then
            above = _Precision(self._read, ("generic", "all"))
        now, write = above(), cast(Any, torch._C)._set_fp32_precision_setter
        other = "tf32" if self() == "ieee" else "ieee"
        write(*above._kernels, other)
        follows = self() == other
        write(*above._kernels, now)
        return "none" if follows else self()


def _precisions() -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    if not hasattr(torch._C, "_get_fp32_precision_getter"):  # before 2.9
        return [
            (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
            (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
        ]
    read: Any = torch._C._get_fp32_precision_getter
    write: Any = torch._C._set_fp32_precision_setter
    # What is set for all kernels comes first: those that follow it need no setting of their own then.
    kernels = (
        *(("generic", "all"), ("cuda", "all"), ("mkldnn", "all")),
        *(("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul"), ("mkldnn", "conv")),
    )
    return [(_Precision(read, one), partial(write, *one)) for one in kernels]


def _reductions() -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    def put(write: Callable[..., object], allowed: Any) -> None:
        write(*allowed) if isinstance(allowed, tuple) else write(allowed)  # which one depends on the version

    names = (
        "cublas_allow_fp16_reduced_precision_reduction",
        "cublas_allow_bf16_reduced_precision_reduction",
        "cublas_allow_fp16_accumulation",
        "cpu_allow_fp16_reduced_precision_reduction",
    )
    there = [name for name in names if hasattr(torch._C, f"_set_{name}")]
    return [
        (getattr(torch._C, f"_get_{name}"), partial(put, getattr(torch._C, f"_set_{name}"))) for name in there
    ]


def _deterministic() -> tuple[bool, bool]:
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(mode[0], warn_only=mode[1])


_EACH: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (_deterministic, _set_deterministic),
    (
        torch._C._get_deterministic_fill_uninitialized_memory,
        torch._C._set_deterministic_fill_uninitialized_memory,
    ),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    *_reductions(),
    *_precisions(),
)
_READ = tuple(read.reads if isinstance(read, _Precision) else read for read, _ in _EACH)


def settings() -> tuple[Any, ...]:
    """The present settings."""
    return tuple([read() for read in _READ])


@contextlib.contextmanager
def set_as(wanted: tuple[Any, ...]) -> Iterator[None]:
    """A context with the settings that :func:`settings` returned before."""
    changed: list[tuple[Callable[[Any], object], Any]] = []
    try:
        for (read, write), then in zip(_EACH, wanted, strict=True):
            if (now := read()) != then:
                changed.append((write, read.own() if isinstance(read, _Precision) else now))
                write(then)
        yield
    finally:
        for write, before in reversed(changed):
            write(before)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A context in which tensors that are made without naming a type have this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
