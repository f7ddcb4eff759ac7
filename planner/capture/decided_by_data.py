"""What a trace or a recording does not know, as data or modes decide it: forms of backwards, and bytes."""

from collections.abc import Iterable

import torch
from torch.fx import Node

from planner._torch.tensors import SPARSE
from planner._torch.without_data.answers import Answers
from planner.graph.joint_graph import JointGraph
from planner.graph.passes.absent_gradients import read_by_functions
from planner.training_step.recorder import Recording
from planner.training_step.step import tensors_in

aten = torch.ops.aten

PRODUCTS = (
    "the gradient of torch.prod is rounded otherwise than without a plan where no factor is zero, and "
    "differs in the last bits: PyTorch looks for zeros among the data, and traces a form that is right for "
    "both. Where bits matter, write the product of a few factors as multiplications, or "
    "plan with backend='replay'. planner.verify() tells"
)

PRODUCTS_INSIDE = (
    "the forward takes gradients of torch.prod or torch.cumprod, which PyTorch rounds otherwise under the "
    "dispatch mode that replays need: they differ in the last bits from those without a plan. Where bits "
    "matter, write the product of a few factors as multiplications"
)

SPARSE_TENSORS = (
    "the step computes with sparse tensors: the workspace of their kernels is not predicted, nor the memory "
    "that they take with other data, so that a step may take more than planned. Call planner.verify(), "
    "which measures it"
)

OPAQUE = (
    "the step computes with tensors of the class {}, which runs operators in its own way and does not say "
    "which tensors it holds, so that a step may take more than predicted. Call planner.verify(), which "
    "measures it, or give the class __tensor_flatten__ and __tensor_unflatten__"
)

HOUSEHOLDER = (
    "the backward of torch.linalg.householder_product runs other operators than are recorded, as PyTorch "
    "chooses them by whether something records: the step may take more than predicted. Call "
    "planner.verify(), which measures it, or plan with backend='graph'"
)

FUNCTIONS = (
    "the backward of a torch.autograd.Function computes something of no gradient, or of several, and several "
    "outputs of the module get gradients. A graph does not say what that backward does where some of them "
    "get none: such a step ends in an error. Train by the outputs that the plan was made with, or plan with "
    "backend='replay'"
)

PSEUDOINVERSE = (
    "torch.linalg.pinv of complex numbers is rounded otherwise under the dispatch mode that replays need: "
    "results differ in the last bits from those without a plan. Where bits matter, plan with backend='graph'"
)

_SHOWN = 3


def told_by_data(answers: Answers | None) -> list[str]:
    """The note on a step whose path was found by one run with data on the CPU; empty for other steps."""
    lines = [] if answers is None else answers.lines
    if not lines:
        return []
    shown = ", ".join(lines[:_SHOWN]) + (f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")
    return [
        f"what the step reads from its tensors decides what runs (at {shown}). It was run once on the CPU, "
        "with these inputs, to read that; a step that reads other numbers may run other operations than "
        "planned"
    ]


def has_sparse(recording: Recording, *, compressed: bool = False) -> bool:
    """Whether operations of a step take or return sparse tensors.

    Args:
        compressed: Whether only those by rows or columns are meant.
    """
    calls = [(call.args, dict(call.kwargs)) for call in recording.calls]
    layouts = SPARSE.keys() - {torch.sparse_coo} if compressed else SPARSE.keys()
    return any(t.layout in layouts for t in tensors_in([calls, recording.outputs]))


def has_householder(recording: Recording) -> bool:
    """Whether a step computes products of Householder reflections."""
    return any(call.func is aten.linalg_householder_product.default for call in recording.calls)


def has_complex_pseudoinverse(recording: Recording) -> bool:
    """Whether a step inverts complex matrices that need not have an inverse."""
    return any(
        call.func is aten.linalg_pinv.atol_rtol_tensor and call.args[0].is_complex()
        for call in recording.calls
    )


def has_products(joints: Iterable[JointGraph]) -> bool:
    """Whether gradients pass through ``prod``, of all elements or along a dimension."""
    return any(_differentiates_a_product(joint) for joint in joints)


def has_unknown_functions(joints: Iterable[JointGraph]) -> bool:
    """Whether graphs do not say what users' backwards do where some outputs get no gradient."""
    return any(
        len(joint.tangents) > 1 and len(read) != 1
        for joint in joints
        for read in read_by_functions(joint.graph, joint.tangents, _gradients(joint)).values()
    )


def _gradients(joint: JointGraph) -> list[Node]:
    return [result for result in joint.outputs[1] if isinstance(result, Node)]


def _differentiates_a_product(joint: JointGraph) -> bool:
    nodes = [op.node for op in joint.ops]
    forward, backward = nodes[: joint.forward_length], nodes[joint.forward_length :]
    products = {n.meta.get("seq_nr") for n in forward if n.target in (aten.prod.default, aten.prod.dim_int)}
    return any(n.target is aten.cumprod.default and n.meta.get("seq_nr") in products for n in backward)
