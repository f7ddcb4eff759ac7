"""Planning inside the ``Trainer`` of Lightning.

from planner.integrations.lightning import PlannerCallback

trainer = lightning.Trainer(callbacks=[PlannerCallback(budget="8GiB")])
trainer.fit(module, data)
"""

import os
from typing import Unpack

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from planner.errors import PlannerError
from planner.lazy.auto_checkpoint import auto_checkpoint
from planner.planning.options import PlanKeywords, shows_options
from planner.runtime.install import remove
from planner.runtime.shape_policy import OnNewShape


class PlannerCallback(Callback):  # type: ignore[misc]
    """Plans the model that ``training_step`` calls, at its first training call.

    That is ``model`` or ``net`` of the ``LightningModule``, or the submodule of the name that is given. A
    loss that ``training_step`` computes outside of it is not counted unless ``loss=`` says how it is
    computed. Gradients that are there already count where ``accumulate_grad_batches`` is more than 1. After
    training the plan is taken out.
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
        """Take down what to plan with.

        Args:
            budget, on_new_shape, cache: See :func:`planner.auto_checkpoint`.
            model: The name of the submodule that ``training_step`` calls, as in ``"net.backbone"``; None for
                ``model``, ``net``, or the only submodule that has parameters.
            **options: See :class:`planner.planning.options.PlanOptions`.
        """
        self._budget, self._name, self._on_new_shape, self._cache = budget, model, on_new_shape, cache
        self._options = options
        self._planned: torch.nn.Module | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the model planned at its first training call."""
        self._planned = self._model_of(pl_module)
        options = self._options.copy()
        options.setdefault("accumulate", True if trainer.accumulate_grad_batches > 1 else None)
        optimizers = [getattr(o, "optimizer", o) for o in trainer.optimizers]
        options.setdefault("optimizer", optimizers[0] if len(optimizers) == 1 else None)
        auto_checkpoint(
            self._planned, budget=self._budget, on_new_shape=self._on_new_shape, cache=self._cache, **options
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the plan out."""
        if self._planned is not None:
            remove(self._planned)
            self._planned = None

    def _model_of(self, module: torch.nn.Module) -> torch.nn.Module:
        named: dict[str, torch.nn.Module] = dict(module.named_children())
        children = {name: child for name, child in named.items() if any(True for _ in child.parameters())}
        if self._name is not None:
            parts: dict[str, torch.nn.Module] = dict(module.named_modules())
            found = parts.get(self._name)
            if found is None:
                raise PlannerError(
                    f"model={self._name!r}: {type(module).__name__} has no submodule of that name; its "
                    f"children are {', '.join(dict(module.named_children()))}"
                )
            return found
        for name in ("model", "net"):
            if name in children:
                return children[name]
        if len(children) == 1:
            return next(iter(children.values()))
        raise PlannerError(
            f"which part of {type(module).__name__} training_step calls is not clear: write "
            f"PlannerCallback(model=...) with one of {', '.join(children) or 'its submodules'}"
        )
