"""Planning inside the ``Trainer`` of Hugging Face's transformers.

from planner.integrations.huggingface import PlannerCallback

trainer = Trainer(model, args, train_dataset=data, callbacks=[PlannerCallback(budget="8GiB")])
trainer.train()
"""

import os
from dataclasses import replace
from typing import Any, Unpack

import torch
from transformers import TrainerCallback

from planner.environment import tell
from planner.integrations.padding import Padded, checked_length
from planner.lazy.auto_checkpoint import wanted_lazily
from planner.lazy.first_call import install_lazily
from planner.planning.options import PlanKeywords, shows_options
from planner.runtime.install import remove
from planner.runtime.shape_policy import OnNewShape
from planner.training_step.step import find_loss


class PlannerCallback(TrainerCallback):
    """Plans the model at the trainer's first step, for what the trainer really passes to it.

    Outputs besides the loss are planned as dropped, as the trainer drops them. The optimizer counts, and
    gradients that are there already do where ``gradient_accumulation_steps`` is more than 1. Checkpointing
    that ``TrainingArguments`` switch on (``gradient_checkpointing=True``) is switched off: the plan goes in
    its place. After training the plan is removed.

    In TRL's trainers the loss is computed of what their models return for each token; that is planned for.

    A ``compute_loss`` of your own may differentiate something else of the output than its loss. Say what:
    ``loss=lambda output: output.logits.sum()``. Or plan what it does itself, without this callback, with
    :func:`planner.step` around a function ``(model, inputs)`` that ``compute_loss`` calls.
    """

    @shows_options(PlanKeywords)
    def __init__(
        self,
        budget: int | str | None = None,
        *,
        on_new_shape: OnNewShape = "replan",
        cache: str | os.PathLike[str] | None = None,
        max_length: int | None = None,
        **options: Unpack[PlanKeywords],
    ) -> None:
        """Store what to plan with.

        Args:
            budget, on_new_shape, cache: See :func:`planner.auto_checkpoint`.
            max_length: Tokens of the longest sequence that will come. The plan is made for a batch that is
                padded to it, and shorter ones run by that; if it is left out, the plan is for the first
                batch, and longer ones are planned for when they come.
            **options: See :class:`planner.planning.options.PlanOptions`.

        Raises:
            InputError: ``max_length`` is no number of tokens.
        """
        self._budget, self._on_new_shape, self._cache, self._options = budget, on_new_shape, cache, options
        self._longest = None if max_length is None else Padded(checked_length(max_length))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have the model planned at its first training call."""
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        name = "activation" if hasattr(model, "activation_checkpointing_disable") else "gradient"
        if getattr(model, f"is_{name}_checkpointing", False):
            getattr(model, f"{name}_checkpointing_disable")()
            tell("the model's own gradient checkpointing is switched off: the plan goes in its place")
        options: PlanKeywords = {"outputs": "dropped", **self._options}
        options.setdefault("accumulate", True if args.gradient_accumulation_steps > 1 else None)
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        options.setdefault("optimizer", inner if isinstance(inner, torch.optim.Optimizer) else None)
        if any(kind.__module__.partition(".")[0] == "trl" for kind in type(args).__mro__):
            options.setdefault("loss", _loss_of_tokens)
        options.setdefault("loss", _loss_of_output)
        wanted = wanted_lazily(
            model, budget=self._budget, on_new_shape=self._on_new_shape, cache=self._cache, **options
        )
        if wanted is not None:
            install_lazily(model, replace(wanted, enlarge=self._longest))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the plan."""
        remove(kwargs["model"])


def _loss_of_output(output: Any) -> Any:
    """The loss that the trainer finds in what a model returns: of a tuple it is the first."""
    return find_loss(output[0] if isinstance(output, tuple | list) and output else output)


def _loss_of_tokens(output: Any) -> Any:
    """The loss of TRL's trainers: their models return one as well, which they do not differentiate."""
    log_probs = getattr(output, "log_probs", None)
    return _loss_of_output(output) if log_probs is None else (-log_probs).sum()
