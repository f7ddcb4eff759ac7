"""Random operations are run again from the generator state that they first saw.

Eager draws once; a second draw would give other numbers, and leave the generator elsewhere. So the first run
leaves the state, the second runs from it, and the generator is put back. Operations from outside PyTorch,
which may draw numbers without saying so, from Python's and numpy's generators too, are run again in this way.
Emitted graphs call these functions.
"""

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.fx.node import map_arg

from planner._torch import operators
from planner._torch.tensors import call_tensors
from planner.graph.in_place import OnCopy, operator_in_place
from planner.graph.replay_rule import ReplayRule, ReplayState, Take


class RandomNumbers(ReplayRule):
    """Operations that draw random numbers, or may."""

    def matches(self, node: Node) -> bool:
        return operators.may_draw(node.target)

    def state(self, node: Node) -> ReplayState:
        size = generator_state_bytes(generator_device(node)[0])
        return ReplayState("generator", size, held_bytes=size, on_host=True)

    def save_state(self, graph: FxGraph, node: Node) -> Node:
        return graph.call_function(generator_state, generator_device(node))

    def emit_again(self, graph: FxGraph, node: Node, take: Take, state: Node | None) -> Node:
        device, in_place = generator_device(node), operator_in_place(node)
        target: Any = node.target if in_place is None else OnCopy(in_place)
        args, kwargs = map_arg(node.args, take), map_arg(node.kwargs, take)
        return graph.call_function(run_from_state, (state, *device, target, *args), kwargs)


RULES = (RandomNumbers(),)


def generator_state(devices: str, device_index: int | None) -> torch.Tensor:
    """The state of the default generators of :func:`generator_device`, a byte tensor on the CPU."""
    states: list[torch.Tensor] = [one.get_state() for one in _generators(devices, device_index)]
    return states[0] if len(states) == 1 else torch.cat(states)


def state_before(operator: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, str, int | None]:
    """The state of the generators that a call draws from, and their :func:`generator_device`.

    A call that makes a tensor of sizes alone is told the device (``torch.rand(3, device="cuda")``).
    """
    device = (kwargs or {}).get("device")
    if device is None:
        device = next((operand.device for operand in call_tensors((args, kwargs))), torch.device("cpu"))
    drawn = _on_device(operator, device)
    return generator_state(*drawn), *drawn


def run_from_state(
    state: torch.Tensor, devices: str, device_index: int | None, operator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run ``operator`` as if the generators were in ``state``; the generators themselves do not move."""
    generators = _generators(devices, device_index)
    several = len(generators) > 1
    states = state.split([len(g.get_state()) for g in generators]) if several else [state]
    with contextlib.ExitStack() as put_back:
        for generator, saved in zip(generators, states, strict=True):
            put_back.enter_context(_in_state(generator, saved))
        return operator(*args, **kwargs)


@contextlib.contextmanager
def _in_state(generator: Any, state: torch.Tensor) -> Iterator[None]:
    """Let a generator draw from a state for a while.

    A GPU's generator draws by another generator's state: setting its own state would also have cuDNN's
    recurrent layers make their state of dropout anew in the next step, which eager does not.
    """
    present: Any
    put: Callable[[Any], Any]
    if generator.device.type == "cpu":
        present, put = generator.get_state(), generator.set_state
        put(state)
    else:
        present, put = generator.graphsafe_get_state(), generator.graphsafe_set_state
        other = torch.Generator(generator.device)
        other.set_state(state)
        put(other)
    try:
        yield
    finally:
        put(present)


class _OfPython:
    """The generators of Python and numpy as one of PyTorch's."""

    device = torch.device("cpu")
    BYTES = 8192
    """Of a state, filled with zeros: those of both generators take up to 7.2 KiB."""

    def get_state(self) -> torch.Tensor:
        states = random.getstate(), np.random.get_state(legacy=False)
        content = bytearray(pickle.dumps(states).ljust(self.BYTES, b"\0"))
        return torch.frombuffer(content, dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        of_python, of_numpy = pickle.loads(state.numpy().tobytes())
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def generator_state_bytes(devices: str) -> int:
    """Bytes of a saved generator state on the CPU; none elsewhere, as it is on the host."""
    return state_bytes(devices) if devices.startswith("cpu") else 0


def state_bytes(devices: str) -> int:
    """Bytes of what :func:`generator_state` returns; CUDA's generators save a seed and an offset."""
    sizes = {"cuda": 16, "python": _OfPython.BYTES}
    of_torch = int(torch.default_generator.get_state().nbytes)
    return sum(sizes.get(kind, of_torch) for kind in devices.split("+"))


def generator_device(node: Node) -> tuple[str, int | None]:
    """The device whose generator a random operation draws from, and its index.

    An operation from outside PyTorch may draw from Python's and numpy's as well, and on another device from
    the CPU's: "cpu+python", "cuda+cpu+python".
    """
    for candidate in (node, *node.all_input_nodes):
        value = candidate.meta.get("val")
        tensors = value if isinstance(value, list | tuple) else [value]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                return _on_device(node.target, tensor.device)
    return "cpu", None


def _on_device(operator: Any, device: torch.device) -> tuple[str, int | None]:
    kind = device.type
    if operators.is_foreign(operator):
        kind = "cpu+python" if kind == "cpu" else f"{kind}+cpu+python"
    return kind, device.index


def _generators(devices: str, device_index: int | None) -> list[Any]:
    found = list[Any]()
    for kind in devices.split("+"):
        if kind == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device_index is None else device_index
            found.append(torch.cuda.default_generators[index])
        else:
            found.append(_OfPython() if kind == "python" else torch.default_generator)
    return found
