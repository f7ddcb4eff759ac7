"""The halves of a step."""

from typing import Literal

Role = Literal["forward", "backward"]
"""Which half of a step a graph is."""
