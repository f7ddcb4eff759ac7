"""Names of the kinds of fusion that Inductor is allowed in the programs of a plan."""

from typing import Literal

Fusion = Literal["anywhere", "earlier", "in-order"]
"""The operations that Inductor may fuse.

``"anywhere"``: all that it chooses, as in a step without a plan. ``"in-order"``: only operations with no call
of a library between them, so that nothing is computed much earlier or later than in the plan. ``"earlier"``:
those, and operations that can move before such a call because their results reuse the memory of values that
they are the last to read.
"""
