"""What Inductor is allowed to fuse in the programs of a plan, by name."""

from typing import Literal

Fusion = Literal["anywhere", "earlier", "in-order"]
"""What is fused.

``"anywhere"``: what Inductor chooses, as in a step without a plan. ``"in-order"``: only what no call of a
library lies between, so that nothing is computed much earlier or later than the plan says. ``"earlier"``:
that, and what can come before such a call in the memory of what it is the last to read.
"""
