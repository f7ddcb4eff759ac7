"""Which private names of PyTorch exist in which version, and what is done where one does not.

The product is developed with torch 2.13. A name that came later than the oldest version it runs on stands
here, with the version it came in and what is done without it; :func:`private` gives it, or None. Everything
else that is private is imported where it is used, in the other files of ``planner/_torch/``.
"""

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from planner.errors import PlannerError


@dataclass(frozen=True)
class Private:
    """A private name that not all supported versions have.

    Attributes:
        module, name: Where it is.
        since: The first version that has it, ``(major, minor)``.
        fallback: What is done where it is missing.
        argument: Of a function that older versions have too: the argument that is new.
    """

    module: str
    name: str
    since: tuple[int, int]
    fallback: str
    argument: str | None = None


TABLE = (
    Private(
        "torch._dynamo.variables.iter",
        "DictViewIterator",
        (2, 13),
        "iterators of dictionaries are those of lists, which Dynamo rebuilds after a graph break by itself",
    ),
    Private(
        "torch._dynamo.eval_frame",
        "_optimize",
        (2, 13),
        "the planned shape and the others get a function of their own each; code called inside that breaks a "
        "graph looks up the captures of both",
        argument="isolate_recompiles",
    ),
    Private(
        "torch.distributed.fsdp._fully_shard._fsdp_collectives",
        "_default_reduce_scatter_input_fn",
        (2, 15),
        "fully_shard keeps gradients as they are computed, and casts, adds up and reduces them by itself",
    ),
    Private(
        "torch.distributed.pipelining.schedules",
        "_wait_and_release_fwd_send",
        (2, 15),
        "stages of pipelines hold what they sent until its backward, and buffers to receive throughout",
    ),
)


OLDEST, NEWEST = (2, 13), (2, 15)
"""The versions between which graphs were tested; see ``docs/results/versions.md``."""


def version() -> tuple[int, int]:
    """Major and minor version of the PyTorch that is installed."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def graphs_are_off() -> str | None:
    """Why no graph is captured with the PyTorch that is installed; None where graphs were tested with it."""
    if OLDEST <= version() <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
    return f"PyTorch {torch.__version__} is none of those that graphs were tested with ({oldest} to {newest})"


def is_exporting() -> bool:
    """``torch.compiler.is_exporting()``, which PyTorch has from 2.7 on."""
    asked = getattr(torch.compiler, "is_exporting", None)
    return asked is not None and bool(asked())


def disable(function: Any, reason: str) -> Any:
    """``torch.compiler.disable``, which takes a reason from 2.7 on."""
    if "reason" in inspect.signature(torch.compiler.disable).parameters:
        return torch.compiler.disable(function, reason=reason)
    return torch.compiler.disable(function)


class _Missing(type):
    """What stands for a private name that another PyTorch lacks: graphs alone need it, and are off there."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name, (), {})

    def __call__(cls, *_args: Any, **_kwargs: Any) -> Any:
        raise PlannerError(f"{cls.__name__}: {graphs_are_off()}. Plan with backend='replay'")


def of_graphs(module: str, *names: str) -> Any:
    """A module of PyTorch's that only graphs need, or names in it.

    What the PyTorch that is installed lacks is a stand-in, if graphs are off with it.

    Raises:
        ImportError: It lacks one, and graphs were tested with it.
    """
    try:
        there = import_module(module)
    except ImportError:
        if graphs_are_off() is None:
            raise
        there = _Missing(module, (), {})  # type: ignore[assignment]
    if not names:
        return there
    found = []
    for name in names:
        try:
            found.append(getattr(there, name, None) or import_module(f"{module}.{name}"))
        except ImportError:
            if graphs_are_off() is None:
                raise
            found.append(_Missing(name, (), {}))
    return found[0] if len(found) == 1 else tuple(found)


def private(name: str) -> Any:
    """The object of a name in :data:`TABLE`, or None where this PyTorch does not have it."""
    row = next(row for row in TABLE if row.name == name)
    try:
        module = import_module(row.module)
    except ModuleNotFoundError:
        return None
    return getattr(module, row.name, None)


def takes_argument(name: str, argument: str) -> bool:
    """Whether the function of a name in :data:`TABLE` takes an argument that older versions do not have."""
    function = private(name)
    return function is not None and argument in inspect.signature(function).parameters
