"""Running an operation a second time so that nobody can tell.

A random operation is re-run from the generator state that it first saw, and the generator is put
back afterwards. A batch normalisation is re-run without its running statistics, which the first
run has updated already. The emitted graphs call these functions.
"""

from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten


def generator_state(device_type: str, device_index: int | None) -> torch.Tensor:
    """The state of a device's default generator, a byte tensor on the CPU."""
    return _generator(device_type, device_index).get_state()


def run_from_state(
    state: torch.Tensor, device_type: str, device_index: int | None, operator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run ``operator`` as if the generator were in ``state``; the generator itself does not move."""
    generator = _generator(device_type, device_index)
    present = generator.get_state()
    generator.set_state(state)
    try:
        return operator(*args, **kwargs)
    finally:
        generator.set_state(present)


def generator_state_bytes(device_type: str) -> int:
    """Host bytes of a saved generator state."""
    return int(_generator("cpu", None).get_state().nbytes) if device_type == "cpu" else 16


def generator_device(node: Node) -> tuple[str, int | None]:
    """The device whose generator a random operation draws from."""
    for candidate in (node, *node.all_input_nodes):
        value = candidate.meta.get("val")
        tensors = value if isinstance(value, list | tuple) else [value]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                return tensor.device.type, tensor.device.index
    return "cpu", None


def batch_norm_again(arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Operator and arguments that give the first three outputs of
    ``_native_batch_norm_legit_functional(input, weight, bias, mean, var, training, momentum, eps)``
    in training, bit for bit, without running statistics."""
    input_, weight, bias, _mean, _var, _training, momentum, epsilon = arguments
    operator = aten._native_batch_norm_legit.no_stats
    return operator, (input_, weight, bias, True, momentum, epsilon)


def with_reserve(operator: Any, *args: Any) -> Any:
    """Run oneDNN's recurrent layer so that it keeps what its backward needs.

    The kernel makes its reserve only where autograd is on, whatever its ``train`` argument says,
    and the emitted graphs run without autograd.
    """
    detached = (a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    with torch.enable_grad():
        return operator(*(list(map(torch.Tensor.detach, a)) if isinstance(a, list) else a for a in detached))


def needs_reserve(operator: Any) -> bool:
    """Whether an operation must run :func:`with_reserve`."""
    return operator is aten.mkldnn_rnn_layer.default


def _generator(device_type: str, device_index: int | None) -> torch.Generator:
    if device_type == "cuda":
        index = torch.cuda.current_device() if device_index is None else device_index
        torch.cuda.init()
        return torch.cuda.default_generators[index]
    return torch.default_generator
