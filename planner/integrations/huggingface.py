"""Planning inside the ``Trainer`` of Hugging Face's transformers.

from planner.integrations.huggingface import PlannerCallback

trainer = Trainer(model, args, train_dataset=data, callbacks=[PlannerCallback(budget="8GiB")])
trainer.train()
"""

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from transformers import TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from planner.environment import tell
from planner.errors import warn
from planner.integrations.padding import Padded, checked_length
from planner.lazy.auto_checkpoint import wanted_lazily
from planner.lazy.first_call import install_lazily
from planner.planning.options import PlanKeywords, shows_options
from planner.runtime.install import remove
from planner.runtime.shapes.policy import OnNewShape
from planner.training_step.inputs import InputError
from planner.training_step.step import find_loss


class PlannerCallback(TrainerCallback):
    """Plans the model at the trainer's first step, for what the trainer really passes to it.

    Outputs besides the loss are planned as dropped, as the trainer drops them. The optimizer counts, and
    gradients that are there already do where ``gradient_accumulation_steps`` is more than 1. Checkpointing
    that ``TrainingArguments`` switch on (``gradient_checkpointing=True``) is switched off: the plan goes in
    its place, and a budget such as "60%" is of what the step takes with it. A planned model is not compiled
    by ``torch_compile=True``, which is a warning;
    ``backend="inductor"`` compiles it. After training the plan is removed.

    In TRL's trainers the loss is computed of what their models return for each token; that is planned for.
    So is the loss that the trainer computes of the logits with ``label_smoothing_factor``.

    Sentence Transformers' trainers compute the loss by a module that calls the model for each column of the
    data. Plan that module: ``PlannerCallback(budget="8GiB", module=loss)``, with the loss that the trainer is
    given.

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
        module: torch.nn.Module | None = None,
        **options: Unpack[PlanKeywords],
    ) -> None:
        """Store what to plan with.

        Args:
            budget, on_new_shape, cache: See :func:`planner.auto_checkpoint`.
            max_length: Tokens of the longest sequence that will come. The plan is made for a batch that is
                padded to it, and shorter ones run by that; if it is left out, the plan is for the first
                batch, and longer ones are planned for when they come.
            module: What to plan instead of the trainer's model: a module that the trainer calls for the loss,
                and that calls the model.
            **options: See :class:`planner.planning.options.PlanOptions`.

        Raises:
            InputError: ``max_length`` is no number of tokens, or ``module`` no module.
        """
        if module is not None and not isinstance(module, torch.nn.Module):
            raise InputError(
                f"module is a {type(module).__name__}: expected the torch.nn.Module that the trainer calls"
            )
        self._module = module
        self._budget, self._on_new_shape, self._cache, self._options = budget, on_new_shape, cache, options
        self._longest = None if max_length is None else Padded(checked_length(max_length))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have the model planned at its first training call."""
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        libraries = {kind.__module__.partition(".")[0] for kind in type(args).__mro__}
        if self._module is None and "sentence_transformers" in libraries:
            warn(
                "Sentence Transformers' losses call the model once for each column, so that a plan of the "
                "model alone does not bound the step. Plan the loss that the trainer is given: "
                "PlannerCallback(module=loss)"
            )
        planned = model if self._module is None else self._module
        if (own := _OwnCheckpoints.switched_off(planned)) is not None:
            tell(
                "the model's own gradient checkpointing is switched off: the plan goes in its place, and "
                "percentages are of the step with it"
            )
        options: PlanKeywords = {"outputs": "dropped", **self._options}
        if args.torch_compile and options.get("backend", "eager") == "eager":
            warn(
                "torch_compile=True does not reach the planned model: it runs operation by operation, as the "
                'plan says. To have it compiled pass PlannerCallback(backend="inductor") and leave '
                "torch_compile out"
            )
        options.setdefault("accumulate", True if args.gradient_accumulation_steps > 1 else None)
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        options.setdefault("optimizer", inner if isinstance(inner, torch.optim.Optimizer) else None)
        if "trl" in libraries:
            options.setdefault("loss", _loss_of_tokens)
        if args.label_smoothing_factor:
            options.setdefault("loss", _SmoothedLoss.of(model, args.label_smoothing_factor))
        options.setdefault("loss", _loss_of_output)
        wanted = wanted_lazily(
            planned, budget=self._budget, on_new_shape=self._on_new_shape, cache=self._cache, **options
        )
        if wanted is not None:
            install_lazily(planned, replace(wanted, enlarge=self._longest, as_run=own))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the plan."""
        remove(kwargs["model"] if self._module is None else self._module)


_NAMES = ("gradient_checkpointing", "activation_checkpointing")
"""With these the attributes begin that say whether a part of a model checkpoints, and by what function."""


@dataclass(frozen=True)
class _OwnCheckpoints:
    """Switches checkpointing on in a copy of a model, where it was on before.

    Attributes:
        switched: The parts that were, each with the values of its attributes for that.
    """

    switched: tuple[tuple[str, Mapping[str, Any]], ...]

    @classmethod
    def switched_off(cls, model: torch.nn.Module) -> "_OwnCheckpoints | None":
        """Switch a model's own checkpointing off; None where it was not on."""
        before = {
            path: {name: value for name, value in vars(part).items() if name.strip("_").startswith(_NAMES)}
            for path, part in model.named_modules()
        }
        if not [part for part in model.modules() if _switched_off(part)]:
            return None
        switched = []
        for path, values in before.items():
            now = vars(model.get_submodule(path))
            if changed := {n: v for n, v in values.items() if now.get(n) is not v}:
                switched.append((path, changed))
        return cls(tuple(switched))

    def __call__(self, copied: torch.nn.Module) -> None:
        for path, values in self.switched:
            vars(copied.get_submodule(path)).update(values)


