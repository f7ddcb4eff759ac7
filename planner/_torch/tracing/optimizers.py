"""Private PyTorch APIs: optimizers that a step looks into, for a learning rate say.

Tested with torch 2.13 and 2.15.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from planner._torch.compat import private


@functools.cache
def read_optimizers_alone(ours: Callable[[Any], bool]) -> None:
    """Let a step read ``optimizer.param_groups`` as attributes of any other object.

    Dynamo takes it for the optimizer's own step. It makes the parameters there parts of the graph, instead of
    inputs that have gradients, and changes the settings of an optimizer on a GPU.

    Args:
        ours: Whether a translator of Dynamo's works for a backend of ours.
    """
    optimizer: Any = OptimizerVariable
    if private("GetSet") is not None:
        attribute = optimizer.tp_getset["param_groups"]
        prepare = attribute.getter  # which returns None: it is then read as any other is
        attribute.getter = lambda self, tx: None if ours(tx) else prepare(self, tx)
        return
    read = optimizer.var_getattr

    def read_alone(self: Any, tx: Any, name: str) -> Any:
        if name == "param_groups" and ours(tx):
            return UserDefinedObjectVariable.var_getattr(self, tx, name)
        return read(self, tx, name)

    optimizer.var_getattr = read_alone
