"""Planning inside the ``Trainer`` of Lightning.

from planner.integrations.lightning import PlannerCallback

trainer = lightning.Trainer(callbacks=[PlannerCallback(budget="8GiB")])
trainer.fit(module, data)
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from planner.errors import PlannerError
from planner.lazy.auto_checkpoint import auto_checkpoint
from planner.lazy.step import PlannedStep, step
from planner.planning.options import PlanKeywords, shows_options
from planner.runtime.install import remove
from planner.runtime.shapes.policy import OnNewShape
from planner.training_step.step import map_tensors


class PlannerCallback(Callback):  # type: ignore[misc]
    """Plans ``training_step``, with the loss that it computes, at its first call.

    Calls of ``self.log`` inside it are made right after it. Gradients of earlier batches count where
    ``accumulate_grad_batches`` is more than 1. After training the plan is removed.

    Gradients are set to None before ``training_step`` instead of after it: so they are not in memory together
    with the values that the forward keeps. Your own ``optimizer_zero_grad`` or ``on_before_zero_grad`` may
    read gradients; then they stay until Lightning clears them.

    A ``training_step`` that returns None, which skips a batch, runs as it is.

    A ``training_step`` that calls ``manual_backward`` is not planned itself: name the submodule that it
    calls, as in ``model="net"``. A loss that is computed outside of the submodule counts only if ``loss=``
    says how it is computed.
    """

    @shows_options(PlanKeywords)
    def __init__(
        self,
        budget: int | str | None = None,
        *,
        model: str | None = None,
        on_new_shape: OnNewShape = "replan",
        cache: str | os.PathLike[str] | None = None,
        **options: Unpack[PlanKeywords],
    ) -> None:
        """Store the options to plan with.

        Args:
            budget, on_new_shape, cache: See :func:`planner.auto_checkpoint`.
            model: The name of a submodule that is planned instead of ``training_step``, as in
                ``"net.backbone"``.
            **options: See :class:`planner.planning.options.PlanOptions`.
        """
        self._budget, self._name, self._on_new_shape, self._cache = budget, model, on_new_shape, cache
        self._options = options
        self._planned: torch.nn.Module | None = None
        self.step: PlannedStep | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have ``training_step``, or the submodule, planned at its first training call."""
        options = self._options.copy()
        options.setdefault("accumulate", True if trainer.accumulate_grad_batches > 1 else None)
        optimizers = [getattr(o, "optimizer", o) for o in trainer.optimizers]
        options.setdefault("optimizer", optimizers[0] if len(optimizers) == 1 else None)
        given: dict[str, Any] = {
            "budget": self._budget, "on_new_shape": self._on_new_shape, "cache": self._cache, **options,
        }  # fmt: skip
        if self._name is not None:
            self._planned = _submodule(pl_module, self._name)
            auto_checkpoint(self._planned, **given)
            return
        if not pl_module.automatic_optimization:
            raise PlannerError(
                f"{type(pl_module).__name__} optimizes manually, inside of training_step: name the submodule "
                'to plan, as in PlannerCallback(model="net")'
            )
        own = pl_module.training_step
        self.step = step(functools.update_wrapper(_Step(pl_module), own), **given)
        pl_module.log, pl_module.log_dict = _Later(pl_module.log), _Later(pl_module.log_dict)
        pl_module.training_step = functools.update_wrapper(_Call(self.step, trainer, pl_module), own)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the plan."""
        self._take_out(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the plan."""
        self._take_out(pl_module)

    def _take_out(self, pl_module: LightningModule) -> None:
        if self._planned is not None:
            remove(self._planned)
        if self.step is not None:
            for name in ("training_step", "log", "log_dict"):
                vars(pl_module).pop(name, None)
        self._planned = self.step = None


class _Step:
    """``training_step`` as a function of the module, which returns the loss beside the output."""

    def __init__(self, module: LightningModule) -> None:
        self._module, self._kind = module, type(module)

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        module.log.waiting, module.log_dict.waiting = [], []
        output = self._kind.training_step(module, *args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        return {"loss": loss, "output": output}

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Step":
        """Return the object itself, and give the copied module its trainer.

        Planning runs on a copy of the module, which leaves the trainer out.
        """
        copied = memo.get(id(self._module))
        if copied is not None:
            copied.trainer = self._module.trainer
        return self


class _Later:
    """A method of the module whose calls during the step are made after it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.waiting: list[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self.waiting is None:
            self._method(*args, **kwargs)
        else:
            # As they are now, as Lightning logs them: the step may go on to write to a buffer.
            self.waiting.append(map_tensors(lambda t: t.detach().clone(), (args, kwargs)))

    def __deepcopy__(self, _memo: Any) -> "_Later":
        return _Later(self._method)

    def now(self) -> None:
        """Make the calls."""
        waiting, self.waiting = self.waiting, None
        for args, kwargs in waiting or ():
            self._method(*args, **kwargs)


class _Call:
    """The function that ``trainer`` calls in place of ``training_step``."""

    def __init__(self, planned: PlannedStep, trainer: Trainer, module: LightningModule) -> None:
        self._planned, self._trainer, self._module = planned, trainer, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, trainer = self._module, self._trainer
        if _lets_go_of_gradients(trainer, module):
            for optimizer in trainer.optimizers:  # the trainer does so again, after the forward
                optimizer.zero_grad()
        try:
            output = self._planned(module, *args, **kwargs)["output"]
        finally:
            module.log.now()
            module.log_dict.now()
        return output

    def __deepcopy__(self, _memo: Any) -> "_Call":
        return self


def _lets_go_of_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Whether gradients can be cleared before the forward: nothing else reads them before the backward."""
    hooks = [
        (module.optimizer_zero_grad, LightningModule.optimizer_zero_grad),
        (module.on_before_zero_grad, LightningModule.on_before_zero_grad),
        *((callback.on_before_zero_grad, Callback.on_before_zero_grad) for callback in trainer.callbacks),
    ]
    return (
        trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
        # In an epoch without backward, as StochasticWeightAveraging adds one, the optimizer steps by the
        # last gradients.
        and not trainer.fit_loop._skip_backward
        and all(getattr(hook, "__func__", None) is original for hook, original in hooks)
    )


def _submodule(module: torch.nn.Module, name: str) -> torch.nn.Module:
    found: torch.nn.Module | None = dict(module.named_modules()).get(name)
    if found is None:
        raise PlannerError(
            f"model={name!r}: {type(module).__name__} has no submodule of that name; its "
            f"children are {', '.join(dict(module.named_children()))}"
        )
    return found
