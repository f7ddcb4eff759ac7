"""Properties of tensors, storages and operators, by private names of PyTorch."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from torch.utils.weak import TensorWeakRef

ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
"""The function that begins a region of autocast in a Dynamo graph."""
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
"""The function that ends one."""
_TRANSFORMS = {
    getattr(torch._C._functorch, f"_{kind}_{change}_nesting", None): by
    for kind in ("grad", "jvp", "vmap")
    for change, by in (("increment", 1), ("decrement", -1))
}


def transform_depth(node: torch.fx.Node) -> int:
    """1 for a node of a Dynamo graph that begins a transform of ``torch.func``, -1 for its end; else 0."""
    return _TRANSFORMS.get(node.target, 0) if node.op == "call_function" else 0


SPARSE_PARTS = (torch.Tensor._indices, torch.Tensor._values)
"""Operators that take indices and values out of a sparse tensor, coalesced or not."""
_COMPRESSED_ROWS = (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values)
_COMPRESSED_COLUMNS = (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values)
SPARSE = {
    torch.sparse_coo: SPARSE_PARTS,
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}
"""Sparse tensors that have no storage of their own, but those of the tensors that they are made of."""


def as_lazy_as(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, conjugated or negated lazily where another is.

    Kernels that do not know of this copy it before they read it.
    """
    return lazily(tensor, conjugated=like.is_conj(), negated=like.is_neg())


def lazily(tensor: torch.Tensor, *, conjugated: bool, negated: bool) -> torch.Tensor:
    """The same memory, which is read conjugated or negated, or neither."""
    tensor = tensor if tensor.is_conj() is conjugated else tensor.conj()
    return tensor if tensor.is_neg() is negated else torch._neg_view(tensor)


def storage_number(storage: torch.UntypedStorage) -> int:
    """Identity of a storage while it lives."""
    number: int = storage._cdata
    return number


