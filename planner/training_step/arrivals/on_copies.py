"""The hooks of weights, run where a copy of their module runs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner._torch import fake as fake_
from planner._torch.tensors import Hook, all_hooks_on, has_hooks, hooks_after_accumulation, hooks_on
from planner.module_parts import buffers_of, parameters_of, parts_of
from planner.training_step.arrivals.hook_copier import HookCopier
from planner.training_step.arrivals.reach import Reach
from planner.training_step.arrivals.suspended import called
from planner.training_step.python_state import belongs_to, is_stepping

NOT_COUNTED = (
    "the hook {} on {}, which runs after its gradient was accumulated, is left out of the prediction ({}): "
    "gradients that it frees count until the step ends, and memory that it takes does not count"
)


def put_hooks_on_copies(
    module: torch.nn.Module,
    copied: torch.nn.Module,
    tensor: Callable[[torch.Tensor], torch.Tensor],
    notes: list[str],
) -> HookCopier | None:
    """Put hooks on a copy of a module: those on gradients of weights, and layers' that step an optimizer.

    The hooks on the copy reach copies, where all that they reach can be copied. Else a hook that runs before
    the gradient is accumulated runs as it is, and one that runs after it is left out. A hook that asks for
    data, as to log a norm, does nothing on a copy without data.

    Args:
        module: The module.
        copied: The copy.
        tensor: Makes the copy of a tensor.
        notes: Gets a sentence for each hook that is left out of the plan.

    Returns:
        The copies of the hooks; None where there are none.
    """
    trained = [(n, p) for n, p in module.named_parameters() if any(map(_is_users, all_hooks_on(p)))]
    stepping = _stepping_hooks(module, copied)
    if not trained and not stepping:
        return None
    pairs: list[tuple[Any, Any]] = [*zip(parts_of(module), parts_of(copied), strict=False)]
    pairs += zip(parameters_of(module), parameters_of(copied), strict=False)
    pairs += zip(buffers_of(module), buffers_of(copied), strict=False)
    hooks, mine = HookCopier(pairs, tensor), dict(copied.named_parameters())
    said: set[str] = set()
    for held, key, hook in stepping:
        held[key] = _copied(hooks, hook)[0] or held[key]

    def note(hook: Any, text: str) -> None:
        if called(hook) not in said:
            said.add(called(hook))
            notes.append(text)

    for name, original in trained:
        copy = mine[name]
        if not copy.requires_grad or has_hooks(copy) or hooks_after_accumulation(copy):
            continue
        for hook in hooks_on(original):
            copy.register_hook(_unless_data_decide(name, _copied(hooks, hook)[0] or hook, notes))
        for after in filter(_is_users, hooks_after_accumulation(original).values()):
            own, why = _copied(hooks, after)
            if own is None:
                note(after, NOT_COUNTED.format(called(after), name, why))
            else:
                copy.register_post_accumulate_grad_hook(_unless_it_fails(name, after, own, note))
    return hooks


def _is_users(hook: Any) -> bool:
    return not belongs_to(getattr(hook, "__module__", None), "planner")


def _stepping_hooks(
    module: torch.nn.Module, copied: torch.nn.Module
) -> list[tuple[dict[int, Any], int, Callable[..., Any]]]:
    """The hooks of layers that reach optimizers, each with its place among those of the copy."""
    return [
        (mine, key, hook)
        for part, of_copy in zip(parts_of(module), parts_of(copied), strict=False)
        for name, held in vars(part).items()
        if name.endswith("_hooks") and isinstance(held, dict) and held and part is not of_copy
        for mine in [vars(of_copy).get(name, {})]
        for key, hook in held.items()
        if key in mine and any(map(is_stepping, Reach(hook).objects))
    ]


def _copied(hooks: HookCopier, hook: Callable[..., Any]) -> tuple[Callable[..., Any] | None, str]:
    """A copy of a hook that reaches copies; or None, and the reason."""
    reach = Reach(hook)
    if reach.opaque is not None:
        return None, f"it refers to {reach.opaque}"
    try:
        return hooks(hook, reach), ""
    except Exception as error:
        return None, f"an object that it refers to could not be copied: {type(error).__name__}: {error}"


def _unless_data_decide(name: str, hook: Hook, notes: list[str]) -> Hook:
    def run(gradient: torch.Tensor) -> torch.Tensor | None:
        try:
            return hook(gradient)
        except fake_.DataDependentError:
            text = f"a hook on the gradient of {name} asks for its values: its memory is not planned"
            notes.extend([text] * (text not in notes))
            return None

    return run


def _unless_it_fails(
    name: str, hook: Any, own: Callable[..., Any], note: Callable[[Any, str], None]
) -> Callable[[torch.Tensor], Any]:
    def run(parameter: torch.Tensor) -> Any:
        try:
            return own(parameter)
        except fake_.DataDependentError:
            note(hook, NOT_COUNTED.format(called(hook), name, "it asks for values"))
        except Exception as error:
            why = f"it failed on a copy: {type(error).__name__}: {error}"
            note(hook, NOT_COUNTED.format(called(hook), name, why))
        return None

    return run


def state_of(hooks: HookCopier | None) -> Sequence[torch.Tensor]:
    """The state of the optimizers that hooks step, as far as they were copied."""
    return [] if hooks is None else hooks.optimizer_state()
