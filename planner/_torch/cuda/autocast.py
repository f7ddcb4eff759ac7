"""Autocast as a GPU does it, captured on tensors without data on the CPU.

Autocast picks its operations by device: on CUDA softmax, layer normalisation, powers and sums run in single
precision, which on the CPU stay in half; and where CUDA is not there, ``torch.autocast("cuda")`` switches
itself off. Where a step is captured on the CPU for a GPU, regions of autocast, for whichever of the two they
are, are CUDA's here.

For products and losses, PyTorch's casts for the CPU are those for CUDA, and keep the casts of weights as
CUDA's do; they stay. The other operators get kernels of their own, below, as listed in
``ATen/autocast_mode.h`` of torch 2.13. Casts of weights for these are not kept.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.library import Library
from torch.utils import _pytree as pytree

from planner._torch.autocast_state import autocast_state, set_autocast_state, under_autocast
from planner._torch.compat import version
from planner._torch.execution.cast_inside import noted_operators
from planner._torch.patches import kernels_replaced, replaced
from planner.errors import CaptureError, PlanWarning

aten = torch.ops.aten
_KEY = torch._C.DispatchKey.AutocastCPU
_KEYS = torch._C.DispatchKeySet(_KEY)
_KINDS = ("cpu", "cuda")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operators that CUDA casts, by what it casts them to. The first are cast alike on the CPU.
ALIKE = _names("""
    _convolution.deprecated addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input linalg_vecdot linear matmul mm prelu
    scaled_dot_product_attention
    binary_cross_entropy_with_logits cdist cosine_embedding_loss hinge_embedding_loss huber_loss kl_div
    l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d
    poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
""")
TO_HALF = _names("""
    _convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addmv addr
    chain_matmul convolution cudnn_convolution cudnn_convolution_transpose einsum gru_cell linalg_multi_dot
    lstm_cell mv rnn_relu_cell rnn_tanh_cell
""")
TO_SINGLE = _names("""
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d acos asin cosh cosine_similarity dist erfinv exp expm1 frobenius_norm.dim
    group_norm layer_norm log log10 log1p log2 logsumexp native_layer_norm nuclear_norm nuclear_norm.dim pdist
    pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh softplus tan
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d
""")
if version() >= (2, 14):
    TO_SINGLE |= {"linalg_matrix_sqrth"}
RESULT_SINGLE = _names("""
    cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int prod
    prod.dim_int softmax.int sum sum.dim_IntList
""")
NORMS = _names("norm.Scalar norm.ScalarOpt_dim")
TO_WIDEST = _names("""
    addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
""")
REFUSED = _names("binary_cross_entropy")
# Operators that only the CPU casts, with the same results: CUDA casts the operators that they are made of.
SAME_IN_PARTS = _names("""
    _addmm_activation _native_multi_head_attention conv1d.padding conv2d.padding conv3d.padding
    mkldnn_rnn_layer
