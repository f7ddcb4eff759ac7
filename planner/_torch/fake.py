"""Tensors without data, and questions to tensors and storages that need private names of PyTorch."""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from planner._torch.elsewhere import ModeElsewhere
from planner._torch.tensors import dispatch_keys

DataDependentError = DataDependentOutputException
"""Raised where a number is asked of a tensor without data."""


def fake_mode() -> FakeTensorMode:
    """A mode under which tensors have shapes but no data; real tensors may be mixed in."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode_with_sizes(*, elsewhere: bool = False) -> FakeTensorMode:
    """The same, knowing of symbolic sizes, without which Inductor does not use its cache.

    Args:
        elsewhere: Whether its tensors are on a GPU that is not here.
    """
    mode = ModeElsewhere if elsewhere else FakeTensorMode
    return mode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


class AnyNumber(TorchDispatchMode):
    """Optimizers ask for the number of their steps; with any in its place they allocate the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentError:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 1.0 if args[0].is_floating_point() else 1


class QuickFakeMode(FakeTensorMode):
    """A mode that makes tensors without data quickly, and whose tensors tell nobody their address.

    Code outside of PyTorch that gets the address 0, by ``data_ptr`` or DLPack, reads and writes there, and
    the process ends.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        self._allow_unsafe_data_ptr_access = False

    def without_data(self, made: torch.Tensor, device: torch.device) -> FakeTensor:
        """``FakeTensor(self, made, device)``, with the attributes of another tensor on the same device."""
        attributes = self._attributes.get(device)
        if attributes is None:
            other = FakeTensor(self, made, device)
            attributes = self._attributes[device] = dict(vars(other))
            return other
        tensor: Any = torch.Tensor._make_subclass(
            FakeTensor, made, made.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        vars(tensor).update(attributes)
        return tensor  # type: ignore[no-any-return]


def forget_real_tensors(mode: FakeTensorMode) -> None:
    """Drop a mode's weak references to the tensors that it converted. A tensor with weak references cannot be
    exchanged in place (``torch.utils.swap_tensors``)."""
    describer = mode.fake_tensor_converter.meta_converter.describer
    describer.lookup_tensor.clear()
    describer.lookup_storage.clear()


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor without data like ``tensor``; of one on the meta device, one on the CPU, since PyTorch picks
    operations by device and has none of its own for meta."""
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor.device.type != "meta":
        plain = _plain_parameter(tensor, mode)
        return mode.from_tensor(tensor) if plain is None else plain
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def gradient_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The type of a tensor's gradient, which may be another than its own from PyTorch 2.10 on."""
    return getattr(tensor, "grad_dtype", tensor.dtype)


