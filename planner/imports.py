"""Imports that leave Python's random generator as it is: rich draws from it when it is first imported.

Meanwhile no garbage is collected: the collector would go through the user's model and the imported modules,
which all stay.
"""

import random
import sys
from importlib import import_module
from types import ModuleType

from planner.heap import made_to_stay


def import_without_drawing(name: str) -> ModuleType:
    """Import a module as ``importlib.import_module`` does, and restore the state of ``random``."""
    if name in sys.modules:
        return import_module(name)  # which waits for a thread that imports it just now
    state = random.getstate()
    try:
        with made_to_stay():
            return import_module(name)
    finally:
        random.setstate(state)
