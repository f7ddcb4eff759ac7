"""Training programs as their users write them: own loss, optimizer, autocast, clipping, averages, schedules.

Each is a function of a :class:`~benchmarks.users.training.Training`, which plans what the program hands to
``training.step`` or ``training.model``, or leaves it as it is. It trains for a few steps and returns all that
is to be compared. Own small implementations of what domains train, with random weights and data.
"""

import importlib

from benchmarks.users.training import PROGRAMS, Program

FAMILIES = (
    "forces", "folding", "operators", "rendering", "speech", "reinforcement", "meta", "implicit",
    "state_spaces", "generative", "contrastive", "sparse",
)  # fmt: skip
"""Files of this package with programs; importing one adds its programs to ``PROGRAMS``."""


def everything() -> dict[str, Program]:
    """All programs of all families."""
    for family in FAMILIES:
        importlib.import_module(f"{__name__}.{family}")
    return PROGRAMS


def family_of(name: str) -> str:
    """The file that a program is written in."""
    return PROGRAMS[name].__module__.rpartition(".")[2]
