"""The units of ``fully_shard`` while a forward runs: the current one, and whether its hooks run.

Hooks of ``fully_shard`` gather and free parameters, and cast a unit's inputs. Their operator calls are no
part of the forward that a plan follows: neither the recording of a step nor a planned step counts them.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

ROOT = 0
"""The number of the root unit: of parameters of no other unit. It stays gathered through the backward."""


class Units:
    """Tells the unit that a forward is in.

    Args:
        modules: The modules of all units, the module itself among them, each with the number of its unit.

    Attributes:
        in_hooks: Whether hooks of one of these modules are running, not its forward.
    """

    def __init__(self, modules: Iterable[tuple[torch.nn.Module, int]] = ()) -> None:
        self._modules = list(modules)
        self.in_hooks = False
        self._inside = [ROOT]

    @property
    def current(self) -> int:
        """The number of the unit that the forward is in."""
        return self._inside[-1]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context in which hooks around those of ``fully_shard`` keep this up to date."""
        handles = []
        for module, number in self._modules:

            def hooks_begin(*_: Any) -> None:
                self.in_hooks = True

            def forward_begins(*_: Any, number: int = number) -> None:
                self._inside.append(number)
                self.in_hooks = False

            def hooks_end(*_: Any) -> None:
                if len(self._inside) > 1:
                    self._inside.pop()
                self.in_hooks = False

            handles += [
                module.register_forward_pre_hook(hooks_begin, prepend=True),
                module.register_forward_pre_hook(forward_begins),
                module.register_forward_hook(hooks_begin, prepend=True, always_call=True),
                module.register_forward_hook(hooks_end, always_call=True),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.in_hooks = False
