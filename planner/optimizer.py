"""Bytes of state that an optimizer keeps between steps."""

from typing import Any

import torch

from planner import _torch
from planner.errors import PlannerError
from planner.step import tensors_in, unique_storages

Optimizer = torch.optim.Optimizer | type[torch.optim.Optimizer] | str


class OptimizerError(PlannerError, ValueError):
    """What was given as ``optimizer=`` is none, or cannot be run on tensors without data."""


def optimizer_state_bytes(optimizer: Optimizer | None, module: torch.nn.Module) -> int:
    """Bytes of the tensors in an optimizer's state after a step.

    The optimizer (a fresh one of the same class and settings) takes one step on tensors without
    data; the user's own is only read.

    Args:
        optimizer: An instance, a class, or the name of one in ``torch.optim`` ("AdamW").
        module: Whose parameters it trains.

    Raises:
        OptimizerError: If there is no such optimizer, or its step fails.
    """
    if optimizer is None:
        return 0
    mode = _torch.fake_mode()
    fakes: dict[int, torch.Tensor] = {}

    def fake(parameter: torch.Tensor) -> torch.Tensor:
        if id(parameter) not in fakes:
            copy = _torch.fake_like(parameter, mode)
            with mode:
                copy.grad = torch.empty_like(copy)
            fakes[id(parameter)] = copy
        return fakes[id(parameter)]

    if isinstance(optimizer, torch.optim.Optimizer):
        groups: list[dict[str, Any]] = [
            {**group, "params": [fake(p) for p in group["params"] if p.requires_grad]}
            for group in optimizer.param_groups
        ]
        kind: type[torch.optim.Optimizer] = type(optimizer)
        settings = dict(optimizer.defaults)
    else:
        kind = _optimizer_class(optimizer)
        groups = [{"params": [fake(p) for p in module.parameters() if p.requires_grad]}]
        settings = {} if kind is not torch.optim.SGD else {"lr": 1e-3}
    try:
        with mode:
            fresh = kind(groups, **settings)
            fresh.step()
    except Exception as error:
        raise OptimizerError(
            f"{kind.__name__} cannot take a step on tensors without data ({type(error).__name__}: {error}); "
            "pass an instance that is set up as you train with it"
        ) from error
    finally:
        for copy in fakes.values():
            copy.grad = None
    state = tensors_in([list(s.values()) for s in fresh.state.values()])
    own = {_torch.storage_key(f) for f in fakes.values()}
    return sum(
        int(t.untyped_storage().nbytes()) for t in unique_storages(state) if _torch.storage_key(t) not in own
    )


def _optimizer_class(optimizer: Any) -> type[torch.optim.Optimizer]:
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
