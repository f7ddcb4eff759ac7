"""Arrays by what they are indexed with and what they hold.

The index spaces are those of :mod:`solvers.model.indices`. ``PerStep`` has a number for each step,
``StepMask`` a bool; ``Steps`` holds steps; ``StepPerInstance`` has a step for each instance. *Moments* are
base operations at which a program counts memory.
"""

import numpy as np
from numpy.typing import NDArray

Schedule = NDArray[np.int64]
"""For each step the row that it runs."""

ValueMask = NDArray[np.bool_]
"""For each value whether it is kept, pinned, free to be decided about, and so on."""

PerValue = NDArray[np.int64]
"""For each value its bytes, or another number."""

BaseOpPerValue = NDArray[np.int64]
"""For each value a base operation: the one that makes, first uses or last uses it; -1 for none."""

RowPerValue = NDArray[np.int64]
"""For each value a row; -1 for none."""

BlockPerValue = NDArray[np.int64]
"""For each value the block that computes it; -1 for none."""

VariablePerValue = NDArray[np.int64]
"""For each value the variable that says whether it is kept; -1 where nothing is decided."""

ValueIds = NDArray[np.int64]
"""Values."""

PerRow = NDArray[np.int64]
"""For each row its workspace bytes, or its region."""

PerRowSeconds = NDArray[np.float64]
"""For each row its seconds."""

BaseOpPerRow = NDArray[np.int64]
"""For each row the base operation that it is a form of."""

BaseOps = NDArray[np.int64]
"""Base operations."""

PerBaseOp = NDArray[np.float64]
"""For each base operation bytes, as a program counts them."""

BlockPerOp = NDArray[np.int64]
"""For each forward operation, or each base operation, the block or segment that runs there."""

PerStep = NDArray[np.int64]
"""For each step bytes, or another number."""

StepMask = NDArray[np.bool_]
"""For each step whether something holds of it."""

Steps = NDArray[np.int64]
"""Steps."""

StepPerInstance = NDArray[np.int64]
"""For each instance the step at which its life begins or ends."""

ValuePerInstance = NDArray[np.int64]
"""For each instance the value that it is one of."""

InstanceMask = NDArray[np.bool_]
"""For each instance whether something holds of it."""

Instances = NDArray[np.int64]
"""Instances."""

Positions = NDArray[np.int64]
"""Positions."""

PerPosition = NDArray[np.int64]
"""For each position bytes, or another number."""

PositionMask = NDArray[np.bool_]
"""For each position whether something holds of it."""

PerBlock = NDArray[np.int64]
"""For each block of a chain, or each pair of them, bytes."""

PerBlockSeconds = NDArray[np.float64]
"""For each block of a chain its seconds, or for each option and block."""

BlockIds = NDArray[np.int64]
"""Blocks."""

PerMoment = NDArray[np.float64]
"""For each moment, in the order in which a program lists them, bytes as the program counts them."""

PerVariable = NDArray[np.float64]
"""For each variable of a program its value: a point of the program."""

Numbers = NDArray[np.float64]
"""Numbers that are indexed by none of these: sizes to try, seconds by amounts of memory."""

Integers = NDArray[np.int64]
"""Whole numbers that are indexed by none of these: offsets, amounts of memory."""
