"""The gradients of products (``prod``, ``cumprod``) where no factor is zero.

PyTorch looks for zeros among the data, and where there are none it divides the product by each factor. For
tensors without data, and under dispatch modes, it takes a form that is right for zeros too and needs more
memory. C++ code calls the operators of that form, so they run here, unrecorded; the operators of the division
are recorded in their place. :class:`ZerosAmongFactors` looks at a step with data.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner._torch.autograd import running_node
from planner._torch.fake import is_fake

aten = torch.ops.aten

_BEGINS = {
    "ProdBackward0": (aten.clone.default, aten.ones.default),
    "ProdBackward1": (aten.ones.default,),
    "CumprodBackward0": (aten.zeros.default, aten.new_zeros.default),  # the second from 2.15 on
}
"""The operators that the form for zeros may begin with, by the autograd node that runs it."""
PRODUCTS = frozenset(_BEGINS)
_MULTIPLY = frozenset({aten.prod, aten.cumprod, aten.cumprod_})

_Node = tuple[str, int]


class GradientsOfProducts:
    """Records the backwards of products as they run for data without zeros.

    A dispatch mode passes each operator that such a backward calls to :meth:`instead`.

    Attributes:
        assumed: Whether factors without data were taken to be no zeros.
    """

    def __init__(self, record: Callable[..., torch.Tensor], pause: Callable[[], Any]) -> None:
        """
        Args:
            record: Runs an operator with its arguments, and records it.
            pause: A context in which nothing is recorded.
        """
        self._record, self._pause, self.assumed = record, pause, False
        self._running: _Node | None = None
        self._weighted: torch.Tensor | None = None
        self._zeros: torch.Tensor | None = None
        self._chosen, self._recording = 0, False

    def instead(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], node: _Node
    ) -> tuple[torch.Tensor] | None:
        """The result of an operator called by a node of :data:`PRODUCTS`; None: the caller records it."""
        if self._recording:
            return None
        if self._running != node:
            begins = func in _BEGINS[node[0]] and not torch.is_grad_enabled()
            if not begins or not self._has_no_zeros():
                return None
            self._running, self._weighted, self._zeros, self._chosen = node, None, None, 0
        if func is aten.cumsum.default and self._zeros is None:
            self._zeros = args[0]
        if func is aten.masked_fill.Scalar and self._weighted is None:
            self._weighted = args[0]
        self._chosen += func is aten.where.self
        with self._pause():
            result = func(*args, **kwargs)
        partial = node[0] == "CumprodBackward0"
        if self._chosen < 2 if partial else func is not aten.mul.Tensor or args[0].numel() == result.numel():
            return (result,)
        self._recording = True
        try:
            gradient = self._of_partial_products() if partial else self._of_a_product(args[0])
        finally:
            self._running = self._weighted = self._zeros = None
            self._recording = False
        return (gradient.as_strided(result.shape, (1,)) if node[0] == "ProdBackward0" else gradient,)

    def _has_no_zeros(self) -> bool:
        """Whether no factor of the running node is zero; of factors without data this is assumed."""
        with self._pause():
            factors = running_node()._saved_self.detach()
            if factors.is_complex():
                return False
            self.assumed = self.assumed or is_fake(factors)
            return is_fake(factors) or bool((factors != 0).all())

    def _of_a_product(self, gradient: torch.Tensor) -> torch.Tensor:
        node = running_node()
        with self._pause():
            factors, product = node._saved_self.detach(), node._saved_result.detach()
            if (dim := getattr(node, "_saved_dim", None)) is not None and not node._saved_keepdim:
                product = product.unsqueeze(_signed(dim))
        zeros = self._record(aten.eq.Scalar, factors, 0)
        if dim is not None:
            counted = self._record(aten.sum.dim_IntList, zeros, [_signed(dim)], True)
            self._record(aten.sum.default, counted)
        else:
            del zeros
        return self._record(aten.mul.Tensor, gradient, self._record(aten.div.Tensor, product, factors))

    def _of_partial_products(self) -> torch.Tensor:
        node = running_node()
        with self._pause():
            factors, dim = node._saved_self.detach(), [_signed(node._saved_dim)]
        self._record(aten.any.default, self._zeros)
        weighted = self._record(aten.flip.default, self._weighted, dim)
        summed = self._record(aten.cumsum.default, weighted, dim[0])
        turned = self._record(aten.flip.default, summed, dim)
        del weighted, summed
        return self._record(aten.div.Tensor, turned, factors)


class ZerosAmongFactors(TorchDispatchMode):
    """A context that looks whether a step multiplies numbers of which one is zero, in ``found``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "overloadpacket", None) in _MULTIPLY and not self.found:
            self.found = bool((args[0] == 0).any())
        return func(*args, **(kwargs or {}))


def _signed(dim: int) -> int:
    """A dimension as it was given; nodes show a negative one as a large number."""
    return dim - 2**64 if dim >= 2**63 else dim
