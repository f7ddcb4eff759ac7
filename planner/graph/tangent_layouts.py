"""Gradients that arrive at the outputs of a graph, and their strides.

A backward that is traced for gradients of other strides than eager's sums over them in another order.
"""

import functools
from collections import Counter, defaultdict

import torch

from planner._torch.joint import aot_metadata
from planner._torch.joint.memory_layout import MemoryLayout
from planner._torch.versions import version_of
from planner.graph.joint_graph import JointGraph

_Arrived = tuple[tuple[int, ...], MemoryLayout | None]
"""The strides of a gradient, and its layout; None for the layout of the output."""


class TangentLayouts:
    """Watches the gradients of one graph's outputs.

    Attributes:
        awaited: Outputs that could get a gradient.
        received: Outputs that got one, see also :meth:`end`.
        layouts: By position, for outputs whose gradients have other strides than they do: the layout of the
            gradients in most executions. Known once the step is over.
    """

    def __init__(self) -> None:
        self.awaited: set[int] = set()
        self.received: set[int] = set()
        self.layouts: dict[int, MemoryLayout] = {}
        self._arrived = defaultdict[int, Counter[_Arrived]](Counter)  # how often each, by output
        self._aliases: list[tuple[int, torch.Tensor, int | None]] = []
        self._of_inputs: set[int] = set()
        self._parts: set[int] = set()
        self._cut: set[int] = set()

    def watch(
        self,
        output: int,
        tensor: torch.Tensor,
        *,
        of_input: bool,
        alone: bool,
        part: bool,
        cut: bool,
    ) -> None:
        """Watch an output.

        Args:
            output: Its position.
            tensor: The output, as a tensor that nothing inside the graph uses.
            of_input: Whether it is a view of an input. Such views are taken outside of the graph, as without
                a plan, unless one operation makes several of them.
            alone: Whether it shares no memory with an input or another output.
            part: Whether it is a part of a contiguous result: a contiguous gradient of it is copied among
                zeros.
            cut: Whether its gradient is copied among zeros whatever its strides.
        """
        self.awaited.add(output)
        if not alone:
            alias = tensor.detach()
            self._aliases.append((output, alias, version_of(alias)))
        if of_input:
            self._of_inputs.add(output)
        if part:
            self._parts.add(output)
        if cut:
            self._cut.add(output)
        tensor.register_hook(functools.partial(self._receive, output, memory_steps(tensor)))

    def _receive(self, output: int, steps: tuple[int, ...], gradient: torch.Tensor | None) -> None:
        if gradient is None:  # a user's autograd function returned None
            return
        self.received.add(output)
        arrived = memory_steps(gradient)
        if 0 not in arrived:
            layout = None if arrived == steps else MemoryLayout.of(gradient)
            self._arrived[output][arrived, layout] += 1

    def end(self) -> None:
        """Finish watching: the step is over.

        Where a tensor with several views was changed in place, the views' gradients bypass the hooks, so
        those outputs count as having received one.
        """
        self.received.update(output for output, alias, before in self._aliases if version_of(alias) != before)
        self._aliases.clear()
        # Of two equally frequent layouts the output's own wins: copies of others take no memory for gaps.
        most = {
            output: max(counted, key=lambda arrived: (counted[arrived], arrived[1] is None))[1]
            for output, counted in self._arrived.items()
        }
        self.layouts = {output: layout for output, layout in most.items() if layout is not None}

    def relaid(self, joint: JointGraph) -> int:
        """How many arrived gradients a traced backward may copy.

        It was traced for a gradient of other strides, or for the gradient of a result that several outputs
        are views of.
        """
        traced = aot_metadata.gradients_of_outputs(joint.graph)
        return sum(
            count
            for i, counted in self._arrived.items()
            if (i in traced or i not in self._of_inputs) and any(layout for _, layout in counted)
            for (steps, layout), count in counted.items()
            if (steps != memory_steps(traced[i]) if i in traced else self._is_relaid(i, layout))
        )

    def _is_relaid(self, output: int, layout: MemoryLayout | None) -> bool:
        """Whether the gradient of a view may have other strides than that of the viewed result.

        Not so for a part with a contiguous gradient, which is copied among contiguous zeros, nor for a piece
        that was cut out, whose gradient is always copied so.
        """
        if layout is None or output in self._cut:
            return False
        return not (output in self._parts and layout.is_contiguous)


def has_steps(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and all(
        isinstance(n, int) for n in (*tensor.shape, *tensor.stride())
    )


def memory_steps(tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Strides of the dimensions that have more than one element: a tensor's own, or those given."""
    if tensor.layout is not torch.strided:
        return ()
    strides = tensor.stride() if strides is None else strides
    return tuple(step for step, size in zip(strides, tensor.shape, strict=True) if size > 1)
