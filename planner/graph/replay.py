"""Running an operation a second time so that nobody can tell.

A random operation is re-run from the generator state that it first saw, and the generator is put
back afterwards; so is an operation from outside PyTorch, which may draw numbers without saying so.
Inputs are read through aliases, or copies, that the forward takes.
A batch normalisation is re-run without its running statistics, which the first run has updated
already. The emitted graphs call these functions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from planner._torch import operators

aten = torch.ops.aten


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and version under another tensor: it stays with it where the first is given other."""
    return tensor.detach()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies in memory as the tensor does, dense or not."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.clone()
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def generator_state(devices: str, device_index: int | None) -> torch.Tensor:
    """The state of the default generators of :func:`generator_device`, a byte tensor on the CPU."""
    states = [generator.get_state() for generator in _generators(devices, device_index)]
    return states[0] if len(states) == 1 else torch.cat(states)


def run_from_state(
    state: torch.Tensor, devices: str, device_index: int | None, operator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run ``operator`` as if the generators were in ``state``; the generators themselves do not move."""
    generators = _generators(devices, device_index)
    present = [generator.get_state() for generator in generators]
    _set_states(generators, state.split([len(s) for s in present]))
    try:
        return operator(*args, **kwargs)
    finally:
        _set_states(generators, present)


def generator_state_bytes(devices: str) -> int:
    """Bytes of a saved generator state on the CPU; elsewhere a token figure, as it is on the host."""
    return int(torch.default_generator.get_state().nbytes) if devices == "cpu" else 16


def generator_device(node: Node) -> tuple[str, int | None]:
    """The device whose generator a random operation draws from, and its index.

    An operation from outside PyTorch on another device may draw a seed on the CPU as well: "cuda+cpu".
    """
    for candidate in (node, *node.all_input_nodes):
        value = candidate.meta.get("val")
        tensors = value if isinstance(value, list | tuple) else [value]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                kind = tensor.device.type
                both = kind != "cpu" and operators.is_foreign(node.target)
                return f"{kind}+cpu" if both else kind, tensor.device.index
    return "cpu", None


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


def _generators(devices: str, device_index: int | None) -> list[torch.Generator]:
    found = []
    for kind in devices.split("+"):
        if kind == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device_index is None else device_index
            found.append(torch.cuda.default_generators[index])
        else:
            found.append(torch.default_generator)
    return found


def _set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
