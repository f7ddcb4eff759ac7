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
from planner.errors import CaptureError, warn
from planner.integrations.padding import Padded, checked_length
from planner.lazy.auto_checkpoint import wanted_lazily
from planner.lazy.first_call import install_lazily
from planner.planning.options import PlanKeywords, shows_options
from planner.runtime.install import remove
from planner.runtime.shapes.policy import OnNewShape
from planner.training_step.inputs import InputError
from planner.training_step.step import find_loss


class PlannerCallback(TrainerCallback):
    """Plans the model at the trainer's first step, for the arguments that the trainer passes to it.

    Outputs besides the loss are planned as dropped, as the trainer drops them. The memory of the optimizer
    counts. Gradients of earlier batches count where ``gradient_accumulation_steps`` is more than 1. After
    training the plan is removed.

    The plan takes the place of checkpointing that ``TrainingArguments`` switch on
    (``gradient_checkpointing=True``): that is switched off, and a budget such as "60%" is a share of the step
    with it. ``torch_compile=True`` does not compile a planned model, and a warning says so;
    ``backend="inductor"`` compiles it.

    TRL's trainers compute the loss of values that their models return for each token; the plan includes that.
    It includes the loss that the trainer computes of the logits with ``label_smoothing_factor``, too.

    Sentence Transformers' trainers compute the loss by a module that calls the model for each column of the
    data. Plan that module, which you give the trainer as its loss: ``PlannerCallback(budget="8GiB",
    module=loss)``.

    A ``compute_loss`` of your own may differentiate another part of the output than its loss. Name it:
    ``loss=lambda output: output.logits.sum()``. Or plan without this callback: wrap a function ``(model,
    inputs)``, which ``compute_loss`` calls, in :func:`planner.step`.
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
        """Store the options to plan with.

        Args:
            budget, on_new_shape, cache: See :func:`planner.auto_checkpoint`.
            max_length: Tokens of the longest sequence in training. The plan is made for a batch padded to
                this length, and shorter batches run by it. Without it the plan is made for the first batch,
                and again for each longer one when it comes.
            module: The module to plan instead of the trainer's model: the trainer calls it for the loss, and
                it calls the model.
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
        self._own: tuple[_OwnCheckpoints, torch.nn.Module] | None = None
        self._longest = None if max_length is None else Padded(checked_length(max_length))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have the model planned at its first training call."""
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        libraries = {kind.__module__.partition(".")[0] for kind in type(args).__mro__}
        planned = model if self._module is None else self._module
        self._switch_on()  # an error may have ended the training before
        options: PlanKeywords = {"outputs": "dropped", **self._options}
        options.setdefault("accumulate", True if args.gradient_accumulation_steps > 1 else None)
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        options.setdefault("optimizer", inner if isinstance(inner, torch.optim.Optimizer) else None)
        if "trl" in libraries:
            options.setdefault("loss", _loss_of_tokens)
        if args.label_smoothing_factor:
            options.setdefault("loss", _SmoothedLoss.of(model, args.label_smoothing_factor))
        options.setdefault("loss", _loss_of_trainer)
        wanted = wanted_lazily(
            planned, budget=self._budget, on_new_shape=self._on_new_shape, cache=self._cache, **options
        )
        if wanted is None:
            return  # plans are off: nothing is changed, and nothing warned of
        if self._module is None and "sentence_transformers" in libraries:
            warn(
                "Sentence Transformers' losses call the model once for each column, so that a plan of the "
                "model alone does not bound the step. Plan the loss that the trainer is given: "
                "PlannerCallback(module=loss)"
            )
        if args.torch_compile and wanted.options.backend != "inductor":
            warn(
                "torch_compile=True does not reach the planned model: it runs operation by operation, as the "
                'plan says. To compile it pass PlannerCallback(backend="inductor") and leave torch_compile '
                "out"
            )
        own = _OwnCheckpoints.switched_off(planned)
        if own is not None:
            self._own = own, planned
            tell(
                "the model's own gradient checkpointing is switched off: the plan takes its place, and "
                "percentages are shares of the step with it"
            )
        install_lazily(planned, replace(wanted, enlarge=self._longest, as_run=own))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the plan, and switch the model's own checkpointing on where it was on."""
        remove(kwargs["model"] if self._module is None else self._module)
        self._switch_on()

    def _switch_on(self) -> None:
        """Switch the model's own checkpointing on, where it is off for a plan."""
        if self._own is not None:
            own, model = self._own
            own(model)
            self._own = None


