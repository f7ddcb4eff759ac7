"""Results of the backward that are written over what their node has asked autograd for.

The formulas of autograd allocate their results. Where nobody reads a saved tensor behind the node that asks
for it, the memory of that tensor serves as well: the bits are the same, and less is allocated. A node that is
handed a :class:`WrittenOver` calls its operator as ever, and the class calls the one that writes there.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from planner._torch import fake, operators, pytree

aten = torch.ops.aten

_OVER = {
    operator: (writing, operators.last_argument(writing))
    for operator, writing in (
        (aten._log_softmax_backward_data.default, aten._log_softmax_backward_data.out),
        (aten._softmax_backward_data.default, aten._softmax_backward_data.out),
        (aten.gelu_backward.default, aten.gelu_backward.grad_input),
        (aten.silu_backward.default, aten.silu_backward.grad_input),
        (aten.tanh_backward.default, aten.tanh_backward.grad_input),
        (aten.sigmoid_backward.default, aten.sigmoid_backward.grad_input),
        (aten.threshold_backward.default, aten.threshold_backward.grad_input),
        (aten.mul.Tensor, aten.mul.out),
    )
}
"""Operators on a gradient and what was saved that may write over the latter; and the operators by which they
do, with the argument that is written. They compute each element of the same element of both; of a softmax the
CPU's kernels add up a row before."""
_VMAP = torch._C._dispatch_key_parse("VmapMode")


def is_held_alone(tensor: torch.Tensor, beside: int = 0) -> bool:
    """Whether a tensor, or the one that it is a view of, and so many others are all that holds its memory."""
    return _holders(tensor) - tensor._is_view() - beside <= _holders_of_one()


def _holders(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)  # some hold that alone


@functools.cache
def _holders_of_one() -> int:
    """What is counted of a tensor that nothing else shares memory with: versions of PyTorch may differ."""
    with fake.without_modes():
        return _holders(torch.empty(1))


def operators_run_once() -> bool:
    """Whether each operator that is called runs once: under dispatch modes it runs as often as they like, for
    a batch of gradients once for each."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._dispatch_tls_is_dispatch_key_included(_VMAP)
    )


def can_write_over(operator: Any, args: Sequence[Any]) -> bool:
    """Whether an operator can write its result over its second argument: that is of the result's form, and
    fills its memory."""
    if operator not in _OVER or not (isinstance(args[0], torch.Tensor) and isinstance(args[1], torch.Tensor)):
        return False
    gradient, saved = args[:2]
    dtype = saved.dtype
    return (
        saved.is_cpu
        and dtype.is_floating_point
        and gradient.dtype is dtype
        and all(one is dtype for one in args[3:])
        and saved.shape == gradient.shape
        and saved.layout is gradient.layout is torch.strided
        and saved.is_contiguous()
        and gradient.is_contiguous()
        and 0 < saved.numel() * dtype.itemsize == saved.untyped_storage().nbytes()
    )


class WrittenOver(torch.Tensor):
    """A saved tensor as a node gets it, over which the operator that reads it writes its result.

    Attributes:
        saved: The tensor itself.
        may_write: Asked right before that: whether nobody else holds it by then.
    """

    saved: torch.Tensor
    may_write: Callable[[], bool]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, saved: torch.Tensor, may_write: Callable[[], bool]) -> "WrittenOver":
        """What a node gets."""
        made = saved.as_subclass(cls)
        made.saved, made.may_write = saved, may_write
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten.detach.default:  # autograd makes it a result of the node's
            return cls.of(args[0].saved, args[0].may_write)
        over = _OVER.get(func)
        if over is not None and type(args[1]) is cls:
            saved: Any = args[1].saved
            plain = (args[0], saved, *args[2:])
            if can_write_over(func, plain) and args[1].may_write():
                result = saved.new_empty(0).set_(saved.untyped_storage(), 0, saved.shape)  # of new strides
                writing, written = over
                return writing(*plain, **(kwargs or {}), **{written: result})
        plain, named = pytree.tree_map(lambda a: a.saved if type(a) is cls else a, (args, kwargs or {}))
        return func(*plain, **named)
