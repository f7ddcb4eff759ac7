"""How operations are run a second time with the same result and no further effect: one file for each case."""

from importlib import import_module
from pkgutil import iter_modules

from torch.fx import Node

from planner.graph.replay_rule import ReplayRule

REPLAY_RULES: tuple[ReplayRule, ...] = tuple(
    rule
    for found in iter_modules(__path__, f"{__name__}.")
    for rule in getattr(import_module(found.name), "RULES", ())
)
"""All of them. No operation matches two."""

_AS_IT_WAS = ReplayRule()


def rule_of(node: Node) -> ReplayRule:
    """The rule that an operation follows."""
    return next((rule for rule in REPLAY_RULES if rule.matches(node)), _AS_IT_WAS)
