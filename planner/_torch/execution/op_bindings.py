"""The fastest callable behind an operator, by private PyTorch APIs."""

from collections.abc import Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase)

# Taken from here and not as torch.reshape and torch.add, which users may have replaced by wrappers.
RESHAPE, ADD = torch._C._VariableFunctions.reshape, torch._C._VariableFunctions.add


def raw_callable(operator: Any) -> Any:
    """The C++ function behind an ``OpOverload``: the same call without a Python frame around it."""
    return operator._op if isinstance(operator, torch._ops.OpOverload) else operator


def python_binding(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any | None:
    """PyTorch's own binding that does with these arguments what ``operator`` does, or None.

    The functions that ``torch`` and its tensors offer parse their arguments in a third of the time
    that an ``OpOverload`` takes. A candidate of the operator's name is called once under a dispatch
    mode that stops at the first operator that arrives; it will do if that is this one with these arguments.

    Args:
        operator: An ATen operator overload.
        args: Positional arguments; tensors without data will do. Sizes are plain numbers.
        kwargs: Arguments by name.
    """
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten":
        return None
    if not any(isinstance(a, torch.Tensor) for a in args):
        return None  # a factory function answers to torch.set_default_device()
    name = operator._schema.name.removeprefix("aten::")
    for namespace in _NAMESPACES:
        candidate = getattr(namespace, name, None)
        if isinstance(candidate, BuiltinFunctionType | MethodDescriptorType) and _arrives(
            candidate, operator, args, kwargs
        ):
            return candidate
    return None


class _ArrivedError(Exception):
    pass


class _Intercept(TorchDispatchMode):
    arrived: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.arrived = func, args, kwargs or {}
        raise _ArrivedError


def _arrives(candidate: Any, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    intercept = _Intercept()  # type: ignore[no-untyped-call]
    try:
        with torch.no_grad(), torch._C._DisableAutocast(), intercept:
            candidate(*args, **kwargs)
    except (_ArrivedError, TypeError):
        pass
    except Exception:
        return False
    if intercept.arrived is None or intercept.arrived[0] is not operator:
        return False
    _, found_args, found_kwargs = intercept.arrived
    schema = operator._schema.arguments
    return all(
        _same(x, y)
        for x, y in zip(_bound(schema, args, kwargs), _bound(schema, found_args, found_kwargs), strict=True)
    )


def _bound(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    values = list(args)
    values += [kwargs.get(a.name, a.default_value) for a in schema[len(values) :]]
    return values


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return left is right
    if isinstance(left, str | torch.device) and isinstance(right, str | torch.device):
        return torch.device(left) == torch.device(right) if left != right else True
    return type(left) is type(right) and bool(left == right)


def same_sizes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same sizes, symbolic ones included; the comparison adds no guard."""
    return left.dim() == right.dim() and all(
        _expression(a) == _expression(b) for a, b in zip(left.shape, right.shape, strict=True)
    )


def same_steps(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of the same sizes have the same strides, which may be symbolic."""
    return [_expression(a) for a in left.stride()] == [_expression(b) for b in right.stride()]


def is_row_by_row(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements follow one another in memory, as far as symbolic sizes tell."""
    steps: list[int | torch.SymInt] = [1]
    for size in reversed(tensor.shape[1:]):
        steps.append(steps[-1] * size)
    return not tensor.dim() or [_expression(a) for a in tensor.stride()] == [
        _expression(step) for step in reversed(steps)
    ]


def _expression(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
