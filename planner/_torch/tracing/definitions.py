"""Checks that the classes, functions and switches that a capture has followed are unchanged.

Dynamo assumes that they are: it would not notice a patch (``nn.LayerNorm.forward = ...``) after the first
step. Comparing whole classes at every step would take too long. Python keeps a version number of each
dictionary; comparing these is cheap.
"""

import gc
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from torch._C._dynamo.guards import dict_version

from planner._torch.own_code import meant
from planner.module_parts import parts_of

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodDescriptorType, staticmethod, classmethod, property)
_NOT_IN_A_FORWARD = frozenset({
    "__init__", "__new__", "__init_subclass__", "__del__", "__repr__", "__str__", "__dir__",
    "__setstate__", "__getstate__", "__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__",
    "state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict",
    "save", "load", "compile", "manual_seed", "seed",
})  # fmt: skip
"""Methods that make, copy, store or print objects: changes of these do not count. Dynamo itself replaces
``Module.__init__`` and ``Module.__setstate__`` when it first compiles."""


def _precision(library: str, kind: str) -> str:
    return torch._C._get_fp32_precision_getter(library, kind)


_OF_ALL_FORWARDS = (torch.Tensor, torch, torch.nn.functional)
"""The modules and the class in which every forward looks functions up."""
_MKLDNN, _CUDNN = "torch.backends.mkldnn.enabled", "torch.backends.cudnn.enabled"
_TRACE_SWITCHES: dict[str, Callable[[], object]] = {
    "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": torch.backends.cuda.mem_efficient_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled,
    "torch.backends.cuda.cudnn_sdp_enabled()": torch.backends.cuda.cudnn_sdp_enabled,
    "the order of attention's kernels (sdpa_kernel)": torch._C._get_sdp_priority_order,
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()": (
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed
    ),
    _MKLDNN: torch._C._get_mkldnn_enabled,
    _CUDNN: torch._C._get_cudnn_enabled,
}
"""Switches that decide which operations a trace has, and on which Dynamo has no guards."""
DETERMINISTIC = "torch.use_deterministic_algorithms"
_KERNEL_SWITCHES: dict[str, Callable[[], object]] = {
    DETERMINISTIC: torch.are_deterministic_algorithms_enabled,
    _MKLDNN: torch._C._get_mkldnn_enabled,
    _CUDNN: torch._C._get_cudnn_enabled,
    "torch.backends.cudnn.benchmark": torch._C._get_cudnn_benchmark,
    "torch.backends.cudnn.deterministic": torch._C._get_cudnn_deterministic,
} | {
    # Read per backend: the getters for all products (``allow_tf32``) raise an error if one backend was set by
    # its own switch, https://github.com/pytorch/pytorch/issues/179445.
    f"torch.backends.{shown}.fp32_precision": partial(_precision, library, kind)
    for shown, library, kind in (
        ("cuda.matmul", "cuda", "matmul"),
        ("cudnn.conv", "cuda", "conv"),
        ("mkldnn.matmul", "mkldnn", "matmul"),
        ("mkldnn.conv", "mkldnn", "conv"),
    )
}
"""Switches that decide which kernel an operation takes when it runs."""
_KERNEL_GETTERS = tuple(_KERNEL_SWITCHES.values())


def onednn_is_on() -> bool:
    """Whether operations on a CPU may call oneDNN, whose kernels have scratch memory of their own."""
    return bool(torch._C._get_mkldnn_enabled())


def kernel_switches() -> tuple[object, ...]:
    """The present values of the switches by which operations choose a kernel when they run."""
    return tuple([read() for read in _KERNEL_GETTERS])


def switched(before: tuple[object, ...], now: tuple[object, ...]) -> list[str]:
    """Names of the switches that two calls of :func:`kernel_switches` found different."""
    return [name for name, a, b in zip(_KERNEL_SWITCHES, before, now, strict=True) if a != b]


class Definitions:
    """A snapshot of switches, and of the functions of tensors, of ``torch`` and of a module's classes."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._known: dict[int, _Owner] = {}
        self._switches = [(name, read, read()) for name, read in _TRACE_SWITCHES.items()]
        for owner in _OF_ALL_FORWARDS:
            self._known[id(owner)] = _Owner(owner)
        self.include(module)

    def include(self, module: torch.nn.Module) -> None:
        """Add the present definitions of a module's classes that are not in the snapshot yet."""
        kinds = {kind for part in parts_of(module) for kind in type(part).__mro__[:-1]}
        for kind in kinds:
            if id(kind) not in self._known:
                self._known[id(kind)] = _Owner(kind)

    def changed(self) -> str | None:
        """The name of a function or switch that has changed, as ``LayerNorm.forward``; None if none has."""
        for switch, read, before in self._switches:
            if read() != before:
                return switch
        for owner in self._known.values():
            if dict_version(owner.names) != owner.version:
                name = owner.changed()
                if name is not None:
                    return name
        return None


class _Owner:
    """A class or module, and the functions in it."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner  # held, so that no other object gets its id
        # ``vars`` of a class is a read-only view; only the dictionary behind it has a version number.
        self.names: dict[str, Any] = (
            gc.get_referents(vars(owner))[0] if isinstance(owner, type) else vars(owner)
        )
        self._functions = _functions(self.names)
        self.version = dict_version(self.names)

    def changed(self) -> str | None:
        """The name of a function that has changed; None if the dictionary changed only in other names."""
        version, found = dict_version(self.names), _functions(self.names)
        for name in self._functions.keys() | found.keys():
            if self._functions.get(name) is not found.get(name) and (
                name in self._functions or self._overrides(name)
            ):
                return f"{self._owner.__name__}.{name}"
        self.version = version
        return None

    def _overrides(self, name: str) -> bool:
        """Whether a new name overrides a name of a base class."""
        bases = self._owner.__mro__[1:] if isinstance(self._owner, type) else ()
        return any(name in vars(base) for base in bases)


def _functions(names: dict[str, Any]) -> dict[str, Any]:
    return {
        name: meant(_without_fx(value))
        for name, value in names.items()
        if isinstance(value, _FUNCTIONS) and name not in _NOT_IN_A_FORWARD
    }


def _without_fx(function: Any) -> Any:
    """The function inside the wrappers that ``torch.fx`` patches in while it traces, in any thread."""
    while hasattr(function, "_Patcher__fx_already_patched"):
        function = function.__wrapped__
    return function
