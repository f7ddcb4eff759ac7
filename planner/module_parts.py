"""The modules inside of a module, and the parameters and buffers that they have."""

from collections import OrderedDict
from collections.abc import Iterator

import torch

from planner.addresses import identity


def parts_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules inside of one, itself the first, as ``module.modules()`` gives them.

    That method goes through a generator for each level of nesting, and makes a name for each part: it takes
    five times as long, and planning looks through all parts dozens of times. A class may also override it to
    hide parts from its optimizer, whose memory counts all the same.
    """
    found: dict[torch.nn.Module, None] = {}
    pending: list[Iterator[torch.nn.Module | None]] = [iter([module])]  # by level: what is still to come
    while pending:
        for part in pending[-1]:
            if part is not None and part not in found:
                found[part] = None
                if part._modules:
                    pending.append(iter(part._modules.values()))
                    break
        else:
            pending.pop()
    return list(found)


def named_parts(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules inside of one by name, itself the first: what ``module.named_modules()`` gives, see
    :func:`parts_of`. One that is in several places has the first of its names."""
    names: dict[torch.nn.Module, str] = {}
    pending = [("", module)]
    while pending:
        name, part = pending.pop()
        if part not in names:
            names[part] = name
            if part._modules:
                inside = f"{name}." if name else ""
                pending += [(inside + n, p) for n, p in reversed(part._modules.items()) if p is not None]
    return {name: part for part, name in names.items()}


def tensors_of(part: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of a module itself, and those of its other attributes that are tensors."""
    others = [held for held in vars(part).values() if type(held) not in _NO_TENSORS]
    return [
        held
        for held in (*part._parameters.values(), *part._buffers.values(), *others)
        if isinstance(held, torch.Tensor)
    ]


_NO_TENSORS = frozenset((type(None), bool, int, float, str, dict, OrderedDict, set, list, tuple))


def parameters_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters of a module and its parts: what ``module.parameters()`` gives, see :func:`parts_of`."""
    held = (p for part in parts_of(module) for p in part._parameters.values() if p is not None)
    return list({identity(p): p for p in held}.values())


def buffers_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers of a module and its parts: what ``module.buffers()`` gives, see :func:`parts_of`."""
    held = (b for part in parts_of(module) for b in part._buffers.values() if b is not None)
    return list({identity(b): b for b in held}.values())
