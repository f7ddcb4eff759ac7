"""A faster cache of operators' results on tensors without data.

PyTorch has a cache itself, ``FakeTensorMode.cache``. Its keys have some twenty fields for each tensor, and
making one takes longer than the rest of a cached call. Calls whose sizes are plain numbers get shorter keys
here, in the same dictionary, which lead to the same entries.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensors
from torch._subclasses._fake_tensor_utils import _CacheKeyState
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from planner._torch.fake import QuickFakeMode
from planner._torch.without_data.plain import facts_of

_PLAIN = frozenset(
    {int, float, bool, complex, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_PROXY = torch._C._TorchDispatchModeKey.PROXY


class RemembersCalls(QuickFakeMode):
    """A mode without data that answers calls like earlier ones from the cache."""

    def _cached_dispatch_impl(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> object:
        key = self._short_key(func, args, kwargs)
        if key is None:
            return super()._cached_dispatch_impl(func, types, args, kwargs)
        remembered: dict[Any, Any] = FakeTensorMode.cache
        entry = remembered.get(key)
        if entry is not None:
            results = [self._result(info, args) for info in entry.output_infos]
            return tuple(results) if entry.is_output_tuple else results[0]
        try:
            long_key = self._cache_key(_CacheKeyState(self.shape_env), func, args, kwargs)
        except fake_tensors._BypassDispatchCache:
            long_key = None
        result = super()._cached_dispatch_impl(func, types, args, kwargs)
        entry = None if long_key is None else remembered.get(long_key)
        if isinstance(entry, fake_tensors._DispatchCacheValidEntry):
            remembered[key] = entry
        return result

    def _result(self, info: Any, args: Sequence[Any]) -> object:
        """A result of a cached call, as PyTorch's ``_get_output_tensor_from_cache_entry`` makes it."""
        if info.inplace_idx is not None:
            return args[info.inplace_idx]
        known = info.metadata
        if known is None:
            return info.constant_value
        with in_kernel_invocation_manager(self):
            made = torch.empty_strided(
                known.shape,
                known.stride,
                dtype=known.dtype,
                device="meta",
                requires_grad=known.requires_grad,
            )
            if info.view_idx is not None:
                storage = args[info.view_idx].untyped_storage()
                made.set_(storage, known.storage_offset, known.shape, known.stride)
        if known.is_conj:
            torch._C._set_conj(made, True)
        if known.is_neg:
            torch._C._set_neg(made, True)
        return self.without_data(made, known.device)

    def _short_key(
        self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[object, ...] | None:
        """The key of a call: all facts that its result depends on; None where these are more than numbers."""
        if not isinstance(func, torch._ops.OpOverload):
            return None
        key: list[object] = [
            func,
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
            None if self.shape_env is None else self.shape_env.settings,
            torch._C._get_dispatch_mode(_PROXY) is None,
        ]
        if not self._describe(key, args):
            return None
        if kwargs:
            key.extend(kwargs)
            if not self._describe(key, kwargs.values()):
                return None
        return tuple(key)

    def _describe(self, key: list[object], values: Iterable[Any]) -> bool:
        """Add the facts of an argument to a key; returns whether they are plain numbers."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                facts = facts_of(value) if value.fake_mode is self else None
                if facts is None:
                    return False
                key += facts
            elif kind in _PLAIN:
                key += (kind, value)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._describe(key, value):
                    return False
            else:
                return False
        return True
