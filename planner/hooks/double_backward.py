"""Gradients of gradients: ``create_graph=True`` through a planned module.

A planned backward frees as it goes and cannot be differentiated. With ``create_graph=True`` the captured
forward runs again without the plan, and its gradients are returned: eager's, with their autograd graph. That
takes more memory than the unplanned step. It also makes two autograd graphs, whose gradients are added up in
another order than inside eager's one. So a warning says it, and from the next call on calls of this kind run
without the plan. Where the forward cannot run again for certain, differentiating a gradient is an error.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from planner._torch import autograd
from planner._torch.execution.checkpoints import as_written
from planner._torch.execution.function_calls import calls_functions
from planner._torch.joint import aot_metadata
from planner._torch.operators import may_draw
from planner._torch.tensors import SPARSE, storage_number, writes
from planner.compiled.calls import Call, Calls
from planner.compiled.graph_hook import GraphHook, HookContext
from planner.errors import PlanMismatch
from planner.graph.trace import TracedGraph


class DoubleBackward(GraphHook):
    """Makes the gradients of one planned graph differentiable where ``create_graph=True`` asks for it.

    Args:
        graph: The captured forward.
        obstacle: Why the forward cannot run again; None if it can.
        after_others: Whether parts of the forward without a backward come before the graph. Their results are
            not held for a second run, as they would live for longer than planned.
        calls: The calls of the module. Calls like one that was differentiated twice run without the plan from
            then on, since it saves no memory there.
        warn: Called, once, when the forward runs again without the plan.
    """

    watches = True

    def __init__(
        self,
        graph: GraphModule,
        obstacle: str | None,
        after_others: bool,
        calls: Calls,
        warn: Callable[[str], None],
    ) -> None:
        self._graph, self._obstacle, self._calls, self._warn = graph, obstacle, calls, warn
        self._held = _referred_to if after_others else _as_they_are
        self._warned = False
        self._outputs: dict[int, int] = {}  # of the autograd node -> position among the results of the graph
        self._places: dict[int, int] = {}  # position of an input -> place among the gradients of tensors
        self._gradients: list[int] = []  # positions of the inputs that get a gradient

    def on_traced(self, traced: TracedGraph) -> None:
        joint = traced.reading
        inputs = [aot_metadata.input_position(primal) for primal in joint.primals]
        self._outputs = aot_metadata.output_positions(traced.joint, traced.forward_outputs)
        self._places = aot_metadata.places_among_tensors(traced.joint)
        results: Sequence[Any] = traced.joint.graph.output_node().args[0]  # type: ignore[assignment]
        places = aot_metadata.gradient_places(traced.joint).items()
        self._gradients = [p for p, at in places if 0 <= p < traced.inputs and results[at] is not None]
        if any(may_draw(op.node.target) for op in joint.ops):
            self._obstacle = "it draws random numbers, or an operation from outside PyTorch may"
        elif joint.mutated:
            self._obstacle = "it changes buffers or inputs"
        elif inputs != list(range(len(inputs))) or len(self._outputs) < len(joint.tangents):
            self._obstacle = "its inputs or outputs share memory"

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        kept = [_without_memory(args, self._gradients) if self._obstacle else self._held(args)]
        versions, call = _versions(kept), self._calls.last
        node.register_prehook(lambda given: self._before(kept, versions, call, given))

    def _before(
        self,
        kept: list[tuple[Any, ...]],
        versions: list[tuple[int, int]],
        call: Call,
        of_outputs: tuple[torch.Tensor | None, ...],
    ) -> tuple[torch.Tensor | None, ...] | None:
        # A hook after a node keeps the node's gradients alive while the node runs, and no plan counts that:
        # it is registered only where gradients are to be differentiable.
        if torch.is_grad_enabled():
            node = autograd.running_node()
            handles: list[Any] = []

            def after(of_inputs: Any, _of_outputs: Any) -> Any:
                handles.pop().remove()
                return self._after(node, kept, versions, call, of_inputs, of_outputs)

            handles.append(node.register_hook(after))
            # AOTAutograd cannot change the strides of a tensor that requires a gradient.
            return tuple(g if g is None else g.detach() for g in of_outputs)
        if not autograd.graph_is_kept():
            kept.clear()  # else whoever holds the loss would hold the inputs
        return None

    def _after(
        self,
        node: Any,
        kept: list[tuple[Any, ...]],
        versions: list[tuple[int, int]],
        call: Call,
        of_inputs: tuple[torch.Tensor | None, ...],
        of_outputs: tuple[torch.Tensor | None, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        if self._obstacle or versions != _versions(kept):
            obstacle = self._obstacle or "its inputs or parameters have been changed since, or freed"
            made_of = [
                t
                for t in (
                    *autograd.leaves_behind(node),
                    *(a for args in kept for a in map(_there, args)),
                    *of_outputs,
                )
                if isinstance(t, torch.Tensor) and t.requires_grad
            ]
            return tuple(g if g is None else _Once.apply(g.detach(), obstacle, *made_of) for g in of_inputs)  # type: ignore[no-untyped-call]
        self._calls.leave(call)
        if not self._warned:
            self._warned = True
            self._warn(
                "gradients are to be differentiable (create_graph=True): the forward runs again without the "
                "plan, and the step may exceed the budget. Where weights or inputs get gradients from "
                "anything else in that backward, as from the output or from another such gradient, these are "
                "added up in another order, and may differ in the last bits. From now on such calls run as "
                "they are, without the plan. Put planner.step around the function that computes the loss, or "
                "plan with backend='replay': both are exact"
            )
        args = tuple(map(_there, kept[0]))
        wanted = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad]
        outputs = as_written(self._graph)(*args)
        pairs = [
            (outputs[self._outputs[i]], g)
            for i, g in enumerate(of_outputs)
            if g is not None and i in self._outputs
        ]
        gradients = torch.autograd.grad(
            [output for output, _ in pairs],
            [args[i] for i in wanted],
            [gradient for _, gradient in pairs],
            create_graph=True,
            allow_unused=True,
        )
        replaced = {self._places[i]: g for i, g in zip(wanted, gradients, strict=True)}
        return tuple(replaced.get(i) if g is not None else None for i, g in enumerate(of_inputs))


def hook(context: HookContext) -> DoubleBackward:
    """A hook for every graph; its forward runs again unless there is an obstacle."""
    obstacle = "it was called under autocast" if context.autocast else None
    if context.plan.coverage != "one-graph":
        # Held for a second run, results that one part hands to another would live for longer than planned.
        obstacle = "it is captured in several parts"
    if calls_functions(context.graph):
        obstacle = "it calls a torch.autograd.Function, whose backward is captured as a constant"
    return DoubleBackward(
        context.graph, obstacle, bool(context.plan.forward_only), context.calls, context.warn
    )


def _as_they_are(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args


def _referred_to(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments, with weak references to tensors."""
    return tuple(weakref.ref(a) if isinstance(a, torch.Tensor) else a for a in args)


