"""Notes and warnings on a captured step: on its graphs, and on where a planned step differs from eager."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from planner._torch.execution.checkpoints import checkpoint_calls
from planner._torch.tensors import hooks_after_accumulation
from planner.capture.external_accumulation import reordered_views, sums_between_graphs
from planner.capture.graphs.graph_runner import GraphRunner
from planner.hooks.autocast_cast_cache import SHARED_WEIGHT_WARNING
from planner.training_step.copies import StepCopy
from planner.training_step.recorder import Recording

_MANY_ALIKE = 3
_RECURRENT = (torch.nn.RNNBase, torch.nn.LSTMCell, torch.nn.GRUCell)
_OF_CPU = ("mkldnn", "_for_cpu", "_cpu_")
"""Parts of names of kernels that only the CPU has."""


def warn_of_other_gradients(
    recording: Recording,
    runners: Sequence[GraphRunner],
    with_gradients: Mapping[bool, Sequence[bool]],
    copied: StepCopy,
    warn: Callable[[str], None],
    regions: Sequence[str],
) -> None:
    """Warn where gradients differ from eager's.

    Three differences are looked for: gradients that pass between graphs in another order or layout;
    parameters that get none (``with_gradients`` says which get one without graphs, and with them); and hooks
    that free gradients in the backward, where no regions hand these out one by one.
    """
    parameters = list(copied.module.named_parameters())
    named = zip(parameters, with_gradients[False], with_gradients[True], strict=True)
    if missing := [name for (name, _), without_plan, with_plan in named if without_plan and not with_plan]:
        warn(
            f"{len(missing)} parameters get gradients without a plan that are None with it, the first is "
            f"{missing[0]}: a torch.autograd.Function returns None for what an earlier part of the forward "
            "made with such a function, which takes that for zeros. Let it return zeros, or keep both in one "
            "graph"
        )
    let_go = [
        name
        for (name, parameter), without_plan in zip(parameters, with_gradients[False], strict=True)
        if not without_plan and hooks_after_accumulation(parameter)
    ]
    if let_go and copied.hooks is not None and not regions:
        warn(
            f"hooks let go of the gradients of {len(let_go)} parameters in the backward, the first is "
            f"{let_go[0]}. The backward of a planned graph hands out its gradients together, when it ends: "
            "plan with regions='auto', or with the names of blocks, which hand theirs out block by block"
        )
    sums = len(sums_between_graphs(recording, runners)) + reordered_views(runners)
    relaid = sum(r.gradients.relaid(r.joint) for r in runners if r.joint is not None)
    if sums or relaid:
        warn(
            "gradients between graphs, of views, or of weights in use_reentrant=True checkpoints, "
            "are added up in another order, or have other strides, than without a plan "
            f"({sums + relaid}): they may differ in the last bits. Call planner.verify(), "
            "which tells"
        )
    if any(r.casts.again for r in runners):
        warn(SHARED_WEIGHT_WARNING)


def warn_of_cpu_kernels(
    recording: Recording,
    runners: Sequence[GraphRunner],
    module: torch.nn.Module,
    warn: Callable[[str], None],
) -> None:
    """Warn where a GPU would run another kernel than the planned one."""
    joints = [runner.joint for runner in runners if runner.joint is not None]
    calls = [*(c.func for c in recording.calls), *(op.node.target for j in joints for op in j.ops)]
    names = {name for name in map(str, calls) if any(part in name for part in _OF_CPU)}
    names |= {type(m).__name__ for m in module.modules() if isinstance(m, _RECURRENT)}
    if names:
        warn(
            f"a GPU has kernels of its own for {', '.join(sorted(names))}; the plan counts the memory of "
            "the CPU's. Plan such a step where the GPU is"
        )


def notes_on(runners: Sequence[GraphRunner], regions: bool) -> list[str]:
    """Notes on the captured graphs; ``regions``: whether some are regions."""
    notes = []
    if calls := sum(checkpoint_calls(runner.graph) for runner in runners):
        notes.append(
            f"{calls} calls of torch.utils.checkpoint in the model are captured like any code: "
            "what is recomputed is decided by the plan"
        )
    alike = Counter((r.structure, *map(_shape, r.example_inputs)) for r in runners)
    if regions and (most := max(alike.values(), default=0)) >= _MANY_ALIKE:
        notes.append(
            f"{most} regions are alike in operations and sizes and are captured one by one, since their code "
            "reads what differs between them, as a layer's own number with a cache of keys and values: "
            "planning and the first step take longer with every layer. For Hugging Face's models "
            "model.config.use_cache = False makes them one graph"
        )
    return notes


def _shape(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value.shape)) if isinstance(value, torch.Tensor) else ()  # sizes may be symbols
