"""The memory that an optimizer keeps between steps, and the memory and time of its step."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner._torch import fake as fake_
from planner._torch import pytree
from planner._torch.tensors import held_tensors
from planner._torch.tracing.hindrances import no_other_thread_traces
from planner.addresses import identity
from planner.allocator.training_loop import Allocations
from planner.costs.devices import Device, round_bytes
from planner.costs.eager_timeline import eager_timeline
from planner.costs.roofline import Costs
from planner.costs.workspace import WorkspaceMeter
from planner.errors import PlannerError
from planner.training_step.recorder import Recording, StepRecorder
from planner.training_step.step import tensors_in, unique_storages

Optimizer = torch.optim.Optimizer | type[torch.optim.Optimizer] | str


class OptimizerError(PlannerError, ValueError):
    """The value of ``optimizer=`` is no optimizer, or cannot be run on tensors without data."""


@dataclass(frozen=True)
class OptimizerStep:
    """The memory and time of an optimizer's step.

    Attributes:
        state_bytes: Bytes that it keeps between steps: moments, momentum, master weights.
        transient_bytes: The most that its step holds beyond parameters, gradients and state.
        seconds: Predicted time of one step.
        making: Allocations of its first step, the state among them; None where there is no optimizer.
        steady: Allocations of later steps.
    """

    state_bytes: int = 0
    transient_bytes: int = 0
    seconds: float = 0.0
    making: Allocations | None = None
    steady: Allocations | None = None


OF_ANOTHER_MODEL = (
    "optimizer= holds none of the model's parameters, and others of other shapes: the state that it keeps "
    "for those is counted. Pass the optimizer of this model, its class or its name"
)


def is_of_another_model(optimizer: Optimizer | None, own: Sequence[torch.Tensor]) -> bool:
    """Whether an optimizer was made for another model than that of these parameters or a copy of it."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if {*map(identity, held)} & {*map(identity, own)}:
        return False
    return bool(Counter(tuple(p.shape) for p in held) - Counter(tuple(p.shape) for p in own))