def is_lent(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory that no allocator of PyTorch gave, as a numpy array's."""
    return not tensor.untyped_storage().resizable()


_HOLD_THEIR_DATA = (torch.Tensor, torch.nn.Parameter)


@functools.cache
def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class hold others that have their data, as DTensors do."""
    return kind not in _HOLD_THEIR_DATA and (is_traceable_wrapper_subclass_type(kind) or is_opaque(kind))


def is_opaque(kind: type) -> bool:
    """Whether tensors of a class run operators in their own way, and do not say which tensors they hold."""
    runs: Any = getattr(kind, "__torch_dispatch__", None)
    return (
        runs is not torch._C._disabled_torch_dispatch_impl
        and issubclass(kind, torch.Tensor)
        and not issubclass(kind, FakeTensor)
        and not is_traceable_wrapper_subclass_type(kind)
    )


def held_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that have the data of one: of a DTensor the local one, of a sparse tensor indices and
    values, of most tensors the tensor itself."""
    if tensor.layout in SPARSE:
        return [part(tensor) for part in SPARSE[tensor.layout]]
    if not is_wrapper(type(tensor)):
        return [tensor]
    of_a_wrapper: Any = tensor
    if is_opaque(type(tensor)):
        held = list(vars(tensor).values())
    else:
        held = [getattr(tensor, name) for name in of_a_wrapper.__tensor_flatten__()[0]]
    return [own for one in held if isinstance(one, torch.Tensor) for own in held_tensors(one)]


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another."""
    return tensor._is_view()


Placement = tuple[tuple[int, ...], tuple[int, ...], int]
"""A tensor's sizes, strides and offset."""


def placement_of(tensor: torch.Tensor) -> Placement | None:
    """How a tensor lies in its memory; None where it has none of its own, or lies there otherwise."""
    if tensor.layout is not torch.strided or tensor.is_nested or is_wrapper(type(tensor)):
        return None
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def place_as_before(tensor: torch.Tensor, placement: Placement | None) -> None:
    """Undo operations as ``unsqueeze_`` and ``t_``, where the memory has not become too small since."""
    if placement is None or placement_of(tensor) in (None, placement):
        return
    sizes, strides, offset = placement
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes():
        with torch.no_grad():
            tensor.as_strided_(sizes, strides, offset)


def dispatch_keys(tensor: torch.Tensor) -> int:
    """A tensor's dispatch keys, as a number: they choose kernels, and tell conjugates and inference apart."""
    number: int = torch._C._dispatch_keys(tensor).raw_repr()
    return number


def writes(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place."""
    return tensor._version


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without autograd history. A tensor without history is returned as it is."""
    return tensor if tensor.grad_fn is None else alias_of(tensor)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same memory, without history.

    That of a plain tensor shares its count of writes, whatever dispatch mode is on.
    """
    if type(tensor) is not torch.Tensor:
        return tensor.detach()
    with torch._C._DisableTorchDispatch():  # a mode would make an alias that counts by itself
        return tensor.detach()


def alias_inside(tensor: torch.Tensor) -> torch.Tensor:
    """The same as :func:`alias_of`, in a call of a dispatch mode.

    Both contexts are C++'s: Ctrl-C inside of one written in Python would leave its settings behind.
    """
    with torch._C._RestorePythonTLSSnapshot(), torch._C._AutoDispatchBelowAutograd():  # type: ignore[attr-defined]
        return tensor.detach()


def strided_copy(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A copy that lies in memory as the tensor does, dense or not.

    Args:
        device: Where it is made; None for the tensor's own device.
    """
    device = device or tensor.device
    if tensor.layout is not torch.strided or tensor.is_contiguous() or not tensor.numel():
        return tensor.to(device, copy=True)
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    copy_elements(made, tensor)
    return made


def copy_elements(made: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor into another of the same sizes and strides, whose elements may share memory."""
    if tensor.is_contiguous() or not tensor.numel():
        made.copy_(tensor)
        return
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    made.as_strided((span,), (1,)).copy_(tensor.as_strided((span,), (1,)))


def fills_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all that lies in its storage, each element once."""
    if tensor.layout is not torch.strided:
        return False
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.storage_offset() == 0


def stored_elements(tensor: torch.Tensor) -> int:
    """How many elements a sparse tensor stores."""
    return int(tensor._nnz())


Hook = Callable[[torch.Tensor], torch.Tensor | None]
"""A function that is called with a gradient, and may return another in its place."""


def hooks_on(tensor: torch.Tensor) -> list[Hook]:
    """The hooks that look at, or change, the gradient of a tensor, in their order."""
    return list((tensor._backward_hooks or {}).values())


def hooks_after_accumulation(tensor: torch.Tensor) -> dict[int, Callable[[torch.Tensor], None]]:
    """The hooks that run once the gradient of a leaf has been accumulated, by number."""
    hooks: dict[int, Callable[[torch.Tensor], None]] | None = tensor._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def all_hooks_on(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """The hooks on the gradient of a leaf, and those that run after it has been accumulated."""
    return [*hooks_on(tensor), *hooks_after_accumulation(tensor).values()]


class HooksOn:
    """The hooks on the gradient of a tensor, by number. The tensor is not held."""

    __slots__ = ("_first", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._first = TensorWeakRef(tensor), tensor._backward_hooks

    def there_now(self) -> dict[int, Hook] | None:
        """The present hooks; of a tensor that is gone, those at the beginning."""
        tensor = self._tensor()
        hooks: dict[int, Hook] | None = self._first if tensor is None else tensor._backward_hooks
        return hooks


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks look at, or change, the gradient of a tensor."""
    return bool(tensor._backward_hooks)


def has_hooks_on_arrival(tensor: torch.Tensor) -> bool:
    """Whether hooks run where the gradient of a leaf arrives, before or after it is accumulated."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def schema_of(operator: Any) -> Any:
    """Names and types of an operator's arguments and results."""
    return operator._schema


@functools.cache
def has_tensors(operator: Any) -> bool:
    """Whether tensors are among an operator's arguments or results; the marks of a profiler have none."""
    schema = operator._schema
    return any("Tensor" in str(one.type) for one in (*schema.arguments, *schema.returns))


def held_by_pytorch(tensor: Any) -> bool:
    """Whether PyTorch itself holds a tensor that Python holds, which adds one Python reference."""
    return int(tensor._use_count()) > 1


def call_tensors(nest: Any) -> list[torch.Tensor]:
    """Tensors among an operator's arguments or results, in order.

    For data of users there is :func:`planner.training_step.step.tensors_in`, which knows all containers and
    is slower.
    """
    if isinstance(nest, torch.Tensor):
        return [nest]
    if isinstance(nest, dict):
        nest = nest.values()
    elif not isinstance(nest, list | tuple):
        return []
    return [tensor for item in nest for tensor in call_tensors(item)]
