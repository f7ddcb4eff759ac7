"""Warnings where steps train a planned module without its plan.

A planned step pays nothing for it: hooks on parameters are removed at the first planned call, and hooks on
outputs are put only on calls that run without the plan.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from planner._torch import autograd, modules
from planner.errors import warn
from planner.training_step.step import backward_begins_at

COMPILED_BEFORE = (
    "model.compile() was called before: the plan runs in place of the compiled module in training; the "
    "compiled module still runs in evaluation. Call planner.remove(model) to train the compiled module"
)
MODES = {True: "training", False: "evaluation"}


_watching: "weakref.WeakSet[Unplanned]" = weakref.WeakSet()
"""The :class:`Unplanned` of each planned module."""


class Unplanned:
    """Notices gradients of one module that do not come from its plan.

    Args:
        model: The module.
        training: Whether the plan is for training mode.
    """

    def __init__(self, model: torch.nn.Module, training: bool) -> None:
        self._model = weakref.ref(model)
        self._kind, self._training = type(model).__name__, training
        self._warned_of_mode = self._warned_of_checkpoint = False
        self._handles: list[Any] = []
        # Parameters in autograd graphs of forwards before the plan, and whether these graphs are alive.
        self._earlier: dict[int, Callable[[], bool]] = {}
        self._earlier_backward: int | None = None  # the backward of such a forward
        _watching.add(self)

    def wait(self) -> None:
        """Warn if parameters get gradients before :meth:`planned_call`."""
        model = self._model()
        if model is None or self._handles:
            return
        me = weakref.ref(self)  # a parameter must not hold it

        def arrived(parameter: torch.Tensor) -> None:
            mine = me()
            if (
                mine is not None
                and not mine._is_of_earlier_forward(parameter)
                and not mine._is_of_another_plan(parameter)
            ):
                mine._never_called()

        trained = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
        waiting = [p for p in trained if not is_lazy(p)]  # without a shape a parameter takes no hooks
        self._handles = [p.register_post_accumulate_grad_hook(arrived) for p in waiting]
        self._earlier = {
            id(p): alive for p in waiting if (alive := autograd.accumulates_for_a_graph(p)) is not None
        }
        self._earlier_backward = None

    @property
    def waiting(self) -> bool:
        """Whether no planned call has come since :meth:`wait`."""
        return bool(self._handles)

    def planned_call(self) -> None:
        """Stop waiting: the plan runs, or is taken out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._earlier.clear()

    def hindered_call(self, hindrance: str, do: str) -> None:
        """Warn that a call runs without the plan, why, and what to do."""
        self.planned_call()
        warn(f"{hindrance}: the step runs as it is, without the plan. {do}")

    def region_in_checkpoint(self) -> None:
        """Warn, once, that a region is called inside a checkpoint of the forward."""
        if not self._warned_of_checkpoint:
            self._warned_of_checkpoint = True
            warn(
                "a region is called inside of torch.utils.checkpoint, which runs it again by itself, and was "
                "not there when it was planned: it runs without the plan, and the step may exceed the "
                "budget. Take the checkpoint away (of Hugging Face's models "
                "model.gradient_checkpointing_disable()), or plan without regions="
            )

    def _is_of_earlier_forward(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient may come from a forward that ran before the plan was there. One backward may."""
        alive = self._earlier.get(id(parameter))
        if alive is None or not alive():
            return False
        if self._earlier_backward is None:
            self._earlier_backward = autograd.current_backward()
        return self._earlier_backward == autograd.current_backward()

    def _is_of_another_plan(self, parameter: torch.Tensor) -> bool:
        """Whether another plan that has run trains the parameter too: the gradient may come from that one."""
        mine = self._model()
        for other in list(_watching):
            model = other._model()
            if (
                other is self
                or other.waiting
                or model is None
                or model is mine
                or not other._is_installed(model)
            ):
                continue
            if any(module is mine for module in model.modules()):
                self.planned_call()  # a part of the other module runs by the other plan
                return True
            if any(p is parameter for p in model.parameters()):
                return True
        return False

    def _is_installed(self, model: torch.nn.Module) -> bool:
        if "_modules" not in vars(model):  # a copy whose copying failed has its plan, and no attributes
            return False
        return getattr(modules.installed_call(model), "unplanned", None) is self

    def _never_called(self) -> None:
        self.planned_call()
        if not self._warned_of_mode:
            warn(
                f"parameters of the planned {self._kind} got gradients, but its plan has not run: the step "
                "ran without. Call the module as model(x), not model.forward(x) or a part of it, or plan the "
                "module that the step calls (self.net); if it was compiled before the plan was applied, call "
                "torch.compiler.reset()"
            )

    def called_in_other_mode(self, output: Any) -> None:
        """Warn if a call is trained that ran without the plan, as the module is in another mode."""
        if self._warned_of_mode:
            return
        for tensor in backward_begins_at(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._trained_in_other_mode)

    def _trained_in_other_mode(self, _gradient: torch.Tensor) -> None:
        if self._warned_of_mode:
            return
        self._warned_of_mode = True
        planned, now = MODES[self._training], MODES[not self._training]
        how = "model.train()" if self._training else "model.eval()"
        warn(
            f"the plan is for {planned} mode and the {self._kind} trains in {now} mode: the step ran without "
            f"the plan. Call {how} before the step, or plan with training={not self._training}"
        )


def displaced(model: torch.nn.Module, call: object) -> None:
    """Warn if something else was installed in place of a plan, as ``module.compile()`` does."""
    installed = modules.installed_call(model)
    if installed is not None and installed is not call and not isinstance(installed, type(call)):
        warn(
            f"the call of the planned {type(model).__name__} was replaced, as model.compile() does: it "
            "trains without its plan. Apply the plan after model.compile(), or compile what calls it: "
            "torch.compile(outer) runs planned parts by their plans"
        )
