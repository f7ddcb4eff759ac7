"""cuDNN's state of dropout between recurrent layers, and the memory of their weights.

PyTorch has one state for each device and process, which every step with dropout changes. It makes the state
from a number of the device's generator: in the first such step, and in the first one after a state or a seed
of that generator was set. So the numbers drawn after that depend on the generator's state alone; but that
step makes a state of some megabytes before it frees the last one. The weights of a layer lie in one piece of
memory, so that cuDNN takes them without copying.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner._torch.fake import is_fake
from planner.module_parts import parts_of

aten = torch.ops.aten


def make_dropout_states(module: torch.nn.Module) -> None:
    """Make the states that the next step of a module would make for its recurrent layers.

    The step then takes as much memory as later ones. Generators are drawn from as in the step.
    """
    layers = [m for m in parts_of(module) if isinstance(m, torch.nn.RNNBase) and m.training]
    dropping = [layer for layer in layers if layer.dropout > 0 and layer.num_layers > 1]
    for device in {device for layer in dropping for device in _devices(layer)}:
        _make_state(device)


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


class _ReachedError(Exception):
    """The operator was reached; it need not run."""


class _UpToOperator(TorchDispatchMode):
    """Runs what comes before cuDNN's operator, which has the state among its arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._cudnn_rnn.default:
            raise _ReachedError
        return func(*args, **(kwargs or {}))


def _make_state(device: torch.device) -> None:
    """Let PyTorch make the state of a device if its next step would; not where cuDNN runs no layers."""
    given = torch.zeros(1, 1, 1, device=device)
    if not torch.backends.cudnn.is_acceptable(given):
        return
    hidden, weights = torch.zeros(2, 1, 1, device=device), [given.new_zeros(4, 1), given.new_zeros(4, 1)]
    try:
        with warnings.catch_warnings(), torch.no_grad(), torch.autocast("cuda", enabled=False):
            warnings.simplefilter("ignore")  # that these weights do not lie in one piece
            with _UpToOperator():  # type: ignore[no-untyped-call]
                torch.lstm(given, (hidden, hidden), weights * 2, False, 2, 0.5, True, False, False)
    except _ReachedError:
        return
