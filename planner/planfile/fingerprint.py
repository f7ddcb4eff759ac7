"""What identifies a model: the names, shapes and dtypes of its state, never its values."""

import hashlib
import json
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def state_digest(model: "nn.Module", floating: "torch.dtype | None" = None) -> str:
    """Hash the sorted names, shapes and dtypes of a module's `state_dict`.

    No tensor's data is read, so it works on the meta device, and costs nothing for large models.

    Args:
        model: The module.
        floating: The dtype that stands for that of each floating point tensor; None for its own.

    Returns:
        A hexadecimal SHA-256 of 64 characters; equal where all names, shapes and dtypes are.
    """
    lines = []
    # A line is json.dumps([name, shape, dtype]); its end is cached, as thousands of entries have few shapes.
    described: dict[tuple[tuple[int, ...], Any], str] = {}
    for name, entry in sorted(model.state_dict().items()):
        try:
            of_type = floating if floating is not None and entry.is_floating_point() else entry.dtype
            facts = tuple(map(int, entry.shape)), of_type
        except (AttributeError, RuntimeError):
            # A module's extra state need not be a tensor, and a lazy parameter has no shape yet.
            facts = (), type(entry).__qualname__
        if facts not in described:
            described[facts] = json.dumps((facts[0], str(facts[1])))[1:]
        lines.append(f"[{encode_basestring_ascii(name)}, {described[facts]}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


_SCRIPTS = ("__main__.", "__mp_main__.")
"""What a script's classes are found in, when it runs and in processes that it starts with "spawn"."""


def same_class(planned: str, found: str) -> bool:
    """Whether two names of :func:`class_name` are of one class, as far as is known.

    The class of a script is named by ``__main__`` where it runs, ``__mp_main__`` in processes that it starts,
    and by its module's name where it is imported.
    """
    script, other = _name_in_script(planned), _name_in_script(found)
    if script is None or other is None:
        script, other = script or other, found if other is None else planned
        return planned == found or (script is not None and other.endswith(f".{script}"))
    return script == other


def _name_in_script(name: str) -> str | None:
    return next((name.removeprefix(s) for s in _SCRIPTS if name.startswith(s)), None)


def class_name(model: "nn.Module") -> str:
    """Qualified name of a module's class."""
    return f"{type(model).__module__}.{type(model).__qualname__}"
