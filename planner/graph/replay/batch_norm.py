"""Batch normalisations are run again without their running statistics.

The first run has updated these already: a second update would count the batch twice. PyTorch has operators
that normalise by the batch alone, bit for bit alike.
"""

from torch.fx import Node

from planner._torch.cuda.batch_norm import (
    RESULTS,
    computes_statistics,
    overwrites_unseen,
    without_statistics,
)
from planner.graph.replay_rule import ReplayCall, ReplayRule


class BatchNorm(ReplayRule):
    """Batch normalisations that compute new running statistics."""

    def matches(self, node: Node) -> bool:
        return computes_statistics(node.target, node.args)

    def call_again(self, node: Node) -> ReplayCall:
        target, arguments = without_statistics(node.target, node.args)
        return ReplayCall(target, arguments, node.meta["val"][: RESULTS[node.target]])


class UnseenStatistics(ReplayRule):
    """Batch normalisations that overwrite statistics though their schema does not say so."""

    def matches(self, node: Node) -> bool:
        return overwrites_unseen(node.target, node.args)

    def repeatable(self, node: Node) -> bool:
        return False


RULES = (BatchNorm(), UnseenStatistics())
