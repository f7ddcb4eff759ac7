"""Files that describe a device. They are data from outside: each figure is checked."""

import json
import os
from collections.abc import Mapping
from typing import Any

_LARGEST_FILE = 1 << 20
MOST_CHARACTERS = 200
_MOST_BYTES = 1 << 50
_SLOWEST, _FASTEST = 1e3, 1e21
"""Of FLOP/s and of bytes per second."""


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: The file cannot be read, or holds no object.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_LARGEST_FILE + 1)
        if len(text) > _LARGEST_FILE:
            raise ValueError("it is too large for a device")
        given = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f" cannot be read: {str(error)[:300]}") from None
    if not isinstance(given, dict):
        raise ValueError(": a device is a JSON object")
    return given


def wrong_figure(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first field with a figure that no device has, and what is expected there; None where all are right.

    Args:
        values: All fields of a device.
    """
    name, flops, capability = values["name"], values["flops"], values["capability"]
    if not isinstance(name, str) or not 1 <= len(name) <= MOST_CHARACTERS:
        return "name", f"a text of at most {MOST_CHARACTERS} characters"
    if values["kind"] not in ("cpu", "cuda"):
        return "kind", "'cpu' or 'cuda'"
    if not isinstance(flops, Mapping) or "float32" not in flops:
        return "flops", "FLOP/s by dtype, 'float32' among them"
    if not all(_is_number(figure) and _SLOWEST <= figure <= _FASTEST for figure in flops.values()):
        return "flops", f"numbers of at least {_SLOWEST:g}, and at most {_FASTEST:g}"
    for field in ("bandwidth", "to_host", "from_host"):
        if not _is_number(values[field]) or not _SLOWEST <= values[field] <= _FASTEST:
            return field, f"a number of at least {_SLOWEST:g}, and at most {_FASTEST:g}"
    if not _is_number(values["launch_seconds"]) or not 0 <= values["launch_seconds"] <= 1:
        return "launch_seconds", "a number of at least 0, and at most 1"
    for field, least, most in (
        ("memory_bytes", 1, _MOST_BYTES),
        ("allocation_rounding_bytes", 1, 1 << 30),
        ("context_bytes", 0, _MOST_BYTES),
        ("library_bytes", 0, _MOST_BYTES),
    ):
        value = values[field]
        if not _is_number(value) or not least <= value <= most or value != int(value):
            above = "above 0" if least else "of at least 0"
            return field, f"a whole number {above}, and at most {most}"
    if capability is not None and not _is_version(capability):
        return "capability", "two whole numbers, as [8, 0]"
    if not isinstance(values["cudnn"], bool):
        return "cudnn", "true or false"
    if values["figures"] not in ("published", "calibrated"):
        return "figures", "'published' or 'calibrated'"
    return None


def _is_version(value: object) -> bool:
    fits = isinstance(value, (list, tuple)) and len(value) == 2
    return fits and all(type(part) is int and 0 <= part < 1000 for part in value)  # type: ignore[attr-defined]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
