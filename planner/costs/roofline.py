"""How long an operation takes on a device, from its shapes alone: a roofline.

    seconds = max(FLOPs / FLOP/s of the dtype, bytes moved / bandwidth) + launch

`launch` is the device's seconds to start any operation. FLOPs count for matrix products, convolutions,
attention and recurrent layers; a multiplication and its addition are two. Every other operation is bound by
the bytes that it moves: its distinct tensor inputs and its outputs, once each. An expanded tensor counts with
its bytes in memory. Views move nothing and cost nothing. Random numbers on a CPU are bound by their count, as
its generator makes one after the other.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.flop_counter import flop_registry

from planner._torch.execution.form_operators import FORM_OF
from planner._torch.execution.mask_operators import DRAW_MASK
from planner._torch.fake import storage_key
from planner._torch.operators import OpOverload, sized_by_data, tf32_allowed, waits
from planner._torch.tensors import call_tensors
from planner.costs.devices import Device

logger = logging.getLogger(__name__)

aten = torch.ops.aten

CPU_DRAW_SECONDS = 8e-9
"""A CPU's time for a random number: that of ``torch.empty(1 << 20).bernoulli_(0.9)`` for each element."""

FlopFormula = Callable[[Sequence[Any]], float]
"""FLOPs from an operation's positional arguments."""


@functools.lru_cache(maxsize=32)
def roofline(device: Device) -> "Roofline":
    """The roofline of a device, always the same one."""
    return Roofline(device)


class Costs(Protocol):
    """A source of the seconds of operations. A plan stores its `name`."""

    name: str

    def seconds(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: object) -> float:
        """The seconds that one operation takes.

        Args:
            func: The operator overload. Other callables (``operator.getitem``, size arithmetic) take 0.
            args, kwargs: Its arguments. Tensors may be fake, and nested in lists.
            outputs: Its result: a tensor, or nested lists of tensors.
        """
        ...


class Roofline:
    """The roofline of one device. It remembers times by operator and arguments: of tensors by type, shape and
    strides. Sizes of results that data decide count too."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.name = "roofline" if device.figures == "published" else f"roofline, {device.figures}"
        self._seconds: dict[object, float] = {}

    def seconds(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: object) -> float:
        """See :meth:`Costs.seconds`."""
        if not isinstance(func, OpOverload) or func in _ALWAYS_FREE or waits(func):
            return 0.0
        if func.is_view and func.overloadpacket not in _VIEW_OR_COPY:
            return 0.0
        tf32 = self.device.kind == "cuda" and tf32_allowed(func.overloadpacket in _CONVOLUTIONS)
        try:
            sizes = tuple(t.shape for t in call_tensors(outputs)) if sized_by_data(func) else ()
            key = (func, tf32, _signature([args, kwargs], {}), sizes)
            known = self._seconds.get(key)
        except TypeError:  # an argument that cannot be hashed
            return self._compute(func, args, kwargs, outputs, tf32)
        if known is None:
            known = self._seconds[key] = self._compute(func, args, kwargs, outputs, tf32)
        return known

    def _compute(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: object, tf32: bool
    ) -> float:
        inputs = [*call_tensors(args), *call_tensors(kwargs)]
        if func.overloadpacket in _VIEW_OR_COPY and _is_alias(inputs, outputs):
            return 0.0
        in_place = str(func.overloadpacket).endswith("_")  # it may return nothing, and still writes
        if not in_place and next(iter(call_tensors(outputs)), None) is None:
            return 0.0  # it returns a size or a device
        arithmetic = 0.0
        flops = op_flops(func, args, kwargs, outputs)
        if flops:
            dtypes = (t.dtype for t in inputs if t.is_floating_point() or t.is_complex())
            dtype = next(dtypes, torch.float32)
            if dtype.is_complex:  # four multiplications for one, and as many additions
                flops *= 4
            arithmetic = flops / self.device.flops_of(dtype, tf32=tf32)
        if func.overloadpacket in _DRAWS and self.device.kind == "cpu":
            drawn = next(iter(call_tensors(outputs)), None)
            arithmetic = CPU_DRAW_SECONDS * int(drawn.numel()) if drawn is not None else 0.0
        memory = bytes_moved(func, args, kwargs, outputs) / self.device.bandwidth
        return max(arithmetic, memory) + self.device.launch_seconds


def op_flops(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: object) -> float:
    """The FLOPs of a matrix product, a convolution, attention or a recurrent layer; 0 for other operators."""
    packet = func.overloadpacket
    try:
        if formula := _FLOPS.get(packet):
            return formula(args)
        if registered := flop_registry.get(packet):
            return float(registered(*args, **kwargs, out_val=outputs))
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
        logger.debug("no flop count for %s: %s", func, error)
    return 0.0


def bytes_moved(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: object) -> int:
    """The bytes that an operation reads and writes: distinct inputs and outputs, once each."""
    packet = func.overloadpacket
    if packet in _ALLOCATE_ONLY:
        return 0
    written = sum(tensor_bytes(tensor) for tensor in call_tensors(outputs))
    if packet in _INPUT_UNREAD:
        return written
    inputs: dict[object, torch.Tensor] = {}
    for tensor in (*call_tensors(args), *call_tensors(kwargs)):
        if tensor.layout is not torch.strided:
            continue
        view = (storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        inputs.setdefault(view, tensor)
    sizes = [tensor_bytes(tensor) for tensor in inputs.values()]
    if packet in _GATHERS and sizes:
        # It reads only those rows of the table that it returns.
        sizes[0] = min(sizes[0], written)
    return sum(sizes) + written


def tensor_bytes(tensor: torch.Tensor) -> int:
    """The distinct bytes of a tensor: a dimension of stride 0, as ``expand`` makes it, counts once."""
    if tensor.layout is not torch.strided:
        return int(tensor.numel()) * tensor.element_size()
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride != 0 or size == 0:
            count *= size
    return int(count) * tensor.element_size()


def _signature(nest: Any, seen: dict[int, int]) -> object:
    """A hashable key for the arguments. The same tensor twice has another key than two that are alike: its
    bytes are read once."""
    if isinstance(nest, torch.Tensor):
        position = seen.setdefault(id(nest), len(seen))
        if nest.layout is not torch.strided:
            return position, nest.dtype, nest.shape
        return position, nest.dtype, nest.shape, nest.stride()
    if isinstance(nest, Mapping):
        nest = list(nest.items())
    if isinstance(nest, (list, tuple)):
        return tuple([_signature(item, seen) for item in nest])
    return type(nest), nest


def _is_alias(inputs: Sequence[torch.Tensor], outputs: object) -> bool:
    """Whether the result shares the memory of the first input."""
    return (
        isinstance(outputs, torch.Tensor)
        and len(inputs) > 0
        and storage_key(outputs) == storage_key(inputs[0])
    )


# ---- FLOPs that PyTorch's own registry lacks or counts wrongly ------------------------------------


def _convolution_backward(args: Sequence[Any]) -> float:
    """Each gradient takes as many FLOPs as the forward. PyTorch's count ignores groups."""
    grad_output, image, weight = args[:3]
    transposed, wanted = args[7], args[10]
    positions = math.prod((image if transposed else grad_output).shape[2:])
    products = int(image.shape[0]) * int(positions) * int(weight.numel())
    return 2.0 * (int(wanted[0]) + int(wanted[1])) * products


