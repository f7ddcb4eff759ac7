"""Imports that leave Python's random generator as it is: rich draws from it when it is first imported.

Meanwhile no garbage is collected: the collector would go through the user's model, which is there already,
and through what is imported, which stays.
"""

import random
import sys
from importlib import import_module
from types import ModuleType

from planner.heap import made_to_stay


def import_without_drawing(name: str) -> ModuleType:
    """What ``importlib.import_module(name)`` returns, with the state of ``random`` as it was before."""
    if name in sys.modules:
        return import_module(name)  # which waits for a thread that imports it just now
    state = random.getstate()
    try:
        with made_to_stay():
            return import_module(name)
    finally:
        random.setstate(state)
