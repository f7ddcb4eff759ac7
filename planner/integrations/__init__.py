"""Callbacks for trainers; each module needs the library of its trainer."""

from planner.imports import import_without_drawing

import_without_drawing("rich.style")  # the integrations import it; its import draws a random number
