"""Private PyTorch APIs: optimizers that a step looks into, for a learning rate say.

Tested with torch 2.13.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable


@functools.cache
def read_optimizers_alone(ours: Callable[[Any], bool]) -> None:
    """Let a step read ``optimizer.param_groups`` as attributes of any other object.

    Dynamo takes it for the optimizer's own step. It makes the parameters there parts of the graph, instead of
    inputs that have gradients, and changes the settings of an optimizer on a GPU.

    Args:
        ours: Whether a translator of Dynamo's works for a backend of ours.
    """
    read = OptimizerVariable.var_getattr

    def read_alone(self: Any, tx: Any, name: str) -> Any:
        if name == "param_groups" and ours(tx):
            return UserDefinedObjectVariable.var_getattr(self, tx, name)
        return read(self, tx, name)

    setattr(OptimizerVariable, "var_getattr", read_alone)  # noqa: B010