_NAMES = ("gradient_checkpointing", "activation_checkpointing")
"""Prefixes of the attributes that say whether a part of a model checkpoints, and by which function."""


@dataclass(frozen=True)
class _OwnCheckpoints:
    """Switches a model's own checkpointing on again, in the model or a copy, where it was on before.

    Attributes:
        switched: The parts where it was on, by name, each with its attributes of that time.
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

    def __call__(self, model: torch.nn.Module) -> None:
        for path, values in self.switched:
            vars(model.get_submodule(path)).update(values)


def _switched_off(part: torch.nn.Module) -> bool:
    """Switch the checkpointing of a part of a model off; returns whether it was on.

    The part may be another library's.
    """
    name = "activation" if hasattr(part, "activation_checkpointing_disable") else "gradient"
    if not getattr(part, f"is_{name}_checkpointing", False):
        return False
    getattr(part, f"{name}_checkpointing_disable")()
    return True


def _loss_of_output(output: Any) -> Any:
    """The loss that the trainer finds in a model's output: the first entry of a tuple."""
    return find_loss(output[0] if isinstance(output, tuple | list) and output else output)


def _loss_of_trainer(output: Any) -> Any:
    """The loss that the trainer finds in a model's output.

    Raises:
        CaptureError: There is none.
    """
    loss = _loss_of_output(output)
    if loss is None:
        raise CaptureError(
            f"its output, a {type(output).__name__}, has no loss that requires a gradient: say how the loss "
            "is computed of it, as in PlannerCallback(loss=lambda output: output.logits.sum()), or plan what "
            "your compute_loss calls by planner.step"
        )
    return loss


@dataclass(frozen=True)
class _SmoothedLoss:
    """The loss that the trainer computes of the logits with ``label_smoothing_factor``.

    The trainer does not pass the labels to the model then.

    Attributes:
        factor: How much labels are smoothed.
        shifts: Whether the logits at a position are for the next label.
        counted: Whether the trainer counts the labels of a whole step, as for models that take the count.
    """

    factor: float
    shifts: bool
    counted: bool

    @classmethod
    def of(cls, model: Any, factor: float) -> "_SmoothedLoss":
        """The loss of the trainer for a model, or for the model that PEFT adapts."""
        adapted = getattr(getattr(model, "base_model", None), "model", model)
        names = {type(inner).__name__ for inner in (model, adapted)}
        parameters = inspect.signature(adapted.forward).parameters.values()
        takes_more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        shifts = not names.isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        return cls(factor, shifts, getattr(adapted, "accepts_loss_kwargs", takes_more))

    def __call__(self, output: Any) -> Any:
        if (loss := _loss_of_output(output)) is not None:
            return loss  # a batch without labels
        logits = output.get("logits") if isinstance(output, Mapping) else output[0]
        if not isinstance(logits, torch.Tensor):
            return None
        label = torch.zeros((), dtype=torch.long, device=logits.device)
        labels = label.expand(logits.shape[:-1])  # of any values; the batch's own count among its inputs
        more: dict[str, Any] = {}
        # transformers 4 has no such parameter.
        if "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters:
            more["num_items_in_batch"] = 1 if self.counted else None
        return LabelSmoother(self.factor)({"logits": logits}, labels, self.shifts, **more)


def _loss_of_tokens(output: Any) -> Any:
    """The loss of TRL's trainers; they do not differentiate the loss that their models return."""
    log_probs = getattr(output, "log_probs", None)
    return _loss_of_output(output) if log_probs is None else (-log_probs).sum()
