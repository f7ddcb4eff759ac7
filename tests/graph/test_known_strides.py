"""Strides that are said to be known are those of the kernels' results, also of dimensions of one element."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from planner._torch.layouts.shape_functions import layouts_of_kernels
from planner.graph.known_strides import with_known_strides

aten = torch.ops.aten

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _tokens(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = (x * 2).flatten(1).unsqueeze(0).transpose(1, 2).reshape(1, -1, *x.shape[1:])
    return (x.neg() + x) * x.relu()


def _moved(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    last = x.dim() - 1
    return (x.transpose(0, last) * y.transpose(0, last)).exp().transpose(0, last) - y.unsqueeze(0).sum(1)


def _gradients(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = aten.silu_backward(x, y) + aten.gelu_backward(y, x) + aten.tanh_backward(x, y)
    return aten.threshold_backward(z, y, 0) * aten.sigmoid_backward(y, z)


def _chosen(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, y, x * 2.5).masked_fill(y > 0.5, 0.3) / x.masked_fill(x < 0, 1.0)


def _broadcast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y[:1]) * (y - x.mean(-1, keepdim=True)) + x.amax(0)


def _normalised(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:]) + torch.cat([x.softmax(-1), y], 0)[: len(x)].clone()


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((x @ torch.ones(x.shape[-1], 1)).tanh() * 3).view(-1, 1, 1).squeeze(0)


class _Strides(Interpreter):
    """Runs a graph, and notes the strides of all results."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.found: dict[Node, tuple[int, ...]] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(result, torch.Tensor):
            self.found[n] = result.stride()
        return result


def _laid_out(sizes: Sequence[int], order: Sequence[int], odd: random.Random | None) -> torch.Tensor:
    """A tensor whose dimensions lie in memory in some order; with odd strides of those of one element."""
    strides = [math.prod(sizes[d] for d in order[order.index(i) + 1 :]) for i in range(len(sizes))]
    if odd is not None:
        strides = [odd.choice([1, 7, s]) if n == 1 else s for n, s in zip(sizes, strides, strict=True)]
    return torch.empty_strided(sizes, strides).uniform_(-1, 1)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("function", "dispatcher"),
    [
        *((function, False) for function in (_tokens, _chosen, _product)),
        *((function, True) for function in (_moved, _gradients, _broadcast, _normalised)),
    ],
)
def test_known_strides_are_those_of_the_kernels(function: Function, dispatcher: bool) -> None:
    draw, known = random.Random(0), 0
    for sizes in ((1, 4, 2, 3), (2, 1, 3), (3, 1, 1, 2), (1, 1, 4), (2, 3, 1, 1), (1, 2, 3, 1, 2)):
        orders = list(itertools.permutations(range(len(sizes))))
        for _ in range(12):
            inputs = [
                _laid_out(sizes, draw.choice(orders), draw if draw.random() < 0.3 else None) for _ in range(2)
            ]
            with enable_python_dispatcher() if dispatcher else torch.no_grad(), layouts_of_kernels():
                module = make_fx(function, tracing_mode="fake")(*inputs)
                nodes = with_known_strides(module)
            run = _Strides(module)
            run.run(*inputs)
            for node in nodes & run.found.keys():
                assert node.meta["val"].stride() == run.found[node], (node, [t.stride() for t in inputs])
            known += len(nodes & run.found.keys())
    assert known > 0