""")

Kernel = Callable[..., Any]


@contextlib.contextmanager
def autocast_of_cuda() -> Iterator[list[str]]:
    """A context in which, in this thread, autocast on the CPU is CUDA's.

    A region that is on outside stays on. A region for CUDA that PyTorch has switched off, since there is no
    CUDA, is taken to be on, with a :class:`PlanWarning`.

    Yields:
        The regions that are on, as in ``["cuda:bfloat16"]``.

    Raises:
        CaptureError: (by the captured code) the operation is one that CUDA's autocast refuses.
    """
    dtype = _surrounding_dtype()
    owner = threading.get_ident()
    with contextlib.ExitStack() as stack:
        library = Library("aten", "IMPL")
        stack.callback(library._destroy)
        _register(library, stack, owner)
        stack.enter_context(_regions_are_cudas(owner))
        state = (dtype is not None, dtype or torch.get_autocast_dtype("cuda"))
        stack.enter_context(under_autocast(dict.fromkeys(_KINDS, state)))
        yield [] if dtype is None else [f"cuda:{str(dtype).removeprefix('torch.')}"]


def _surrounding_dtype() -> torch.dtype | None:
    """The dtype that the region of autocast around planning casts to on a GPU; None outside of any."""
    for kind in reversed(_KINDS):
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    torch.autocast_increment_nesting()
    if torch.autocast_decrement_nesting() == 0 or torch.cuda.is_available():
        return None
    dtype = torch.get_autocast_dtype("cuda")
    warnings.warn(
        "planning inside of a region of autocast that is off. PyTorch switches torch.autocast('cuda') off "
        f"where there is no CUDA, so this is planned as autocast to {dtype}; if it is meant to be off, plan "
        "outside of it",
        PlanWarning,
        stacklevel=2,
    )
    return dtype


# ---- regions ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _regions_are_cudas(owner: int) -> Iterator[None]:
    """Let regions of autocast for the CPU or CUDA hold for both, and stay on where there is no CUDA."""
    region: Any = autocast_mode.autocast
    make, enter, leave = region.__init__, region.__enter__, region.__exit__

    switched_on: list[Any] = []

    def is_ours(device_type: object) -> bool:
        return threading.get_ident() == owner and device_type in _KINDS

    @functools.wraps(make)
    def made(
        self: Any,
        device_type: str,
        dtype: Any = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if not is_ours(device_type):
            make(self, device_type, dtype, enabled, cache_enabled)
            return
        if dtype is None:
            dtype = torch.get_autocast_dtype("cuda")
        make(self, device_type, dtype, False, cache_enabled)
        self._enabled = self._planned_enabled = bool(enabled)

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        if is_ours(self.device):
            self._planned_before = autocast_state()
            if not hasattr(self, "_planned_enabled") and not self._enabled and not torch.cuda.is_available():
                switched_on.append(self)
                self._enabled = True
                warnings.warn(
                    "a region of autocast that was made before the planning is off. PyTorch switches "
                    "torch.autocast('cuda') off where there is no CUDA, so this is planned as autocast to "
                    f"{self.fast_dtype}; if it is meant to be off, make it inside of the forward",
                    PlanWarning,
                    stacklevel=2,
                )
        result = enter(self)
        if is_ours(self.device):
            set_autocast_state(dict.fromkeys(_KINDS, (self._enabled, self.fast_dtype)))
        return result

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        result = leave(self, *error)
        if hasattr(self, "_planned_before"):
            set_autocast_state(self.__dict__.pop("_planned_before"))
        return result

    # Dynamo captures regions by itself, and is not to look into these where it gave a region up.
    methods = {"__init__": made, "__enter__": entered, "__exit__": left}
    try:
        with replaced(region, {name: torch.compiler.disable(method) for name, method in methods.items()}):
            yield
    finally:
        for made_before in switched_on:
            made_before._enabled = False


# ---- operators ----------------------------------------------------------------------------------------


def _register(library: Library, stack: contextlib.ExitStack, owner: int) -> None:
    """Kernels for operators that the CPU's autocast does not cast; in Python's dispatch for those that it
    casts otherwise."""
    kernels: dict[str, Kernel] = {}
    for names, policy in (
        (TO_HALF, _to_half),
        (TO_SINGLE, _to_single),
        (RESULT_SINGLE, _result_single),
        (NORMS, _norm),
        (TO_WIDEST, _to_widest),
        (REFUSED, _refuse),
    ):
        kernels |= dict.fromkeys(names, policy)
    on_cpu = operators_cast_on("CPU")
    kernels |= dict.fromkeys(on_cpu - kernels.keys() - ALIKE - SAME_IN_PARTS, _uncast)
    for name, policy in kernels.items():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(aten, packet, None), overload or "default", None)
        if operator is None:
            continue  # not in this version
        if name in on_cpu:
            uncast = {_KEY: functools.partial(policy, operator)}
            stack.enter_context(kernels_replaced({operator: uncast}))
        else:
            kernel = functools.partial(_cast_here, owner, policy, operator)
            library.impl(name, kernel, "AutocastCPU", with_keyset=True)


@functools.cache
def operators_cast_on(device: str) -> frozenset[str]:
    """The operators for which PyTorch's autocast has kernels on a device ("CPU", "CUDA")."""
    ours = {operator.name() for operator in noted_operators}
    return frozenset(
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and name not in ours
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, f"Autocast{device}")
    )


def _cast_here(owner: int, policy: Kernel, operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    if threading.get_ident() != owner:
        return operator.redispatch(keys.remove(_KEY), *args, **kwargs)
    return policy(operator, *args, **kwargs)


def _uncast(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator without autocast, but cast the operators that it is made of."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
        return operator.decompose(*args, **kwargs)
    return _call(operator, args, kwargs)


def _to_half(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return _call(operator, *_all_to(torch.get_autocast_dtype("cuda"), args, kwargs))


def _to_single(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return _call(operator, *_all_to(torch.float32, args, kwargs))


def _to_widest(operator: Any, *args: Any, **kwargs: Any) -> Any:
    found = {x.dtype for x in pytree.tree_leaves((args, kwargs)) if _is_eligible(x)}
    wide = torch.float32 if torch.float32 in found else torch.get_autocast_dtype("cuda")
    return _call(operator, *_all_to(wide, args, kwargs))


def _result_single(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Sums and the like return single precision, whatever they get, unless a type is asked for."""
    arguments = operator._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    if not _is_eligible(args[0]) or given.get("dtype") is not None:
        return _call(operator, args, kwargs)
    one_kernel = _SOFTMAX.get(operator._schema.name)
    if one_kernel is not None and args[0].dtype is torch.float16:
        return _call(one_kernel, (args[0], args[1], True), {})  # reads half and writes single precision
    position = next(i for i, argument in enumerate(arguments) if argument.name == "dtype")
    return _call(operator, args[:position], {**kwargs, "dtype": torch.float32})


_SOFTMAX = {"aten::softmax": aten._softmax.default, "aten::log_softmax": aten._log_softmax.default}


def _norm(operator: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
    power = () if len(args) > 1 or "p" in kwargs else (2,)
    rest = () if operator._overloadname == "Scalar" or len(args) > 3 else (kwargs.pop("keepdim", False),)
    return _call(operator.overloadpacket, (*args, *power, *rest), {**kwargs, "dtype": dtype})


def _refuse(operator: Any, *_args: Any, **_kwargs: Any) -> Any:
    raise CaptureError(
        f"{operator.overloadpacket.__name__} is refused by autocast on CUDA, where the step would fail: use "
        "binary_cross_entropy_with_logits, or leave the region of autocast for it"
    )


def _call(operator: Any, args: Any, kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        return operator(*args, **kwargs)


def _is_eligible(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _all_to(dtype: torch.dtype, *tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.to(dtype) if _is_eligible(x) and x.dtype is not dtype else x, tree)
