"""Corrections of joint graphs to what eager computes, one a file; :data:`JOINT_PASSES` is their order."""

from planner.graph.joint_pass import JointPass
from planner.graph.passes.absent_gradients import expect_no_gradient_of_leaves
from planner.graph.passes.autocast_cast_cache import share_casts
from planner.graph.passes.collectives import wait_in_place
from planner.graph.passes.cpu_dropout import divide_masks
from planner.graph.passes.forms import keep_forms_only
from planner.graph.passes.in_place_accumulation import mark_sums_in_place, mark_views_that_leave
from planner.graph.passes.max_pooling import keep_nothing_pooled
from planner.graph.passes.means_and_squares import simplify_means_and_squares
from planner.graph.passes.per_use_gradients import hand_out_unsummed
from planner.graph.passes.running_statistics import read_no_running_statistics
from planner.graph.passes.types_of_new_tensors import name_types_of_new_tensors

JOINT_PASSES: tuple[JointPass, ...] = (
    name_types_of_new_tensors,
    expect_no_gradient_of_leaves,
    wait_in_place,
    share_casts,
    hand_out_unsummed,
    divide_masks,
    keep_nothing_pooled,
    read_no_running_statistics,
    keep_forms_only,
    simplify_means_and_squares,
    mark_sums_in_place,
    mark_views_that_leave,
)
"""All of them, in order. Sharing casts merges sums, so ``share_casts`` comes before ``hand_out_unsummed``."""
