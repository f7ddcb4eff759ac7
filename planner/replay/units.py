"""The units of ``fully_shard`` while a forward runs: which one, and whether hooks around it run.

Hooks of ``fully_shard`` gather and free, and cast what a unit is given. What they call is no part of the
forward that a plan follows: it is not counted, in the recording of a step and in every planned step alike.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

ROOT = 0
"""The number of the unit that has what no other has. It stays gathered through the backward."""


class Units:
    """Which unit of a module's a forward is in.

    Args:
        modules: The modules of all units, the module itself among them, each with the number of its unit.

    Attributes:
        in_hooks: Whether hooks of one of these modules run, not its forward.
    """

    def __init__(self, modules: Iterable[tuple[torch.nn.Module, int]] = ()) -> None:
        self._modules = list(modules)
        self.in_hooks = False
        self._inside = [ROOT]

    @property
    def current(self) -> int:
        """The number of the unit."""
        return self._inside[-1]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context in which hooks before and behind all others of these modules keep this up to date."""
        handles = []
        for module, number in self._modules:

            def enter(*_: Any) -> None:
                self.in_hooks = True

            def begin(*_: Any, number: int = number) -> None:
                self._inside.append(number)
                self.in_hooks = False

            def end(*_: Any) -> None:
                self.in_hooks = True

            def leave(*_: Any) -> None:
                if len(self._inside) > 1:
                    self._inside.pop()
                self.in_hooks = False

            handles += [
                module.register_forward_pre_hook(enter, prepend=True),
                module.register_forward_pre_hook(begin),
                module.register_forward_hook(end, prepend=True, always_call=True),
                module.register_forward_hook(leave, always_call=True),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.in_hooks = False
