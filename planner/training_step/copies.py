"""Copies of a module and of a step's arguments, on which the step can run without changing the originals."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from planner._torch import fake, modules, pytree
from planner._torch.cuda.recurrent_state import flatten_like
from planner._torch.layouts.shape_functions import widen_grouped_products
from planner._torch.tensors import SPARSE, is_view, strided_copy, writes
from planner._torch.without_data import fake_values
from planner._torch.without_data.answers import Answers
from planner.errors import CaptureError
from planner.heap import collector_off
from planner.module_copies import IMMUTABLE, attribute_of, copied_module, holding, referring_to
from planner.module_parts import buffers_of, parameters_of, parts_of, tensors_of
from planner.training_step.arrivals.hook_copier import HookCopier
from planner.training_step.arrivals.on_copies import put_hooks_on_copies
from planner.training_step.python_state import is_of_users
from planner.training_step.step import NESTED, Loss, Step, map_tensors, tensors_in
from planner.training_step.user_lines import line_of


@dataclass(frozen=True)
class StepCopy:
    """A copy of a module and of a step's arguments.

    Attributes:
        module: The copy of the module.
        step: The step with copies of its arguments and loss.
        running: A context in which the step runs.
        reset: Undoes the changes of a pass.
        data: Whether the copy has data.
        value_of: Given a tensor of a pass, returns one with its data; None where the copy has no data and it
            depends on some.
        let_go: Drops the references to the user's tensors; to be called when no pass will run any more.
        notes: Lines for the plan about what the copy does otherwise; passes may add some.
        answers: The numbers that a step with data read from tensors. A step without data is given the same.
            None where there are none.
        hooks: The copies of the hooks on weights; None where there are none.
        assumed: What passes without data assumed of them.
    """

    module: torch.nn.Module
    step: Step
    running: Callable[[], contextlib.AbstractContextManager[Any]]
    reset: Callable[[], None]
    data: bool
    value_of: Callable[[torch.Tensor], torch.Tensor | None]
    let_go: Callable[[], None]
    notes: Sequence[str] = ()
    answers: Answers | None = None
    hooks: HookCopier | None = None
    assumed: list[str] = field(default_factory=list)


@collector_off()
def fake_copy(module: torch.nn.Module, step: Step, answers: Answers | None = None) -> StepCopy:
    """A copy without data; ``answers`` as in :class:`StepCopy`.

    Raises:
        CaptureError: The module cannot be copied, or a tensor is nested.
    """
    mode = fake_values.ConstantTrackingFakeMode(allow_non_fake_inputs=True, answers=answers)
    replaced: dict[int, torch.Tensor] = {}
    with_values: _Pairs = []  # small tensors of integers keep theirs, which may decide what runs

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_nested:
            raise CaptureError(NESTED)
        number = id(tensor)
        if number not in replaced:
            made = fake_values.fake_with_values(tensor, mode)
            if made is not None:
                with_values.append((tensor, made))
            replaced[number] = fake.fake_like(tensor, mode) if made is None else made
        return replaced[number]

    for part in parts_of(module):
        for tensor in tensors_of(part):
            faked(tensor)
    copied = _copied(module, step, replaced)
    attributes = _AttributesOfTensors(module, copied, faked)
    args, kwargs = _given_to(copied, module, step, faked)

    @contextlib.contextmanager
    def running() -> Iterator[None]:
        widen_grouped_products()
        with mode, fake_values.values_count(), modules.no_cached_parametrizations():
            yield

    requires_grad = _RequiresGrad(args, kwargs)

    def reset() -> None:
        attributes.put_back()
        requires_grad.put_back()
        for original, made in with_values:
            fake_values.forget_changes(made, original)
        if answers is not None:
            answers.begin_again()

    notes = _scripted(module)
    hooks = put_hooks_on_copies(module, copied, faked, notes)
    pairs = [] if step.loss is None else _paired(module, step, copied, (args, kwargs))
    loss = _on_copies(step.loss, module, copied, pairs)
    losses = step.module_losses_of(copied)
    copied_step = replace(step, args=tuple(args), kwargs=kwargs, loss=loss, module_losses=losses)
    return StepCopy(
        copied,
        copied_step,
        running,
        reset,
        data=False,
        value_of=mode.log.value,
        let_go=partial(fake.forget_real_tensors, mode),
        notes=notes,
        hooks=hooks,
        answers=answers,
    )


def real_copy(module: torch.nn.Module, step: Step) -> StepCopy:
    """A copy with data.

    Raises:
        CaptureError: The module cannot be copied.
    """
    made: dict[int, torch.Tensor] = {}

    def clone(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = strided_copy(tensor.detach()).requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    # copy.deepcopy fails on a compressed sparse tensor.
    sparse = {id(t): clone(t) for t in module.buffers() if t.layout in SPARSE}
    copied = _copied(module, step, sparse)
    attributes = _AttributesOfTensors(module, copied, clone)
    flatten_like(parts_of(copied), parts_of(module))
    args, kwargs = _given_to(copied, module, step, clone)
    pairs = [*_paired(module, step, copied, (args, kwargs)), *attributes.pairs()]

    requires_grad = _RequiresGrad(args, kwargs)

    def reset() -> None:
        attributes.put_back()
        requires_grad.put_back()
        with torch.no_grad():
            for original, mine in pairs:
                # Batch normalisations write to running statistics without a count of these writes.
                if writes(mine) != versions[id(mine)] or id(mine) in buffers:
                    if mine.shape != original.shape:
                        mine.resize_(original.shape)  # as observers of quantisation do with their buffers
                    mine.copy_(original)
                    versions[id(mine)] = writes(mine)

    notes = _scripted(module)
    hooks = put_hooks_on_copies(module, copied, clone, notes)
    versions = {id(mine): writes(mine) for _, mine in pairs}
    buffers = {id(buffer) for buffer in copied.buffers()}
    loss = _on_copies(step.loss, module, copied, pairs)
    losses = step.module_losses_of(copied)
    copied_step = replace(step, args=tuple(args), kwargs=kwargs, loss=loss, module_losses=losses)
    return StepCopy(
        copied,
        copied_step,
        modules.no_cached_parametrizations,
        reset,
        data=True,
        value_of=lambda tensor: tensor,
        let_go=lambda: None,
        notes=notes,
        hooks=hooks,
    )


def _copied(module: torch.nn.Module, step: Step, replaced: dict[int, torch.Tensor]) -> torch.nn.Module:
    """A copy of a module without its plan, in the mode that the step runs in.

    Args:
        module: The module.
        step: Its step.
        replaced: By id of a tensor of the module, the tensor that the copy has in its place.

    Raises:
        CaptureError: It cannot be copied.
    """
    try:
        copied = copied_module(module, replaced)
        if step.in_mode(module) is not module.training:
            copied.train(not module.training)
    except Exception as error:
        raise CaptureError(_not_copied(error)) from error
    own = set(parts_of(module))
    for part in parts_of(copied):
        if part not in own:  # a __deepcopy__ may return the module itself
            modules.install_call(part, None)  # a plan travels with copies
    if any(mine.grad_fn is not None for mine in _state(copied)):
        for original, mine in _paired_state(module, copied):
            if mine.grad_fn is not None and original.grad_fn is None:
                # Scripted modules clone their parameters with history: gradients would reach the user's.
                mine.detach_().requires_grad_(original.requires_grad)
    return copied


def _given_to(
    copied: torch.nn.Module,
    module: torch.nn.Module,
    step: Step,
    tensor: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    """A step's arguments for a copy of its module: objects that have the module have the copy instead, or the
    step would run the user's own."""
    others = dict(zip(parts_of(module), parts_of(copied), strict=False))

    def given(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tensor(value)
        return holding(value, others) if is_of_users(value) else value

    return pytree.tree_map(given, (step.args, dict(step.kwargs)))


class _AttributesOfTensors:
    """The attributes that users set on parameters and buffers, as counters and sums that hooks add to.

    PyTorch copies a parameter without them. Those made of numbers, texts and tensors are set on the copies.

    Args:
        module, copied: A module and its copy.
        tensor: Returns the copy of a tensor.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        copied: torch.nn.Module,
        tensor: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._tensor, self._kept = tensor, list[tuple[torch.Tensor, str, Any]]()
        originals, copies = _state(module), _state(copied)
        if len(originals) == len(copies):
            for original, mine in zip(originals, copies, strict=True):
                for name, value in vars(original).items():
                    if name not in vars(mine) and not name.startswith("_dynamo") and _is_plain(value):
                        self._kept.append((mine, name, value))
        self.put_back()

    def put_back(self) -> None:
        """Set the attributes of the copies to the module's values."""
        for mine, name, value in self._kept:
            setattr(mine, name, map_tensors(self._tensor, value))

    def pairs(self) -> "_Pairs":
        """The tensors in these attributes, each with its copy."""
        held = tensors_in([value for _, _, value in self._kept])
        return [(original, self._tensor(original)) for original in held]


class _RequiresGrad:
    """Which inputs require gradients when a step begins, to put that back before each pass.

    A forward may change it, as one that returns forces does. In training each step is given new inputs.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._inputs = [(tensor, tensor.requires_grad) for tensor in tensors_in((args, kwargs))]

    def put_back(self) -> None:
        """Have the inputs require gradients as they did."""
        for tensor, requires_grad in self._inputs:
            if tensor.requires_grad is not requires_grad and (tensor.is_leaf or not is_view(tensor)):
                if not tensor.is_leaf:  # an operation on tensors that require gradients wrote to it
                    tensor.detach_()
                tensor.requires_grad_(requires_grad)


def _is_plain(value: Any) -> bool:
    """Whether a value is made of numbers, texts and tensors without history."""
    leaves = [value] if type(value) in IMMUTABLE else pytree.tree_leaves(value)
    return all(type(v) in IMMUTABLE or (isinstance(v, torch.Tensor) and v.grad_fn is None) for v in leaves)


def _not_copied(error: Exception) -> str:
    """The message for an error of ``copy.deepcopy``."""
    attribute = attribute_of(error)
    if attribute is None:
        return described("copying the module (copy.deepcopy)", error)
    said, line = str(error).strip().partition("\n")[0], line_of(error)
    if line is not None and not line.startswith(f"{copy.__file__}:"):
        said += f", at {line}"  # of a __deepcopy__ or __reduce__ of the user's
    return (
        f"copying the module failed at its attribute {attribute}: {type(error).__name__}: {said}. The step "
        "is planned on a copy: keep that attribute outside of the module, or give its class a __deepcopy__"
    )


def _scripted(module: torch.nn.Module) -> list[str]:
    """The note on parts that are TorchScript, if there are any."""
    if not any(isinstance(part, torch.jit.ScriptModule) for part in parts_of(module)):
        return []
    return [
        "parts of the module are TorchScript, which runs as written: it changes its code after the first "
        "steps and decides when memory is freed, so that the peak may be another than predicted"
    ]


def _state(module: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers."""
    return [*parameters_of(module), *buffers_of(module)]


_Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors of the user's, each with its copy, which variables here call ``mine``."""


def _paired(module: torch.nn.Module, step: Step, copied: torch.nn.Module, inputs: Any) -> _Pairs:
    """Parameters, buffers and inputs, each with its copy.

    Raises:
        CaptureError: The copy has more or fewer parameters and buffers.
    """
    given = tensors_in((step.args, dict(step.kwargs)))
    return [*_paired_state(module, copied), *zip(given, tensors_in(inputs), strict=True)]


def _paired_state(module: torch.nn.Module, copied: torch.nn.Module) -> _Pairs:
    """Parameters and buffers, each with its copy; raises as :func:`_paired` does."""
    originals, copies = _state(module), _state(copied)
    if len(originals) != len(copies):
        raise CaptureError(
            f"copying the module (copy.deepcopy) gives {len(copies)} parameters and buffers, and the module "
            f"has {len(originals)}. The step is planned on a copy: give the class a __deepcopy__ that keeps "
            "them"
        )
    return list(zip(originals, copies, strict=True))


def _on_copies(
    loss: Loss | None, module: torch.nn.Module, copied: torch.nn.Module, pairs: _Pairs
) -> Loss | None:
    """A loss that reads the copies where the user's reads tensors of the module.

    Penalties on weights read parameters; losses that balance experts read attributes that the forward sets.
    """
    if loss is None:
        return None
    copies = {id(original): mine for original, mine in pairs}
    of_copy: Loss = referring_to(loss, dict(zip(parts_of(module), parts_of(copied), strict=False)))

    def run(output: Any) -> torch.Tensor:
        with _SubstituteTensors(copies):
            return of_copy(output)

    return run


class _SubstituteTensors(TorchFunctionMode):
    """Runs operations on the copies of some tensors, given by the tensors' ids."""

    def __init__(self, copies: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = self._copies
        args, kwargs = map_tensors(lambda t: copies.get(id(t), t), (args, kwargs or {}))
        return func(*args, **kwargs)


def described(doing: str, error: Exception) -> str:
    """An error in one line: what failed and why, the user's line, and what to do where that is known."""
    lines = str(error).strip().splitlines()
    # Dynamo's errors start with their kind and explain themselves further down.
    explained = [line.strip() for line in lines[1:] if line.strip().startswith("Explanation: ")]
    said = ". ".join(line.rstrip(". ") for line in lines[:1] + explained[:1])
    text = f"{doing} failed: {type(error).__name__}: {said}"
    if (line := line_of(error)) is not None:
        text += f", at {line}"
    if "SparseTensor" in text or "SparseCsrTensor" in text:
        text += " (sparse gradients cannot be planned: make the embedding with sparse=False)"
    if any(sign in text for sign in ("NestedInt", "nested_int", "jagged", "NestedTensor")):
        text += f" ({NESTED})"
    return text
