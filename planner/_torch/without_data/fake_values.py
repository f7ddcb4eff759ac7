"""Tensors without data whose values are known all the same.

Masks and indices decide what runs, so those among the inputs, and sequences and constants that a step makes,
keep their values. These are on the CPU, whatever device the tensor is said to be on: nothing is allocated
on a GPU, and nothing is run there, to know them.
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from planner._torch.patches import replaced
from planner._torch.tensors import copy_elements, strided_copy
from planner._torch.without_data.answers import NOT_KNOWN, Answers, asks_for_data
from planner._torch.without_data.apart import tell_results_apart
from planner._torch.without_data.data_free import DataFreeLog
from planner._torch.without_data.plain import ASKS_FOR_DEVICE, device_asked_for
from planner._torch.without_data.remembered_calls import RemembersCalls

_MOST_KNOWN_ELEMENTS = 2**20
NOT_FAKE = {"transformers.utils.import_utils": "is_fake_tensor"}
"""Functions of other libraries that ask whether a tensor has no data, by module."""
_CPU = torch.device("cpu")


def fake_with_values(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor | None:
    """A tensor without data whose values are known, as masks and indices need that decide what runs.

    None for a tensor that is too large or that has gradients.
    """
    kind = tensor.dtype
    if kind.is_floating_point or kind.is_complex or tensor.numel() > _MOST_KNOWN_ELEMENTS:
        return None
    if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
        return None
    device = _CPU if tensor.device.type == "meta" else tensor.device
    return _known(mode, _values(tensor), device)


def _known(mode: FakeTensorMode, values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor without data on a device, with these known values.

    The mode keeps it in its table, so that its views are known to lie in its storage.
    """
    converter: Any = mode.fake_tensor_converter
    original = converter.meta_converter
    if device.type != "cpu":
        converter.meta_converter = _OnDevice(original, device)
    try:
        made: torch.Tensor = converter.from_real_tensor(mode, values, make_constant=True)
    finally:
        converter.meta_converter = original
    return made


class _OnDevice:
    """PyTorch's converter to tensors without data, which says that they are on another device."""

    def __init__(self, converter: Any, device: torch.device) -> None:
        self._converter, self._device = converter, device

    def __call__(self, tensor: torch.Tensor, *, callback: Callable[..., Any], **options: Any) -> Any:
        device = self._device
        return self._converter(tensor, callback=lambda make, **_: callback(make, device=device), **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._converter, name)


class ConstantTrackingFakeMode(RemembersCalls):
    """A mode without data in which sequences and constants of integers that a step makes are known.

    Models compute positions from ``torch.arange`` and let them decide what runs. With the values of such
    tensors known, as those of inputs are, that works without data too; see :func:`values_count`.

    Attributes:
        log: The calls whose results depend on no data.
        answers: Answers to calls that need data; None without.
    """

    def __init__(self, *, answers: Answers | None = None, **options: Any) -> None:
        tell_results_apart()
        super().__init__(**options)
        self.log = DataFreeLog()
        self.answers = answers
        self._depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_FOR_DEVICE:
            return device_asked_for(args)
        kwargs = kwargs or {}
        answer = None
        if asks_for_data(func, args) and self.answers is not None and not self._depth:
            answer = self.answers.answer(func, args)
        self._depth += 1
        try:
            result = self._called(func, types, args, kwargs)
        except NOT_KNOWN:
            if answer is None or self.answers is None:
                raise
            self.answers.uses(answer)
            result = answer.made(self)
        finally:
            self._depth -= 1
        if not self._depth:  # an operator that is made of others is noted once
            self.log.record(func, args, kwargs, result)
        return result

    def _called(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        devices = self._devices(func, args, kwargs)
        if devices is not None:
            found = self._computed(func, args, kwargs, devices)
            if found is not None:
                return found[0]
        result = self.dispatch(func, types, args, kwargs)
        if (
            getattr(func, "overloadpacket", None) in _MAKERS
            and fake_tensors.CONSTANT_NUMEL_LIMIT > 1
            and isinstance(result, FakeTensor)
            and result.constant is None
            and result.device.type != "meta"
            and not result.dtype.is_floating_point
            and not result.dtype.is_complex
            and isinstance(result.numel(), int)
            and result.numel() <= _MOST_KNOWN_ELEMENTS
        ):
            with torch.utils._python_dispatch._disable_current_modes():
                values = func(*_on_cpu(args), **_on_cpu(kwargs))
            return _known(result.fake_mode, values, result.device)
        return result

    def _devices(self, func: Any, args: Any, kwargs: Any) -> list[torch.device] | None:
        """The devices of a call whose tensors all have known values, if one of them is not the CPU."""
        if any(isinstance(x, torch.Tensor) and getattr(x, "constant", None) is None for x in args):
            return None  # nearly every call
        if (
            not isinstance(func, torch._ops.OpOverload)
            or func.namespace == "prim"  # asks for a device
            or torch.Tag.nondeterministic_seeded in func.tags
            or (torch.Tag.inplace_view in func.tags and func is not torch.ops.aten.detach_.default)
        ):
            return None
        leaves = tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if not tensors or any(isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in leaves):
            return None
        if any(
            not isinstance(t, FakeTensor) or t.fake_mode is not self or t.constant is None for t in tensors
        ):
            return None
        asked = [x for x in leaves if isinstance(x, torch.device)]
        devices = [*asked, *(t.device for t in tensors)]
        if any(d.type == "meta" for d in devices) or all(d.type == "cpu" for d in devices):
            return None
        # Where none is asked for, tensors without dimensions on the CPU go with others.
        return asked or sorted({t.device for t in tensors}, key=lambda device: device.type == "cpu")

    def _computed(self, func: Any, args: Any, kwargs: Any, devices: list[torch.device]) -> list[Any] | None:
        """The result of a call whose tensors all have known values; None where it cannot be computed."""
        values = tree_map_only(FakeTensor, lambda t: t.constant, (args, kwargs))
        with no_dispatch():
            result = func(*_on_cpu(values[0]), **_on_cpu(values[1]))
        if not all(self.may_turn_const(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)):
            return None
        return [tree_map_only(torch.Tensor, lambda t: _known(self, t, devices[0]), result)]


_MAKERS = frozenset(
    getattr(torch.ops.aten, name) for name in ("arange", "full", "ones", "zeros", "scalar_tensor")
)


def _on_cpu(nest: Any) -> Any:
    """Arguments of a call in which no other device is asked for."""
    if isinstance(nest, dict):
        nest = {name: value for name, value in nest.items() if name != "pin_memory"}
    return tree_map(lambda x: _CPU if isinstance(x, torch.device) else x, nest)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    # On the meta device there are no values. Ones are assumed: a valid index, a mask without padding.
    if tensor.device.type == "meta":
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).fill_(1)
    return strided_copy(tensor, _CPU)


