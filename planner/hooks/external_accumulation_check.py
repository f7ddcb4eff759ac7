"""A warning where a planned graph's gradient is added to one that the plan has not seen, as of a regulariser.

The autograd engine adds the gradients of a tensor's uses one by one, the last use first. A graph returns the
sum of the uses inside it. That gives the same bits if no other gradient arrived before; otherwise the total
is rounded in another order. Where the plan knows of the other gradient, the graph returns per-use gradients
(:mod:`planner.graph.passes.per_use_gradients`). This check finds gradients unknown to the plan.

An input whose gradient is such a sum costs one hook a step, where its gradient is accumulated. The engine
adds in place to the gradient that arrived first, so the address of the total tells which one that was.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from planner._torch import autograd
from planner._torch.joint import aot, aot_metadata
from planner._torch.tensors import has_hooks
from planner.compiled.graph_hook import GraphHook, HookContext
from planner.graph.accumulation import is_sum
from planner.graph.trace import TracedGraph


class _Run:
    """One run of a graph, which may run several times in a step. The run's autograd node holds it.

    Attributes:
        sums: Addresses of the sums that its backward returned, by the position of the input.
        ends: Functions that remove hooks on tensors and on the nodes where leaves accumulate. Both may
            outlive the step, so the run calls the functions when it dies.
    """

    def __init__(self) -> None:
        self.sums: dict[int, int] = {}
        self.ends: list[Callable[[], None]] = []

    def __del__(self) -> None:
        for end in self.ends:
            end()


class ExternalAccumulationCheck(GraphHook):
    """Watches those inputs of one planned graph whose gradients are sums.

    Args:
        warn: Called, once, if another gradient arrived before such a sum.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned = False
        self._places: dict[int, int] = {}  # position of an input -> place of its sum among the gradients
        self._sums: dict[int, int] = {}  # those of the run whose backward is running
        self._asked = WeakIdKeyDictionary()  # tensor -> functions that look at its gradient in this backward

    def on_traced(self, traced: TracedGraph) -> None:
        flat: Sequence[Any] = traced.joint.graph.output_node().args[0]  # type: ignore[assignment]
        self._places = {
            position: place - traced.forward_outputs
            for position, place in aot_metadata.gradient_places(traced.joint).items()
            if 0 <= position < traced.inputs and position not in traced.per_use_inputs and is_sum(flat[place])
        }
        self.watches = bool(self._places)

    def backward(self, compiled: aot.BoxedFunction) -> aot.BoxedFunction:
        if not self._places:
            return compiled

        def run(args: list[Any]) -> Sequence[Any]:
            """The backward; notes the addresses of the sums that it returns."""
            results = compiled(args)
            for position, place in self._places.items():
                if results[place] is not None:
                    self._sums[position] = results[place].data_ptr()
            return results

        return run

    def on_forward(self, node: Any, args: tuple[Any, ...]) -> None:
        if not self._warned and torch.is_grad_enabled():
            run = _Run()
            watched = [
                self._watch(run, position, args[position])
                for position in self._places
                if args[position].requires_grad and not has_hooks(args[position])  # which may replace the sum
            ]

            def before(_gradients: tuple[torch.Tensor | None, ...]) -> None:
                self._sums = run.sums
                for asked_for in watched:
                    asked_for()

            node.register_prehook(before)

    def _watch(self, run: _Run, position: int, tensor: torch.Tensor) -> Callable[[], None]:
        """Watch the gradient that arrives at an input whose gradient from this run is a sum.

        Returns:
            A function to call in a backward, before the backward of the graph. ``torch.autograd.grad`` takes
            a gradient before it is accumulated; only hooks on the tensor see it then.
        """
        edge, alive, sums = get_gradient_edge(tensor), TensorWeakRef(tensor), run.sums
        output = edge.output_nr
        # A hook on a node holds neither the node nor the run: nothing would free such a circle.

        def see(gradient: torch.Tensor | None) -> None:
            if self._warned or gradient is None or torch.is_grad_enabled() or position not in sums:
                return
            if gradient.layout is not torch.strided or gradient.data_ptr() != sums.pop(position):
                self._tell(gradient)

        def look(gradients: tuple[torch.Tensor | None, ...]) -> None:
            see(gradients[output])

        def asked_for() -> None:
            living = alive()
            if living is None or (living.is_leaf and autograd.runs_leaf(edge.node)):
                return
            if living in self._asked:
                self._asked[living].append(see)
            elif not has_hooks(living):
                self._ask(run, living, [see])

        handle = edge.node.register_prehook(look)
        if tensor.is_leaf:  # its node may outlive the step
            run.ends.append(handle.remove)
        return asked_for

    def _ask(self, run: _Run, tensor: torch.Tensor, seeing: list[Callable[[torch.Tensor], None]]) -> None:
        """Have functions called with a tensor's gradient, in the backward that is running."""

        def arrived(gradient: torch.Tensor) -> None:
            for see in seeing:
                see(gradient)

        def ended() -> None:
            handle.remove()
            if (living := alive()) is not None and self._asked.get(living) is seeing:
                self._asked.pop(living)

        alive = TensorWeakRef(tensor)  # ``ended`` must not hold the tensor until the backward ends
        self._asked[tensor] = seeing
        handle = tensor.register_hook(arrived)
        autograd.after_this_backward(ended)
        run.ends.append(ended)  # after an error the engine calls nothing

    def _tell(self, gradient: torch.Tensor) -> None:
        self._warned = True
        self._warn(
            f"a weight or input of shape {tuple(gradient.shape)} that the planned module uses several times "
            "has gradients from outside too, which the plan has not seen (a regulariser, a second call): "
            "they are added up in another order and may differ in the last bits from those without a plan. "
            "Plan again with loss= a callable that computes the loss you train with"
        )


def hook(context: HookContext) -> ExternalAccumulationCheck:
    """A hook for every graph; it warns the user."""
    return ExternalAccumulationCheck(context.warn)
