"""Imports that leave Python's random generator as it is: rich draws from it when it is first imported."""

import random
from importlib import import_module
from types import ModuleType


def import_without_drawing(name: str) -> ModuleType:
    """What ``importlib.import_module(name)`` returns, with the state of ``random`` as it was before."""
    state = random.getstate()
    try:
        return import_module(name)
    finally:
        random.setstate(state)