def _there(argument: Any) -> Any:
    """An argument; None in place of a tensor that was freed."""
    return argument() if isinstance(argument, weakref.ref) else argument


def _versions(kept: list[tuple[Any, ...]]) -> list[tuple[int, int]]:
    """How often each tensor among the arguments was written to, and its memory, without those that were
    freed."""
    there = [a for args in kept for a in map(_there, args) if isinstance(a, torch.Tensor)]
    return [(writes(a), 0 if a.layout in SPARSE else storage_number(a.untyped_storage())) for a in there]


def _without_memory(args: tuple[Any, ...], positions: Sequence[int]) -> tuple[Any, ...]:
    """Tensors without elements, each computed from one argument that was itself computed from others.

    They lead the engine to these arguments and hold no memory. Weights and views of them are left out: the
    node of the graph leads to these anyway. Arguments without a gradient are left out too: their autograd
    graph would live for longer than without a plan.

    Args:
        args: The arguments.
        positions: Positions of the arguments that get a gradient.
    """
    return tuple(
        a.unsqueeze(0).narrow(0, 0, 0).clone()
        for a in (args[position] for position in positions)
        if isinstance(a, torch.Tensor)
        and a.requires_grad
        and not a.is_leaf
        and not (a._base is not None and a._base.is_leaf)
    )


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated.

    It is a function of everything that the gradient was computed from. The engine skips a node that does not
    lead to the tensors that it was asked for; there would be no error then, but a gradient that lacks a part.
    """

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, obstacle: str, *made_of: torch.Tensor) -> torch.Tensor:
        ctx.obstacle = obstacle
        alias: torch.Tensor = torch.ops.aten.alias(gradient)
        return alias

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise PlanMismatch(
            "a gradient that a planned module computed is differentiated again, and the module's forward "
            f"cannot be run again for it: {ctx.obstacle}. Use planner.remove(model) for such steps"
        )