def _attention(args: Sequence[Any]) -> float:
    return 2 * _attention_product(*args[:3])


def _attention_backward(args: Sequence[Any]) -> float:
    """Five products: the scores again, and for each of the forward's two products the gradients of both
    factors."""
    return 5 * _attention_product(*args[1:4])


def _attention_product(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    """The FLOPs of one of attention's two products, queries x keys x width: their mean, as queries and values
    may differ in width."""
    width = (query.shape[-1] + value.shape[-1]) / 2
    return 2.0 * int(math.prod(query.shape[:-1])) * int(key.shape[-2]) * width


def _recurrent(args: Sequence[Any]) -> float:
    """Every weight is multiplied once for every time step of every sequence. Its weights are the second
    argument, or of oneDNN's layer the second to fifth."""
    steps = int(args[0].numel()) / int(args[0].shape[-1])
    weights = call_tensors(args[1] if isinstance(args[1], (list, tuple)) else args[1:5])
    return 2.0 * steps * sum(int(weight.numel()) for weight in weights if weight.dim() == 2)


def _recurrent_backward(args: Sequence[Any]) -> float:
    return 2 * _recurrent(args)


def _every_element_of(position: int) -> FlopFormula:
    return lambda args: 2.0 * int(args[position].numel())


def _linear(args: Sequence[Any]) -> float:
    return 2.0 * int(args[0].numel()) * int(math.prod(args[1].shape[:-1]))


def _packets(*names: str) -> frozenset[object]:
    """The operators of these names that this version of PyTorch has."""
    return frozenset(getattr(aten, name) for name in names if hasattr(aten, name))


_CONVOLUTIONS = _packets(
    "convolution", "_convolution", "cudnn_convolution", "convolution_overrideable", "convolution_backward"
)

_FLOPS: dict[object, FlopFormula] = {
    packet: formula
    for formula, names in (
        (_convolution_backward, ("convolution_backward",)),
        (
            _attention,
            (
                "_scaled_dot_product_flash_attention_for_cpu",
                "_scaled_dot_product_flash_attention",
                "_scaled_dot_product_efficient_attention",
                "_scaled_dot_product_cudnn_attention",
                "_scaled_dot_product_fused_attention_overrideable",
                "_scaled_dot_product_attention_math",
            ),
        ),
        (
            _attention_backward,
            (
                "_scaled_dot_product_flash_attention_for_cpu_backward",
                "_scaled_dot_product_flash_attention_backward",
                "_scaled_dot_product_efficient_attention_backward",
                "_scaled_dot_product_cudnn_attention_backward",
                "_scaled_dot_product_fused_attention_overrideable_backward",
            ),
        ),
        (_recurrent, ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")),
        (_recurrent_backward, ("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward")),
        (_every_element_of(0), ("mv", "dot", "vdot")),
        (_every_element_of(1), ("addmv",)),
        (_linear, ("linear",)),
    )
    for packet in _packets(*names)
}

# These share their input's storage if its strides allow it, and copy otherwise.
_VIEW_OR_COPY = _packets("reshape", "contiguous", "to", "flatten", "ravel", "reshape_as", "resolve_conj")

# ``FORM_OF`` allocates no memory, ``_unsafe_view`` is a view to all but its schema, the last is ``item()``.
_ALWAYS_FREE = frozenset({FORM_OF, aten._unsafe_view.default, aten._local_scalar_dense.default})

_ALLOCATE_ONLY = _packets(
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"
)

_INPUT_UNREAD = _packets(
    *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full", "zero", "zero_", "fill_", "uniform", "uniform_", "normal_"),
    *("bernoulli_", "exponential_", "random_", "geometric_", "cauchy_", "log_normal_"),
) | {DRAW_MASK.overloadpacket}

_DRAWS = _packets(
    *("native_dropout", "bernoulli", "bernoulli_", "uniform_", "normal_", "rand", "randn", "randint"),
    *("rand_like", "randn_like", "randint_like", "multinomial", "exponential_"),
) | {DRAW_MASK.overloadpacket}

_GATHERS = _packets("embedding", "index", "index_select", "gather", "_unsafe_index")
