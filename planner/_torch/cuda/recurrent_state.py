"""Private PyTorch APIs: the state that cuDNN draws dropout between recurrent layers from, and their weights.

PyTorch has one for each device and process, which it makes, with a number of the device's generator, in the
first step that drops anything. ``torch.manual_seed`` does not change it, and every step does. It is given to
cuDNN's operator, where it is found here. The weights of a layer lie in one piece of memory, so that cuDNN
takes them without copying. Tested with torch 2.13.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner._torch.fake import is_fake

aten = torch.ops.aten

_DROPOUT_STATE = 15
"""Which argument of cuDNN's operator the state is."""

_states: dict[torch.device, torch.Tensor] = {}


def dropout_states() -> list[torch.Tensor]:
    """The states that were found so far."""
    return list(_states.values())


def find_dropout_states(module: torch.nn.Module) -> None:
    """Find the states that a module's recurrent layers draw from, and make those that are not there yet."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.RNNBase) and layer.dropout > 0 and layer.num_layers > 1:
            for device in _devices(layer):
                if device not in _states and (found := _state_on(device)) is not None:
                    _states[device] = found


def flatten_like(copies: Iterable[torch.nn.Module], originals: Iterable[torch.nn.Module]) -> None:
    """Let the weights of copied recurrent layers lie in one piece where those of the originals do."""
    for copy, original in zip(copies, originals, strict=False):
        if copy is not original and isinstance(copy, torch.nn.RNNBase) and _in_one_piece(original):
            copy.flatten_parameters()


def _in_one_piece(layer: torch.nn.Module) -> bool:
    storages = {weight.untyped_storage().data_ptr() for weight in layer.parameters() if weight.is_cuda}
    return len(storages) == 1


def _devices(layer: torch.nn.Module) -> set[torch.device]:
    return {weight.device for weight in layer.parameters() if weight.is_cuda and not is_fake(weight)}


class _FoundError(Exception):
    """The operator was reached; it need not run."""


class _Find(TorchDispatchMode):
    """Takes the state from among the arguments of cuDNN's operator."""

    state: torch.Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._cudnn_rnn.default:
            self.state = args[_DROPOUT_STATE] if len(args) > _DROPOUT_STATE else None
            raise _FoundError
        return func(*args, **(kwargs or {}))


def _state_on(device: torch.device) -> torch.Tensor | None:
    """The state of a device; None where its recurrent layers are not cuDNN's."""
    given = torch.zeros(1, 1, 1, device=device)
    if not torch.backends.cudnn.is_acceptable(given):
        return None
    hidden, weights = torch.zeros(2, 1, 1, device=device), [given.new_zeros(4, 1), given.new_zeros(4, 1)]
    generator, find = torch.cuda.get_rng_state(device), _Find()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings(), torch.no_grad(), find:
            warnings.simplefilter("ignore")  # that these weights do not lie in one piece
            torch.lstm(given, (hidden, hidden), weights * 2, False, 2, 0.5, True, False, False)
    except _FoundError:
        return find.state
    finally:
        torch.cuda.set_rng_state(generator, device)
    return None
