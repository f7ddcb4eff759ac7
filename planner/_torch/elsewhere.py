"""Tensors without data on a GPU, where PyTorch was built without GPUs.

Methods of tensors (``x[0]``, ``~x``, ``x.copy_(y)``) make the GPU of ``x`` current while they run, which such
a PyTorch cannot. They ask on which device ``x`` is by an operator, and are told of the meta device. What they
are then to make there is made on the GPU. Seen to work with torch 2.13.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

DEVICE = torch.device("cuda", 0)
"""The GPU of these tensors."""

IS_CUDA = property(lambda tensor: tensor.device.type == "cuda")
"""``FakeTensor.is_cuda`` of these and of all others: PyTorch's own would ask that operator."""

_META = torch.device("meta")


class ModeElsewhere(FakeTensorMode):
    """A mode of such tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return self.told(args[0])
        if kwargs and kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": DEVICE}
        return super().__torch_dispatch__(func, types, args, kwargs)

    def told(self, tensor: Any) -> torch.device:
        """The device that methods of a tensor are told of."""
        device: torch.device = tensor.fake_device
        return _META if device.type == "cuda" else device


def named_anew(graph: torch.fx.Graph) -> None:
    """Put the GPU in the place of the meta device in a graph that was traced from such tensors."""
    for node in graph.nodes:
        if node.target is torch.ops.prims.device_put.default and node.args[1] == _META:
            node.replace_all_uses_with(node.args[0])  # it is there
            graph.erase_node(node)
        elif node.kwargs.get("device") == _META:
            node.kwargs = {**node.kwargs, "device": DEVICE}