@no_other_thread_traces()
def optimizer_step(
    optimizer: Optimizer | None,
    parameters: Sequence[torch.Tensor],
    device: Device,
    meter: WorkspaceMeter | None = None,
    costs: Costs | None = None,
    shape_of: Callable[[torch.Tensor], tuple[int, ...]] | None = None,
) -> OptimizerStep:
    """Memory and time of an optimizer's step on a device.

    A fresh optimizer of the same class and settings takes two steps on tensors without data, under a
    recorder: the first makes its state, the second is like all that follow. The user's own is only read. Of a
    wrapper that passes everything on, as Accelerate's, the optimizer inside counts. If
    neither ``foreach`` nor ``fused`` is set, PyTorch's default on the device counts: on a GPU it updates
    whole lists of parameters at once, and the intermediate results of all are alive together.

    Args:
        optimizer: An instance, a class, or the name of one in ``torch.optim`` ("AdamW").
        parameters: The parameters of the module that it trains.
        device: Where the step will run.
        meter: Measures the workspace of kernels; None counts none.
        costs: Seconds of operations; None for the device's roofline.
        shape_of: The shape of a parameter's shard on one rank; None if parameters are whole.

    Raises:
        OptimizerError: There is no such optimizer, its step fails, or it steps others.
    """
    if instance := isinstance(optimizer, torch.optim.Optimizer):
        optimizer = _innermost(optimizer)
    trained = any(p.requires_grad for p in parameters)
    if optimizer is None or not (instance or trained):  # PyTorch refuses an optimizer of no parameters
        return OptimizerStep()
    mode = fake_.fake_mode()
    fakes: dict[int, torch.Tensor] = {}

    def fake(parameter: torch.Tensor) -> torch.Tensor:
        if id(parameter) not in fakes:
            options: Any = {"dtype": parameter.dtype, "device": device.kind}
            with mode:
                if shape_of is None:
                    [local] = held_tensors(parameter)
                    made = torch.empty_strided(local.shape, local.stride(), **options)
                else:
                    made = torch.empty(shape_of(parameter), **options)
                copy = torch.nn.Parameter(made)
                copy.grad = torch.empty_like(copy)
            fakes[id(parameter)] = copy
        return fakes[id(parameter)]

    kind = optimizer_class(optimizer)
    try:
        if isinstance(optimizer, torch.optim.Optimizer):
            fresh = _like(optimizer, fake)
        else:
            settings: dict[str, Any] = {} if kind is not torch.optim.SGD else {"lr": 1e-3}
            fresh = kind([fake(p) for p in parameters if p.requires_grad], **settings)
        resident = [*fakes.values(), *(f.grad for f in fakes.values() if f.grad is not None)]
        if device.kind == "cuda":
            _as_on_cuda(fresh)
        first = _recorded_step(fresh, mode, resident)
        state = _state_on(fresh, device.kind, {fake_.storage_key(t) for t in resident})
        second = _recorded_step(fresh, mode, [*resident, *state])
    except Exception as error:
        raise OptimizerError(
            f"{kind.__name__} cannot take a step on tensors without data ({type(error).__name__}: {error})"
            + ("" if instance else "; pass an instance with the settings that you train with")
            + ". With optimizer=None, also in a trainer's callback, the plan does not count it"
        ) from error
    finally:
        for copy in fakes.values():
            copy.grad = None
    making, steady = (eager_timeline(r, device, meter, costs, device.kind) for r in (first, second))
    return OptimizerStep(
        state_bytes=sum(round_bytes(device, int(t.untyped_storage().nbytes())) for t in state),
        transient_bytes=max(making.peak_bytes - making.final_bytes, steady.peak_bytes, 0),
        seconds=steady.seconds,
        making=making.allocations,
        steady=steady.allocations,
    )


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside of wrappers whose parameters and state are properties: those of what is inside.

    Raises:
        OptimizerError: It steps others: planning would step these, which are the user's.
    """
    others = [x for x in pytree.tree_leaves(_attributes(optimizer)) if isinstance(x, torch.optim.Optimizer)]
    if not others:
        return optimizer
    if len(others) > 1 or not isinstance(getattr(type(optimizer), "param_groups", None), property):
        raise OptimizerError(
            f"{type(optimizer).__name__} holds {type(others[0]).__name__}, which its step may run: planning "
            "must not. Pass the optimizer inside of it, or optimizer=None, and the plan does not count it"
        )
    return _innermost(others[0])


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer has of its own beside its parameters and their state, in new containers."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _NOT_TAKEN}
    copied: dict[str, Any] = pytree.tree_map(lambda x: set(x) if type(x) is set else x, own)
    return copied


def _like(
    optimizer: torch.optim.Optimizer, fake: Callable[[torch.Tensor], torch.Tensor]
) -> torch.optim.Optimizer:
    """An optimizer with the same settings, none of the state and hooks, and other parameters."""
    fresh: torch.optim.Optimizer = object.__new__(type(optimizer))
    own = _attributes(optimizer)
    hooks: dict[str, Any] = {name: OrderedDict() for name, value in own.items() if name.endswith("_hooks")}
    vars(fresh).update({**own, **hooks})
    fresh.state = defaultdict(dict)
    fresh.param_groups = [
        {**group, "params": [fake(p) for p in group["params"] if p.requires_grad]}
        for group in optimizer.param_groups
    ]
    return fresh


# A scheduler puts a `step` that counts calls into the instance.
_NOT_TAKEN = ("state", "param_groups", "step")


class _OptimizerRecorder(StepRecorder):
    """Answers 1 to optimizers that read a number, as a norm: they allocate the same with any."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except fake_.DataDependentError:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 1.0 if args[0].is_floating_point() else 1


def _as_on_cuda(optimizer: torch.optim.Optimizer) -> None:
    """Set ``foreach``, PyTorch's default for parameters on CUDA, which it does not take for fake tensors."""
    for group in optimizer.param_groups:
        chosen = group.get("foreach") is not None or group.get("fused") or group.get("differentiable")
        if "foreach" in group and not chosen:
            group["foreach"] = True


def _recorded_step(
    optimizer: torch.optim.Optimizer, mode: Any, resident: Iterable[torch.Tensor]
) -> Recording:
    recorder = _OptimizerRecorder(mode, list(resident))
    with mode, recorder:
        optimizer.step()
    return recorder.recording


def _state_on(optimizer: torch.optim.Optimizer, kind: str, known: set[int]) -> list[torch.Tensor]:
    """The tensors of an optimizer's state on a kind of device; step counters may be on the CPU."""
    state = unique_storages(tensors_in([list(s.values()) for s in optimizer.state.values()]))
    return [t for t in state if t.device.type == kind and fake_.storage_key(t) not in known]


def optimizer_class(optimizer: Any) -> type[torch.optim.Optimizer]:
    """The class of an optimizer that is given as an instance, a class or a name.

    Raises:
        OptimizerError: It is none of these.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer)
    if isinstance(optimizer, str):
        found = next((v for k, v in vars(torch.optim).items() if k.lower() == optimizer.lower()), None)
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
            return found
        raise OptimizerError(
            f"optimizer {optimizer!r} is not in torch.optim; expected a name such as 'AdamW'"
        )
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return optimizer
    raise OptimizerError(
        f"optimizer= takes a torch.optim.Optimizer, its class or its name, not {type(optimizer).__name__}"
    )
