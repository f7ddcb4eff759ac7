"""Writes in place to parts of tensors, which tracing makes copies of the whole."""

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
"""What marks the note."""


def slower_by_writes(joints: Iterable[JointGraph], seconds: float, without: float) -> str | None:
    """What is said of a step that takes longer as it is traced, since it writes to views; None of others.

    A parallel scan writes to each second, fourth, eighth part of one tensor. Extra times are relative to the
    step as it is traced, and do not show it.

    Args:
        joints: The graphs of the step.
        seconds: What the step takes that computes nothing again.
        without: What it takes without a plan.
    """
    count = sum(op.node.target in _COPIES for joint in joints for op in joint.ops)
    if not count or seconds < _WORTH_TELLING * without:
        return None
    return (
        f"{count} {WRITES}: by a plan the step takes {seconds / without - 1:.0%} longer than without one, "
        "before anything is computed again, and extra times count from there. Plan with backend='replay', or "
        "leave backend= out: the plan then follows the step as it is written"
    )
