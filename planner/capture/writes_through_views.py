"""Writes in place to parts of tensors: traced, each becomes a copy of the whole tensor."""

from collections.abc import Iterable

import torch

from planner.graph.joint_graph import JointGraph

aten = torch.ops.aten
_COPIES = {
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
}
_WORTH_TELLING = 1.25
WRITES = "writes in place to parts of tensors are traced as copies of the whole"
"""The words by which the note is recognised."""


def slower_by_writes(joints: Iterable[JointGraph], seconds: float, without: float) -> str | None:
    """The note on a step that takes longer traced than eager because it writes to views; None for others.

    A parallel scan writes to each second, fourth, eighth part of one tensor. Extra times are relative to the
    traced step, so they do not show this.

    Args:
        joints: The graphs of the step.
        seconds: Seconds of the traced step without recomputation.
        without: Seconds of the step without a plan.
    """
    count = sum(op.node.target in _COPIES for joint in joints for op in joint.ops)
    if not count or seconds < _WORTH_TELLING * without:
        return None
    return (
        f"{count} {WRITES}: by a plan the step takes {seconds / without - 1:.0%} longer than without one, "
        "before anything is computed again, and extra times count from there. Plan with backend='replay', or "
        "leave backend= out: the plan then follows the step as it is written"
    )