def _switched_off(part: torch.nn.Module) -> bool:
    """Switch a model's own checkpointing off; returns whether it was on. It may lie in a module of another
    library's."""
    name = "activation" if hasattr(part, "activation_checkpointing_disable") else "gradient"
    if not getattr(part, f"is_{name}_checkpointing", False):
        return False
    getattr(part, f"{name}_checkpointing_disable")()
    return True


def _loss_of_output(output: Any) -> Any:
    """The loss that the trainer finds in what a model returns: of a tuple it is the first."""
    return find_loss(output[0] if isinstance(output, tuple | list) and output else output)


@dataclass(frozen=True)
class _SmoothedLoss:
    """The loss that the trainer computes of the logits; it takes the labels away from the model then.

    Attributes:
        factor: How much labels are smoothed.
        shifts: Whether logits are for the label after theirs.
        counted: Whether the trainer counts the labels of a step before, as it does for models that take it.
    """

    factor: float
    shifts: bool
    counted: bool

    @classmethod
    def of(cls, model: Any, factor: float) -> "_SmoothedLoss":
        """As the trainer does for a model, or for the one that PEFT adapts."""
        adapted = getattr(getattr(model, "base_model", None), "model", model)
        names = {type(inner).__name__ for inner in (model, adapted)}
        parameters = inspect.signature(adapted.forward).parameters.values()
        takes_more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        shifts = not names.isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        return cls(factor, shifts, getattr(adapted, "accepts_loss_kwargs", takes_more))

    def __call__(self, output: Any) -> Any:
        if (found := _loss_of_output(output)) is not None:
            return found  # a batch without labels
        logits = output.get("logits") if isinstance(output, Mapping) else output[0]
        if not isinstance(logits, torch.Tensor):
            return None
        label = torch.zeros((), dtype=torch.long, device=logits.device)
        labels = label.expand(logits.shape[:-1])  # which ones does not matter, and memory they have already
        more: dict[str, Any] = {}
        if "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters:  # not in version 4
            more["num_items_in_batch"] = 1 if self.counted else None
        return LabelSmoother(self.factor)({"logits": logits}, labels, self.shifts, **more)


def _loss_of_tokens(output: Any) -> Any:
    """The loss of TRL's trainers: their models return one as well, which they do not differentiate."""
    log_probs = getattr(output, "log_probs", None)
    return _loss_of_output(output) if log_probs is None else (-log_probs).sum()
