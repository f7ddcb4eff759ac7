"""Parts that run as written, between graphs: recurrent layers on a GPU, TorchScript.

Eager runs nn.LSTM, nn.GRU and nn.RNN by cuDNN on a GPU. Which operators that takes is decided by the memory
that the weights share, by cuDNN's handle and by its one state of dropout, none of which tensors without data
have. Nor could such a layer run again: dropout between its layers draws from that state.

Where Dynamo comes to a part that is TorchScript it gives up the function, and all others that this one
calls. A break at the call of the part leaves the rest to be captured.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

from planner._torch.patches import replace

REASON = "cuDNN's recurrent layers run as written; they are not run again, and keep what was recorded"
KIND = "a recurrent layer on a GPU"
"""What a plan's notes say of where a graph ends."""
_OF_SCRIPTS = "TorchScript runs as written: it is not run again, and keeps what was recorded"


@functools.cache
def break_at_recurrent_layers(is_ours: Callable[[Any], bool]) -> None:
    """End a graph where a recurrent layer is called whose weights are on a GPU; the call runs as written.

    Args:
        is_ours: Whether an instruction translator of Dynamo's traces for a planned module.
    """
    call = UnspecializedNNModuleVariable.call_function

    def unless_recurrent(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if runs_on_gpu(self.value) and is_ours(tx):
            unimplemented(gb_type=KIND, context=type(self.value).__name__, explanation=REASON, hints=[])
        return call(self, tx, *args, **kwargs)

    replace(UnspecializedNNModuleVariable, "call_function", unless_recurrent)


def runs_on_gpu(module: torch.nn.Module) -> bool:
    """Whether a module is a recurrent layer whose weights are on a GPU."""
    return isinstance(module, torch.nn.RNNBase) and any(w.is_cuda for w in module.parameters())
