"""The random generators that a training step may draw from: PyTorch's, Python's, numpy's, and others."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def is_generator(value: object) -> bool:
    """Whether a value is a random generator whose state can be restored."""
    return issubclass(type(value), _KINDS) and type(value) is not random.SystemRandom


@dataclass(frozen=True, eq=False)
class GeneratorStates:
    """The states of random generators.

    Attributes:
        cpu, cuda, python, numpy: Of the default generators.
        others: Other generators, each with its state.
    """

    cpu: torch.Tensor
    cuda: list[torch.Tensor]
    python: Any
    numpy: Any
    others: list[tuple[Any, Any]]

    @classmethod
    def now(cls, others: Iterable[Any] = ()) -> Self:
        """The present states. CUDA's generators are included where CUDA is in use already.

        Args:
            others: Generators besides the default ones.
        """
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if in_use else [],
            random.getstate(),
            np.random.get_state(legacy=False),
            [(generator, _state(generator)) for generator in others],
        )

    def restore(self) -> None:
        """Restore every generator."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        for generator, state in self.others:
            if isinstance(generator, random.Random):
                generator.setstate(state)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            else:
                generator.set_state(state)

    def same_as(self, other: "GeneratorStates") -> bool:
        """Whether every generator is in the same state."""
        return bool(_plain(self._states()) == _plain(other._states()))

    def _states(self) -> list[Any]:
        others = [state for _, state in self.others]
        return [self.cpu, self.cuda, self.python, self.numpy, others]


@contextmanager
def generators_restored(others: Iterable[Any] = ()) -> Iterator[None]:
    """A context that leaves random generators, the default ones and others, as they were."""
    states = GeneratorStates.now(others)
    try:
        yield
    finally:
        states.restore()


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _plain(state: Any) -> Any:
    """A state in a form that ``==`` compares."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    if isinstance(state, list):
        return [_plain(value) for value in state]
    return state.tolist() if isinstance(state, np.ndarray | torch.Tensor) else state