def forget_changes(fake: torch.Tensor, original: torch.Tensor) -> None:
    """Reset the values of a tensor of :func:`fake_with_values` to the first ones."""
    assert isinstance(fake, FakeTensor)
    if fake.constant is None:
        fake.constant = _values(original)
        fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)
    else:
        copy_elements(fake.constant, _values(original))


def known_values(tensors: Sequence[object]) -> list[torch.Tensor | None]:
    """The present values of tensors without data; None where they are not known."""
    known = [tensor.constant if isinstance(tensor, FakeTensor) else None for tensor in tensors]
    return _copied(known)


def _copied(known: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    with no_dispatch():
        return copy.deepcopy(list(known))  # those of one storage stay in one


def known_count(mask: torch.Tensor) -> int | None:
    """How many elements of a mask are set; None where it has neither data nor known values."""
    values = mask.constant if isinstance(mask, FakeTensor) else mask
    if values is None or values.device.type == "meta":
        return None
    with no_dispatch():
        return int(values.count_nonzero())


def known_integers(tensor: torch.Tensor) -> list[int] | None:
    """The numbers in a tensor of one dimension on the CPU, where they are known."""
    values = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if values is None or tensor.device.type != "cpu" or tensor.dim() != 1:
        return None
    with no_dispatch():
        return [int(number) for number in values.tolist()]


def know_values(tensors: Sequence[object], known: Sequence[torch.Tensor | None]) -> None:
    """Give tensors without data the values of :func:`known_values`, as if they were made with them.

    The values are copied: the step may write into the tensors, and run again. The mode's table gets the
    tensors that have the values, so that views of them lie in these tensors' storages, not in older ones.
    """
    for tensor, values in zip(tensors, _copied(known), strict=False):
        if values is None or not isinstance(tensor, FakeTensor):
            continue
        tensor.constant = values
        converter: Any = tensor.fake_mode.fake_tensor_converter
        described = converter.meta_converter.describer.describe_storage(values.untyped_storage())
        converter.meta_converter.set_storage_memo(described, tensor.untyped_storage())
        converter.set_tensor_memo(values, tensor)
        converter.add_constant_storage_mapping(tensor)


@contextlib.contextmanager
def values_count() -> Iterator[None]:
    """Operations on tensors whose values are known are computed, so that they can decide what runs."""
    with contextlib.ExitStack() as stack:
        for name, function in NOT_FAKE.items():
            module = sys.modules.get(name)
            if module is not None and hasattr(module, function):
                stack.enter_context(replaced(module, {function: _never}))
        stack.enter_context(lists_count())
        yield


@contextlib.contextmanager
def lists_count() -> Iterator[None]:
    """A context in which tensors made of lists of numbers have known values, and may decide sizes.

    PyTorch itself knows only those of one element. Planning and training capture a module in this context.
    """
    with replaced(fake_tensors, {"CONSTANT_NUMEL_LIMIT": _MOST_KNOWN_ELEMENTS}):
        yield


def _never(_: object) -> bool:
    return False