def _plain_parameter(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor | None:
    """The result of ``mode.from_tensor`` for a plain parameter, in an eighth of the time.

    Models have thousands. None for tensors that shape, strides, dtype and device do not describe in full.
    """
    if (
        type(tensor) is not torch.nn.Parameter
        or tensor.layout is not torch.strided
        or tensor.storage_offset()
        or tensor.grad is not None
        or gradient_dtype(tensor) != tensor.dtype
        or tensor._is_view()
        or dispatch_keys(tensor) != _keys_of_parameters(tensor.device)
    ):
        return None
    converter = mode.fake_tensor_converter.meta_converter
    describer, storage = converter.describer, tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.element_size():
        return None  # PyTorch 2.13 drops the bytes behind the last element, and 2.15 keeps them
    if storage in describer.lookup_storage or tensor in describer.lookup_tensor:
        return None  # it shares its storage, or is there already
    made = empty_strided(mode, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    made.requires_grad_(tensor.requires_grad)
    made._is_param = True
    # What the step reaches in other ways, or what lies in the same storage, is told from these.
    converter.storage_memo[describer.get_storage_id(storage)] = made.untyped_storage()
    converter.tensor_memo[describer.get_tensor_id(tensor)] = made
    return made


def empty_strided(
    mode: FakeTensorMode,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> FakeTensor:
    """The result of ``torch.empty_strided`` in a mode, made without a call to any mode."""
    with no_dispatch():
        on_meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        if isinstance(mode, QuickFakeMode):
            return mode.without_data(on_meta, device)
        return FakeTensor(mode, on_meta, device)


@functools.cache
def _keys_of_parameters(device: torch.device) -> int:
    return dispatch_keys(torch.nn.Parameter(torch.empty(0, device=device)))


def same_shape(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data like another without data, with a storage of its own."""
    mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else contextlib.nullcontext()
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def same_shape_in(
    mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device | None = None
) -> torch.Tensor:
    """A tensor without data like another, of a mode, with a storage of its own as large as the other's.

    It is on the device of the other, unless one is given; for the meta device it is on the CPU.
    """
    size = storage_bytes(tensor) // max(tensor.element_size(), 1)
    device = device or tensor.device
    device = torch.device("cpu") if device.type == "meta" else device
    with mode:
        if size == tensor.numel():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        base = torch.empty(size, dtype=tensor.dtype, device=device)
        return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def empty_of(like: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of one dimension, without data like another without data, where that is."""
    mode = like.fake_mode if isinstance(like, FakeTensor) else contextlib.nullcontext()
    with mode:
        return torch.empty(size, dtype=dtype, device=like.device)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor without data in the same storage."""
    aliased: torch.Tensor = called(torch.ops.aten.alias.default, tensor)
    return aliased


def called(function: Any, first: torch.Tensor, *rest: Any) -> Any:
    """The result of a function called with tensors without data."""
    mode = first.fake_mode if isinstance(first, FakeTensor) else contextlib.nullcontext()
    with mode:
        return function(first, *rest)


def is_fake(value: object) -> bool:
    """Whether a value is a tensor without data."""
    return isinstance(value, FakeTensor)


def mode_of(tensors: Iterable[torch.Tensor]) -> FakeTensorMode:
    """The mode of tensors without data, given at least one of them."""
    return next(tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor))


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, the same for all of its views, while the storage lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Suspend the dispatch modes that are active (to run real operations inside a fake step)."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield


def strides_of_view(
    sizes: Sequence[int], strides: Sequence[int], new_sizes: Sequence[int]
) -> tuple[int, ...]:
    """Strides that ``view`` gives a tensor of other sizes; tracing may tell others where a size is one."""
    with without_modes(), no_python_dispatcher():
        return torch.empty_strided(sizes, strides, device="meta").view(new_sizes).stride()


def is_size(value: object) -> bool:
    """Whether a value of a captured graph is a symbolic number: a size, or computed from sizes."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def held_object(value: object) -> object:
    """The object that a value of a captured graph stands for, if it is neither tensor nor number, as the mesh
    of a DTensor; None for all others."""
    return value.real_obj if isinstance(value, FakeScriptObject) else None


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's storage, of a symbolic one at the sizes that it was captured with."""
    return concrete_size(tensor.untyped_storage().nbytes())


def concrete_size(size: int | torch.SymInt) -> int:
    """A size as a number: of a symbolic one the size that it was captured with."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise ValueError(f"the size {size} depends on data")
    return int(hint)


def tree_leaves(nest: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dictionaries; ``None`` is one."""
    return list(torch.utils._pytree.tree_leaves(nest))


# Functional forms of writes into views copy the whole storage, so that the result lies in its copy as the
# view lay in the original. Kernels without data do not show it, and sizes and strides do not tell it.
_COPY_STORAGE = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("copy", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")
)


def whole_storage(func: object, args: Sequence[Any]) -> tuple[int, int] | None:
    """The elements of the storage of a call's first argument, and its offset, where the result is as large as
    that storage; None for other operations."""
    if getattr(func, "overloadpacket", None) not in _COPY_STORAGE or not args:
        return None
    first = args[0]
    if not isinstance(first, torch.Tensor) or first.layout is not torch.strided:
        return None
    return storage_bytes(first) // first.element_size(), concrete_size(first.storage_offset())
