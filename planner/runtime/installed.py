"""The call that is installed in place of a module's own: of a plan, or of a module yet to be planned.

The module stays the same object: its class, attributes, parameters, ``state_dict`` keys and hooks stay.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from planner._torch import modules
from planner._torch.tracing.dynamo_patches import end_graphs_at_plans
from planner._torch.tracing.inside_compile import RUNS_A_PLAN
from planner.errors import warn
from planner.runtime.unplanned import Unplanned, displaced


class InstalledCall:
    """A call that a module runs in place of its own.

    Args:
        model: The module.
        previous: The call that was installed before, by ``module.compile()`` for instance.
        training: The mode of the steps that run by a plan.

    Attributes:
        previous: As given.
        unplanned: Notices training without the plan.
    """

    _retired = True  # until it is installed
    _warned_of_clone = False

    def __init__(self, model: torch.nn.Module, previous: Callable[..., Any] | None, training: bool) -> None:
        self.previous = previous
        self._model, self._training = model, training
        self.unplanned = Unplanned(model, training)
        setattr(self, RUNS_A_PLAN, True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call of the module."""
        raise NotImplementedError

    def run_original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call that the module had before this one was installed."""
        if self.previous is None:
            return modules.module_call(self._model, *args, **kwargs)
        return self.previous(*args, **kwargs)

    def clone(self) -> torch.nn.Module | None:
        """The module that is called, if it is not the one that was planned but has its ``__dict__``."""
        return modules.called_instead_of(self._model, self)

    def run_clone(self, clone: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a :meth:`clone` without the plan, and warn: it has parameters of its own."""
        if clone.training is self._training and torch.is_grad_enabled() and not self._warned_of_clone:
            self._warned_of_clone = True
            warn(
                f"a {type(clone).__name__} is called that has the attributes of a planned one, as "
                "replicas of nn.DataParallel and other copies of its __dict__ have: it runs as it is, "
                "without the plan. For several GPUs use DistributedDataParallel; apply the plan to a copy, "
                "or make it by copy.deepcopy"
            )
        return modules.module_call(clone, *args, **kwargs)

    def install_in(self, copied: torch.nn.Module) -> None:
        """Install such a call in a copy of the module."""
        raise NotImplementedError

    def pickled(self) -> tuple[Any, ...]:
        """A function to restore it, which gets the module first, and its further arguments."""
        raise NotImplementedError

    def retire(self) -> None:
        """Note that another call takes its place on purpose."""
        self.unplanned.planned_call()
        self._retired = True

    def reinstate(self, *, waiting: bool) -> None:
        """Note that it is installed again; ``waiting``: its first planned call has not come yet."""
        self._retired = False
        if waiting:
            self.unplanned.wait()

    def __del__(self) -> None:  # it dies when another call is installed in its place
        if not self._retired and not sys.is_finalizing():
            displaced(self._model, self)


def install(model: torch.nn.Module, call: InstalledCall) -> None:
    """Put a call in place of the module's own; copies and pickles of the module get one too."""
    modules.after_shallow_copies(_install_in_copy)
    end_graphs_at_plans()  # nothing may have been captured in this process yet: a plan can come from a file
    modules.install_call(model, call)
    call.reinstate(waiting=False)
    vars(model)[Companion.NAME] = Companion(model)


def _install_in_copy(model: torch.nn.Module, copied: torch.nn.Module) -> None:
    call = modules.installed_call(model)
    if isinstance(call, InstalledCall):
        call.install_in(copied)


def take_out(model: torch.nn.Module) -> Callable[..., Any] | None:
    """Retire the :class:`InstalledCall` of a module, if it has one. It stays until another call is installed.

    Returns:
        The call that was installed before it; the installed call of a module with none.
    """
    installed = modules.installed_call(model)
    if not isinstance(installed, InstalledCall):
        return installed
    installed.retire()
    return installed.previous


class Companion:
    """An attribute of a planned module that installs the plan in copies and unpickled modules.

    PyTorch leaves the installed call out of copies. ``copy.deepcopy`` makes the copy first and its attributes
    after that: when it comes to this attribute, the plan is installed in the copy.
    """

    NAME = "_planner_companion"

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> "Companion":
        copied = memo.get(id(self._model))
        if self._model is not None and isinstance(copied, torch.nn.Module):
            _install_in_copy(self._model, copied)
        return Companion(copied)

    def __reduce__(self) -> tuple[Any, ...]:
        call = None if self._model is None else modules.installed_call(self._model)
        if not isinstance(call, InstalledCall):
            return Companion, (self._model,)
        restore, *rest = call.pickled()
        return restore, (self._model, *rest)
