"""Leaving out hooks that run after the gradient of a weight was accumulated."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from planner._torch.tensors import hooks_after_accumulation
from planner.errors import warn
from planner.training_step.arrivals.reach import Reach


@contextlib.contextmanager
def only_hooks_that_are_put_back(model: torch.nn.Module, *, none: bool = False) -> Iterator[None]:
    """A context in which hooks after accumulation run only if their changes can be put back.

    Args:
        model: The hooks are those on its parameters.
        none: Leave out all of these hooks.
    """
    left_out: list[tuple[dict[int, Any], dict[int, Any]]] = []
    why: dict[str, str] = {}
    try:
        for name, parameter in model.named_parameters():
            hooks = hooks_after_accumulation(parameter)
            for hook in hooks.values():
                if (opaque := Reach(hook).opaque) is not None:
                    why.setdefault(f"{called(hook)}, which refers to {opaque}", name)
            if hooks and (none or any(Reach(hook).opaque for hook in hooks.values())):
                left_out.append((hooks, dict(hooks)))
                hooks.clear()  # the very dictionary that autograd calls
        for which, name in why.items():
            warn(
                f"verify does not run the hooks after accumulation on {name} ({which}), as it could not put "
                "their changes back: gradients are compared and peaks are measured without them. To compare "
                "weights too, run a few steps with and without the plan"
            )
        yield
    finally:
        for hooks, before in left_out:
            hooks |= {key: hook for key, hook in before.items() if key not in hooks}


def called(hook: Callable[..., Any]) -> str:
    """The name of a hook, for messages."""
    function: Any = getattr(hook, "func", hook)
    return str(getattr(function, "__qualname__", type(function).__qualname__))
