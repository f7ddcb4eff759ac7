"""A kernel without data that returns one tensor where the real one returns two.

oneDNN's backward of a recurrent layer returns the gradients of its two biases as two tensors, each with
memory of its own; ``mkldnn_rnn_layer_backward`` in ``torch/_meta_registrations.py`` returns one of them
twice. A graph traced with that hands out one gradient for both parameters, and counts half of the memory. No
other of these functions returns a tensor twice.
"""

from typing import Any

import torch
from torch._meta_registrations import mkldnn_rnn_layer_backward
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

from planner._torch.patches import replace_entries

_RNN_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_SECOND_BIAS = 4
"""Position among the results of the gradient of the second bias."""


def tell_results_apart() -> None:
    """Let the kernels without data of this process return as many tensors as the real ones do."""
    replace_entries("operators without data", op_implementations_dict, {_RNN_BACKWARD: _rnn_backward})


def _rnn_backward(mode: FakeTensorMode, _func: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    with mode:
        results = mkldnn_rnn_layer_backward(*args, **kwargs)
        second_bias = torch.empty_like(results[_SECOND_BIAS])
    return (*results[:_SECOND_BIAS], second_bias, *results[_SECOND_BIAS + 1 :])
