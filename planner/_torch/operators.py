"""Properties of ATen operators, and settings of backends."""

from collections.abc import Mapping, Sequence
from functools import cache
from operator import getitem
from typing import Any

import torch

from planner._torch import pytree

OpOverload = torch._ops.OpOverload
"""The type of ATen-style operator overloads."""

SHAPE_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
"""The same memory in another shape; autograd does not take the second for a view."""


def is_operator(target: object) -> bool:
    """Whether a graph node's target is an ATen-style operator overload."""
    return isinstance(target, torch._ops.OpOverload)


def returns_no_views(operator: Any) -> bool:
    """Whether everything that an operator returns is memory of its own."""
    returns = operator._schema.returns if isinstance(operator, OpOverload) else ()
    return bool(returns) and all(r.alias_info is None for r in returns)


def returns_given(operator: OpOverload) -> bool:
    """Whether everything that an operator returns is memory that it was given: as a view, or written."""
    return operator.is_view or all(r.alias_info is not None for r in operator._schema.returns)


def returns_one(operator: OpOverload) -> bool:
    """Whether an operator returns one thing, not a tuple."""
    return len(operator._schema.returns) == 1


@cache
def writes(operator: Any) -> bool:
    """Whether an operator writes to its arguments."""
    return isinstance(operator, OpOverload) and operator._schema.is_mutable


@cache
def name_of(operator: OpOverload) -> str:
    """An operator's name without its overload, as in ``aten::add``."""
    name: str = operator._schema.name
    return name


def written_positions(operator: OpOverload) -> list[tuple[int, str]]:
    """The arguments that an operator writes, as its schema says: positions and names."""
    return [
        (position, argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


@cache
def takes_pinning(operator: OpOverload) -> bool:
    """Whether an operator may be told to pin the memory of what it makes, as those that make tensors anew."""
    return any(argument.name == "pin_memory" for argument in operator._schema.arguments)


def takes_type(operator: Any) -> bool:
    """Whether an operator may be told the type of what it makes."""
    return any(argument.name == "dtype" for argument in operator._schema.arguments)


def last_argument(operator: OpOverload) -> str:
    """The name of an operator's last argument."""
    name: str = operator._schema.arguments[-1].name
    return name


def not_asked_for(operator: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the results that a call of a backward does not ask for, by its mask of results.

    Kernels return nothing there, or memory that nobody reads; shape functions do not always agree with them.
    """
    position = _position_of_mask(operator) if isinstance(operator, OpOverload) else None
    if position is None or position >= len(args) or len(args[position]) != len(operator._schema.returns):
        return ()
    return tuple(i for i, asked in enumerate(args[position]) if not asked)


@cache
def _position_of_mask(operator: OpOverload) -> int | None:
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("output_mask") if "output_mask" in names else None


def asked_for(operator: Any, args: Sequence[Any], results: Any) -> Any:
    """The results of a call without those that nobody asks for; memory of these is scratch."""
    unwanted = not_asked_for(operator, args)
    return [None if i in unwanted else one for i, one in enumerate(results)] if unwanted else results


KEPT_BY_PYTORCH = (torch.ops.aten._cudnn_init_dropout_state.default,)
"""Operators whose result replaces one of the same size that PyTorch keeps: no step leaves more memory."""


_NUMBERS = (int, float, complex)


def numbers_for_tensors(operator: OpOverload, args: Sequence[Any]) -> dict[str, Any]:
    """The arguments that are Python numbers where the operator takes tensors, by name."""
    if not any(isinstance(given, _NUMBERS) for given in args):
        return {}
    return {
        argument.name: given
        for argument, given in zip(operator._schema.arguments, args, strict=False)
        if isinstance(given, _NUMBERS) and isinstance(argument.type, torch.TensorType)
    }


def numbers_as_tensors(operator: OpOverload, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with tensors in the place of Python numbers where the operator takes tensors."""
    numbers = numbers_for_tensors(operator, args)
    return tuple(
        number_as_tensor(given) if argument.name in numbers else given
        for argument, given in zip(operator._schema.arguments, args, strict=False)
    )


def number_as_tensor(number: float | complex) -> torch.Tensor:
    """A tensor of the shape and type of the one that PyTorch makes of a number."""
    dtypes: dict[type, torch.dtype] = {
        bool: torch.bool,
        float: torch.float64,
        complex: torch.complex128,
    }
    return torch.empty((), dtype=dtypes.get(type(number), torch.int64))


def uses_generator(operator: Any) -> bool:
    """Whether an operator draws random numbers."""
    return isinstance(operator, OpOverload) and _has_tag(operator, torch.Tag.nondeterministic_seeded)


_KNOWN = frozenset({"aten", "prims", "mkldnn", "torch_nn", "torchvision", "planner"})


def is_foreign(operator: Any) -> bool:
    """Whether an operator is from outside PyTorch: only the shapes of its results are known."""
    return isinstance(operator, OpOverload) and operator.namespace not in _KNOWN


COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d"})
"""Namespaces of operators in which ranks take part together."""


def is_collective(operator: Any) -> bool:
    """Whether ranks take part in a call together: a rank that calls it alone waits for the others."""
    return isinstance(operator, OpOverload) and operator.namespace in COLLECTIVES


def waits(operator: Any) -> bool:
    """Whether an operator waits for the result of a collective, which is its argument, and returns that."""
    return is_collective(operator) and name_of(operator) == "_c10d_functional::wait_tensor"


_READ_WHILE_THEY_RUN = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


def reads_until_waited_for(operator: Any) -> bool:
    """Whether a collective reads its argument until its result is waited for; others copy it first."""
    return is_collective(operator) and name_of(operator).partition("::")[2] in _READ_WHILE_THEY_RUN


def takes_item(target: Any) -> bool:
    """Whether a graph's node is one of several results of another node."""
    return target is getitem


@cache
def may_draw(operator: Any) -> bool:
    """Whether an operator draws random numbers, or may: users' operators need not declare it."""
    return uses_generator(operator) or (is_foreign(operator) and not is_collective(operator))


def sized_by_data(operator: Any) -> bool:
    """Whether the shapes of an operator's results depend on data (``nonzero``, ``masked_select``)."""
    return isinstance(operator, OpOverload) and _has_tag(operator, torch.Tag.dynamic_output_shape)


@cache
def _has_tag(operator: OpOverload, tag: torch.Tag) -> bool:
    return tag in operator.tags


def waits_for_data(operator: Any) -> bool:
    """Whether Python waits for the device until the operator has run: it asks for data, or sizes follow from
    them."""
    if not isinstance(operator, OpOverload):
        return False
    return _has_tag(operator, torch.Tag.data_dependent_output) or sized_by_data(operator)


def tf32_allowed(convolution: bool) -> bool:
    """Whether float32 convolutions, or matrix products, may use TF32."""
    if hasattr(torch.backends.cudnn, "conv"):
        backend = torch.backends.cudnn.conv if convolution else torch.backends.cuda.matmul
        return bool(backend.fp32_precision == "tf32")
    # Before torch 2.9.
    return bool(torch.backends.cudnn.allow_tf32 if convolution else torch.backends.cuda.matmul.allow_tf32)


def cudnn_version() -> int | None:
    """The version of cuDNN; None without it."""
    version: int | None = torch.backends.cudnn.version()
    return version


def written_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call of an operator writes to, as its schema says."""
    schema = operator._schema.arguments
    named = {argument.name: value for argument, value in zip(schema, args, strict=False)}
    named.update(kwargs)
    written = [named.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in pytree.tree_leaves(written) if isinstance(t, torch.Tensor)]
