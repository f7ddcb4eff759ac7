"""Recurrent layers on a GPU that is not here, where cuDNN keeps other tensors than the CPU's kernel.

cuDNN tells on the device how many bytes it keeps between forward and backward; it publishes no rule. In one
printed case (https://github.com/pytorch/pytorch/issues/2895; four layers of 320 units and 25,000 steps fit
the figures) these were five numbers for every unit, step and sequence of an LSTM's layer, six of a GRU's, and
one more between layers; the workspace was 1.5 times the weights.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from planner.module_parts import parts_of
from planner.planfile.budget import format_bytes

MOST_NUMBERS = 7
"""Kept for each unit of a layer, step and sequence: a GRU's six, and the one between layers."""


class RecurrentCalls:
    """Upper bounds of the bytes that cuDNN would take for the calls of a module's recurrent layers in a pass.

    Attributes:
        kept_bytes: Kept between forward and backward, by all calls together.
        workspace_bytes: Workspace of the largest call.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._layers = [layer for layer in parts_of(module) if isinstance(layer, torch.nn.RNNBase)]
        self.kept_bytes = self.workspace_bytes = 0

    @contextlib.contextmanager
    def added_up(self) -> Iterator[None]:
        """A context in which calls of the layers are added."""

        def note(layer: Any, args: Any, kwargs: Any) -> None:
            self.add(layer, args[0] if args else kwargs.get("input"))

        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                stack.callback(layer.register_forward_pre_hook(note, with_kwargs=True).remove)
            yield

    def add(self, layer: torch.nn.RNNBase, sequences: Any) -> None:
        """Add a call of a layer."""
        steps = sequences.data if isinstance(sequences, PackedSequence) else sequences
        if not isinstance(steps, torch.Tensor) or not steps.shape:
            return
        weights = list(layer.parameters())
        size = max([steps.element_size(), *(w.element_size() for w in weights)])
        units = layer.hidden_size * layer.num_layers * (2 if layer.bidirectional else 1)
        count = steps.numel() // max(steps.shape[-1], 1)
        self.kept_bytes += MOST_NUMBERS * units * count * size
        taken = 3 * sum(w.numel() for w in weights) * size // 2
        self.workspace_bytes = max(self.workspace_bytes, taken)

    def __str__(self) -> str:
        return (
            f"cuDNN would keep at most {format_bytes(self.kept_bytes)} between forward and backward, and "
            f"take {format_bytes(self.workspace_bytes)} inside, by what was measured of one version "
            f"({MOST_NUMBERS} numbers for each unit, step and sequence of a layer; 1.5 times the weights)"
        )
