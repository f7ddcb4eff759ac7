"""What a module's forward and hooks change in Python: counters, caches, histories."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from torch import nn

CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


def remember(module: nn.Module) -> Callable[[], None]:
    """Note the attributes of a module and of all below it, and what is in plain containers among them,
    also those that hooks write to.

    Tensors are not copied: what has been written into one stays.

    Returns:
        A function that puts everything back as it was, in the same containers.
    """
    contents: dict[int, tuple[Any, Any]] = {}

    def note(container: Any) -> None:
        pending = [container]
        while pending:
            found = pending.pop()
            if type(found) in CONTAINERS and id(found) not in contents:
                contents[id(found)] = (found, found.copy())
                pending += found.values() if isinstance(found, dict) else found

    for part in module.modules():
        note(vars(part))
        for name, hooks in vars(part).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                for hook in hooks.values():
                    for container in _held_by(hook):
                        note(container)

    def put_back() -> None:
        for container, saved in contents.values():
            if container == saved if isinstance(container, set) else same(container, saved):
                continue
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(saved)

    return put_back


def _held_by(hook: Any) -> list[Any]:
    """What a hook can change: its variables from around it, and attributes of the object that it is of."""
    held = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or () if is_set(cell)]
    held += [vars(o) for o in (*held, getattr(hook, "__self__", None), hook) if _is_plain_object(o)]
    return held


def is_set(cell: Any) -> bool:
    """Whether a variable of a closure has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_plain_object(value: Any) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, nn.Module | type)


def same(container: Any, saved: Any) -> bool:
    """Whether two containers hold the very same objects in the same order."""
    if len(container) != len(saved):
        return False
    if isinstance(container, dict):
        return all(a is b and container[a] is saved[b] for a, b in zip(container, saved, strict=True))
    return all(a is b for a, b in zip(container, saved, strict=True))
