"""Operators of the backward that write their result over a saved tensor, instead of allocating it.

A node of autograd calls an operator on the gradient and a tensor that it saved, and the operator allocates
its result. If nothing reads the saved tensor afterwards, its memory can hold the result: the bits are the
same, and less is allocated. The node gets the saved tensor as a :class:`WrittenOver`, whose
``__torch_dispatch__`` calls the operator's ``out=`` overload.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from planner._torch import fake, operators, pytree

aten = torch.ops.aten

_OUT_OVERLOADS = {
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
"""By operator: its ``out=`` overload, and the name of the argument that this one writes.

The arguments begin with a gradient and a saved tensor. Writing over the latter is safe, as the CPU's kernels
compute each element from the same element of both. Those of softmax also need a sum over the row, and have it
before they write the row (``aten/src/ATen/native/cpu/SoftMaxKernel.cpp``)."""
_VMAP = torch._C._dispatch_key_parse("VmapMode")


def is_held_alone(tensor: torch.Tensor, beside: int = 0) -> bool:
    """Whether nothing holds a tensor's memory but itself, its base if it is a view, and `beside` others."""
    return _holders(tensor) - tensor._is_view() - beside <= _holders_of_one()


def _holders(tensor: torch.Tensor) -> int:
    """References to a tensor's storage, those that this count itself takes included."""
    storage = tensor.untyped_storage()
    # C++ counts the tensors, Python the variables that hold the storage and no tensor.
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)


@functools.cache
def _holders_of_one() -> int:
    """The count for a tensor that shares its memory with nothing: versions of PyTorch may differ."""
    with fake.without_modes():
        return _holders(torch.empty(1))


def operators_run_once() -> bool:
    """Whether an operator that a node calls runs once. A dispatch mode may run it several times, and ``vmap``
    runs it for each gradient of a batch (``is_grads_batched=True``): the second run would read the result of
    the first."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._dispatch_tls_is_dispatch_key_included(_VMAP)
    )


def can_write_over(operator: Any, args: Sequence[Any]) -> bool:
    """Whether an operator can write its result over its second argument: an argument that has the result's
    shape, strides and type, and fills its storage."""
    if operator not in _OUT_OVERLOADS or not (
        isinstance(args[0], torch.Tensor) and isinstance(args[1], torch.Tensor)
    ):
        return False
    gradient, saved = args[:2]
    dtype = saved.dtype
    return (
        saved.is_cpu
        and dtype.is_floating_point
        and gradient.dtype is dtype
        and all(one is dtype for one in args[3:])  # ``input_dtype`` of a softmax
        and saved.shape == gradient.shape
        and saved.layout is gradient.layout is torch.strided
        and saved.is_contiguous()
        and gradient.is_contiguous()
        and 0 < saved.numel() * dtype.itemsize == saved.untyped_storage().nbytes()
    )


class WrittenOver(torch.Tensor):
    """A saved tensor as a node gets it. The operator that reads it writes its result over it.

    Attributes:
        saved: The tensor itself.
        may_write: Called right before the operator runs: whether nothing else holds the memory by then. If
            not, the result is allocated as usual.
    """

    saved: torch.Tensor
    may_write: Callable[[], bool]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, saved: torch.Tensor, may_write: Callable[[], bool]) -> "WrittenOver":
        """Wrap a saved tensor for a node."""
        made = saved.as_subclass(cls)
        made.saved, made.may_write = saved, may_write
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten.detach.default:  # ``SavedVariable::unpack`` does, before the node gets the tensor
            return cls.of(args[0].saved, args[0].may_write)
        over = _OUT_OVERLOADS.get(func)
        if over is not None and type(args[1]) is cls:
            saved: Any = args[1].saved
            if can_write_over(func, (args[0], saved, *args[2:])) and args[1].may_write():
                # With the strides of a new result: the saved tensor may have others at dimensions of size 1,
                # and PyTorch refuses to write to memory that is read by other strides.
                result = saved.new_empty(0).set_(saved.untyped_storage(), 0, saved.shape)
                writing, written = over
                return writing(args[0], result, *args[2:], **(kwargs or {}), **{written: result})
        plain, named = pytree.tree_map(lambda a: a.saved if type(a) is cls else a, (args, kwargs or {}))
        return func(*plain, **named)
