"""Calls of a module that await their backward. No prediction counts the memory of two such calls at once."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from planner._torch import autograd
from planner._torch.tensors import SPARSE
from planner.compiled.calls import Call, Calls, Token
from planner.compiled.graph_hook import GraphHook
from planner.errors import FreedError, PlanMismatch
from planner.graph.dying_operands import RUNS_ONCE
from planner.graph.trace import TracedGraph

_FREED = (
    "backward runs a second time through a part of a planned module, whose memory the first one has freed. "
    "All outputs of such a part are one step of autograd: add up losses of several outputs and call backward "
    "once, (a + b).backward(), or all but the last with retain_graph=True"
)
_USED_UP = (
    "a second backward (retain_graph=True) of a loss whose gradients the plan computed in the forward "
    "(split='loss'), which the first backward has used up. Add up the losses and call backward once, or plan "
    "with split='none'"
)


class Awaiting(GraphHook):
    """Notes in a module's calls when the backward of one of its graphs runs, and refuses a second one that
    lacks what it reads. Hooks that may refuse a backward come before it: then nothing is freed, and the
    backward can be repeated.

    Args:
        calls: The calls of the module.
    """

    watches = True

    def __init__(self, calls: Calls) -> None:
        self._calls, self._runs_once = calls, False

    def on_traced(self, traced: TracedGraph) -> None:
        self._runs_once = any(RUNS_ONCE in node.meta for node in traced.joint.graph.nodes)

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        call, token = self._calls.last, Token()
        call.tokens.append(weakref.ref(token))
        freed: list[bool] = []  # by a backward: True for all that it reads, False for its gradients alone
        # The node holds the hook, the hook holds the token: the token dies with what the forward saved.
        node.register_prehook(lambda gradients, _token=token: self._before(call, freed, gradients))

    def _before(self, call: Call, freed: list[bool], gradients: Sequence[torch.Tensor | None]) -> None:
        if freed and freed[0]:
            raise FreedError(_FREED)
        if freed:
            raise FreedError(_USED_UP)
        if any(g is not None and autograd.is_batched(g) for g in gradients):
            raise PlanMismatch(
                "the backward of a planned module runs for one gradient of an output, and is asked for "
                "several at once (is_grads_batched=True, vectorize=True). Ask for one after another, or use "
                "planner.remove(model) for such steps"
            )
        if any(g is not None and g.layout in SPARSE for g in gradients):
            raise PlanMismatch(
                "a sparse gradient arrives at an output of a planned graph, as of an embedding outside it, "
                "whose backward was traced for dense ones: plan with backend='replay', or without sparse=True"
            )
        if not autograd.graph_is_kept():
            call.done = True
            freed.append(True)
            return
        if self._runs_once:
            freed.append(False)
        if not torch.is_grad_enabled():  # double_backward.py warns of create_graph=True
            self._calls.kept()
