"""Modules whose forward starts from results of the previous forward, as spiking neurons do.

Gradients flow through these results, and PyTorch refuses to differentiate a graph twice. So users reset the
results between steps, or detach them. Planning and verifying run the step several times, and reset them.
"""

CARRIED_HISTORY = (
    "the module starts from results of the previous forward, which gradients flow through: the plan assumes "
    "that you reset these, before each step, to their present values. Where you detach them instead, plan "
    "after the first step"
)
"""A note on a step."""


def is_of_carried_history(error: BaseException | None) -> bool:
    """Whether an error says that a step differentiated what an earlier one had left in the module."""
    return isinstance(error, RuntimeError) and "backward through the graph a second time" in str(error)
