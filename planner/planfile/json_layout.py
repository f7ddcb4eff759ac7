"""JSON with one record a line."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

_WIDTH = 110


def laid_out(value: Any) -> str:
    """Write JSON for people: what is short stays on one line, long lists of numbers fill their lines, and a
    list of records has a line for each, however long."""
    return "".join(_pieces(value, 0))


def _pieces(value: Any, depth: int) -> Iterator[str]:
    flat = not isinstance(value, dict | list) or _is_flat(value)
    if flat:
        line = _line(value)
        if len(line) + 2 * depth <= _WIDTH or not value or not isinstance(value, dict | list):
            yield line
            return
    outer, inner = "  " * depth, "  " * (depth + 1)
    if flat and isinstance(value, list) and not any(isinstance(item, str) for item in value):
        # Strings may hold spaces, at which a line must not break.
        yield "[\n"
        yield textwrap.fill(line[1:-1], _WIDTH, initial_indent=inner, subsequent_indent=inner)
        yield f"\n{outer}]"
        return
    if isinstance(value, dict):
        yield "{"
        for index, (key, item) in enumerate(value.items()):
            yield f"{',' if index else ''}\n{inner}{json.dumps(key, ensure_ascii=False)}: "
            yield from _pieces(item, depth + 1)
        yield f"\n{outer}}}"
        return
    yield "["
    records = all(isinstance(item, dict) and _is_flat(item) for item in value)
    for index, item in enumerate(value):
        yield f"{',' if index else ''}\n{inner}"
        yield from [_line(item)] if records else _pieces(item, depth + 1)
    yield f"\n{outer}]"


def _is_flat(value: dict[str, Any] | list[Any]) -> bool:
    return not any(isinstance(item, dict | list) for item in _items(value))


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _items(value: dict[str, Any] | list[Any]) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value)
