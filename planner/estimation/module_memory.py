"""The memory of an unplanned step, module by module."""

import numpy as np
import torch

from planner.costs.devices import round_bytes
from planner.estimation.table import ModuleMemory
from planner.planning.prepared import Prepared
from solvers.model.arrays import ValueIds
from solvers.model.indices import BaseOp, ValueId, listed
from solvers.model.schedule import alive_at, lifetimes, simulate


def module_memory(prepared: Prepared) -> list[ModuleMemory]:
    """The memory of every module of a step that recomputes nothing, the model itself first."""
    graph = prepared.problem.graph
    lives = lifetimes(graph, graph.base_schedule)
    held = (lives.start < graph.forward_length) & (lives.end >= graph.forward_length)
    at_peak = alive_at(graph, graph.base_schedule, simulate(graph, graph.base_schedule).peak_step)
    activations = _by_module(prepared, np.unique(lives.value[held]))
    peak = _by_module(prepared, at_peak)
    seen: set[int] = set()
    rows: list[ModuleMemory] = []
    own: dict[str, tuple[int, int]] = {}
    for path, module in prepared.model.named_modules():
        sizes = gradients = 0
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            size = round_bytes(prepared.device, tensor.numel() * tensor.element_size())
            sizes += size
            gradients += size if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad else 0
        own[path] = sizes, gradients
    for path, module in prepared.model.named_modules():
        inside = [name for name in own if not path or name == path or name.startswith(path + ".")]
        rows.append(
            ModuleMemory(
                module=path,
                class_name=type(module).__name__,
                parameter_bytes=sum(own[name][0] for name in inside),
                gradient_bytes=sum(own[name][1] for name in inside),
                activation_bytes=_within(activations, path),
                peak_bytes=_within(peak, path),
            )
        )
    return rows


def _by_module(prepared: Prepared, values: ValueIds) -> dict[str, int]:
    graph = prepared.problem.graph
    producer = listed(BaseOp, graph.producer)
    sizes: dict[str, int] = {}
    for value in listed(ValueId, values):
        if not graph.values[value].on_demand:
            module = graph.ops[producer[value]].module
            sizes[module] = sizes.get(module, 0) + graph.values[value].bytes
    return sizes


def _within(sizes: dict[str, int], path: str) -> int:
    return sum(n for name, n in sizes.items() if not path or name == path or name.startswith(path + "."))
