"""The step with checkpoints placed by hand, or by the model itself, recorded."""

import difflib
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from planner.errors import CaptureError
from planner.estimation.table import Checkpointed
from planner.planning.prepared import Prepared
from planner.problem.selection import SelectionError

Change = Callable[[torch.nn.Module], None]
"""A function that changes a copy of the model, as by putting checkpoints into it."""


def with_checkpoints(prepared: Prepared, patterns: Sequence[str]) -> tuple[Change, Checkpointed]:
    """A change that puts a checkpoint around each of some modules, and the step with it."""
    names = matching_modules(prepared.model, patterns)
    return wrap_in_checkpoints(names), record_checkpointed(prepared, names)


def enable_checkpointing(prepared: Prepared) -> tuple[Change, Checkpointed] | None:
    """A change that switches on the checkpoints of a Hugging Face model, and the step with it; else None."""
    made = record_hugging_face(prepared)
    return None if made is None else (enable, made)


def record_checkpointed(prepared: Prepared, names: Sequence[str]) -> Checkpointed:
    """The step with a checkpoint around each of some modules, recorded.

    Raises:
        CaptureError: If it cannot be run so.
    """
    try:
        return _recorded(prepared, wrap_in_checkpoints(names), names)
    except CaptureError as error:
        why = str(error).rstrip(".")
        raise CaptureError(
            f"with torch.utils.checkpoint around {', '.join(names)}: {why}. Such a module runs twice, and "
            "cannot where it changes its arguments, as by appending to a cache of keys and values: for "
            "Hugging Face's models set model.config.use_cache = False"
        ) from error


def wrap_in_checkpoints(names: Sequence[str]) -> Change:
    """A change that puts ``torch.utils.checkpoint`` around each of some modules."""

    def wrap(copied: torch.nn.Module) -> None:
        for name in names:
            part = copied.get_submodule(name)
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)

    return wrap


def record_hugging_face(prepared: Prepared) -> Checkpointed | None:
    """The step with a Hugging Face model's own checkpoints, recorded; None for other models."""
    model = prepared.model
    layers = [
        path
        for path, module in model.named_modules()
        if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)
    ]
    if not layers or not getattr(model, "supports_gradient_checkpointing", False):
        return None
    return _recorded(prepared, enable, layers)


def enable(copied: torch.nn.Module) -> None:
    """Switch on the checkpoints of a Hugging Face model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that the method will be renamed
        copied.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]


def _recorded(prepared: Prepared, change: Change, names: Sequence[str]) -> Checkpointed:
    timeline, whole = prepared.changed(change)
    before = prepared.problem.eager.seconds
    return Checkpointed(
        modules=tuple(names),
        peak_bytes=prepared.resident.total + timeline.peak_bytes,
        dynamic_peak_bytes=timeline.peak_bytes,
        total_bytes=whole.total_bytes,
        overhead=timeline.seconds / before - 1 if before else 0.0,
    )


def matching_modules(model: torch.nn.Module, patterns: Sequence[str] | str) -> list[str]:
    """The modules that patterns match, by one name each; where one is inside another, the outermost.

    Raises:
        SelectionError: If a pattern matches none, or none that is called.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    found: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = [path for path in paths if fnmatchcase(path, pattern)]
        if not matching:
            near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.4)
            hint = f"; near to it are {', '.join(near)}" if near else ""
            raise SelectionError(f"checkpoints= names {pattern!r}, but no module of the model matches{hint}")
        called = [path for path in matching if is_called(model.get_submodule(path))]
        if not called:
            raise SelectionError(
                f"checkpoints= names {pattern!r}, a container without a forward, which is never called: name "
                f"what is in it, as '{pattern}.*'"
            )
        found += called
    outermost = [a for a in found if not any(a.startswith(b + ".") for b in found)]
    named = dict[int, str]()
    for path in outermost:
        named.setdefault(id(model.get_submodule(path)), path)
    return list(named.values())


def is_called(module: torch.nn.Module) -> bool:
    """Whether a module has a forward that a checkpoint could be put around."""
    # An nn.ModuleList has no forward: a checkpoint around it would never run.
    return type(module).forward is not torch.nn.Module.forward or "forward" in vars(module)
