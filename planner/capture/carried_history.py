"""Modules that go on, in each forward, from results of the one before, as spiking neurons do.

Gradients flow through these results, and no step may differentiate what the one before has: users set them
back, or detach them, between steps. Planning and verifying run the step several times, and do the first.
"""

CARRIED_HISTORY = (
    "the module goes on from results of the forward before, which gradients flow through: it is planned as "
    "if these were set back, before each step, to what is there now. Where they are detached instead, plan "
    "after the first step"
)
"""A note on a step."""


def is_of_carried_history(error: BaseException | None) -> bool:
    """Whether an error says that a step differentiated what an earlier one had left in the module."""
    return isinstance(error, RuntimeError) and "backward through the graph a second time" in str(error)
