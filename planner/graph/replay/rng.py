"""Random operations are run again from the generator state that they first saw.

Eager draws once; a second draw would give other numbers, and leave the generator elsewhere. So the first run
leaves the state, the second runs from it, and the generator is put back. Operations from outside PyTorch,
which may draw numbers without saying so, are run again in this way too. Emitted graphs call these functions.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

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
    states = [generator.get_state() for generator in _generators(devices, device_index)]
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
def _in_state(generator: torch.Generator, state: torch.Tensor) -> Iterator[None]:
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


def generator_state_bytes(devices: str) -> int:
    """Bytes of a saved generator state on the CPU; none elsewhere, as it is on the host."""
    return int(torch.default_generator.get_state().nbytes) if devices == "cpu" else 0


def state_bytes(devices: str) -> int:
    """Bytes of what :func:`generator_state` returns; CUDA's generators save a seed and an offset."""
    return sum(16 if kind == "cuda" else generator_state_bytes("cpu") for kind in devices.split("+"))


def generator_device(node: Node) -> tuple[str, int | None]:
    """The device whose generator a random operation draws from, and its index.

    An operation from outside PyTorch on another device may draw a seed on the CPU as well: "cuda+cpu".
    """
    for candidate in (node, *node.all_input_nodes):
        value = candidate.meta.get("val")
        tensors = value if isinstance(value, list | tuple) else [value]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                return _on_device(node.target, tensor.device)
    return "cpu", None


def _on_device(operator: Any, device: torch.device) -> tuple[str, int | None]:
    both = device.type != "cpu" and operators.is_foreign(operator)
    return f"{device.type}+cpu" if both else device.type, device.index


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
