"""Arrays by what they are indexed with and what they hold.

There are four index spaces. *Values* are those of ``graph.values``. *Rows* are those of ``graph.ops``: the
base operations in captured order, then the forms in which some of them are re-run. *Steps* count along a
schedule. *Moments* are the points in time that a program looks at.
"""

import numpy as np
from numpy.typing import NDArray

Schedule = NDArray[np.int64]
"""For each step the row that it runs."""

ValueMask = NDArray[np.bool_]
"""For each value whether it is kept, pinned, free to be decided about, and so on."""

PerValue = NDArray[np.int64]
"""For each value a number: bytes, or the row that makes, first uses or last uses it; -1 for none."""

ValueIds = NDArray[np.int64]
"""Values, by index."""

PerRow = NDArray[np.int64]
"""For each row a number: bytes, its region, or the row that it is a form of."""

PerRowSeconds = NDArray[np.float64]
"""For each row its seconds."""

RowIds = NDArray[np.int64]
"""Rows, by index."""

RowMask = NDArray[np.bool_]
"""For each row, or position between rows, whether something holds of it."""

PerStep = NDArray[np.int64]
"""For each step bytes, or another number."""

StepMask = NDArray[np.bool_]
"""For each step whether something holds of it."""

Positions = NDArray[np.int64]
"""Places in the forward phase at which it can be cut: position p lies before forward operation p."""

PerPosition = NDArray[np.int64]
"""For each position bytes, or another number."""

PerBlock = NDArray[np.int64]
"""For each block of a chain, or each pair of them, bytes."""

PerMoment = NDArray[np.float64]
"""For each moment bytes, as a program counts them."""

Numbers = NDArray[np.float64]
"""Numbers without units: a point of a program, weights, seconds by amounts of memory."""

Integers = NDArray[np.int64]
"""Whole numbers that are indexed by neither of these."""
