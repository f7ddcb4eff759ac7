"""The state that a training step changes, noted before the step runs and put back after it.

Planning runs the step on copies, which may still share objects with the originals: a scripted module clones
its parameters with their history, a ``__deepcopy__`` returns the module itself, a function among the
attributes, or the loss, refers to modules and tensors from around it. Verifying runs the step on the
originals.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import nn

from planner._torch import fake, versions
from planner._torch.autocast_state import AutocastState, autocast_state, set_autocast_state
from planner._torch.tensors import Placement, all_hooks_on, place_as_before, placement_of, schema_of
from planner.errors import CaptureError
from planner.heap import collector_off
from planner.module_parts import buffers_of, parameters_of, parts_of, tensors_of
from planner.training_step.arrivals.reach import Reach
from planner.training_step.generators import GeneratorStates
from planner.training_step.python_state import Namespaces, PythonState
from planner.training_step.step import Step, tensors_in

Runs = Literal["recorded copy", "copy", "module"]
"""The module that is going to run.

- "recorded copy": a copy, mostly without data, whose steps are recorded. Where it writes to data all the
  same, they are copied just before (:meth:`StepSnapshot.about_to_run`). Tensors that it leaves in variables
  of files and classes are taken out.
- "copy": a copy with data. The data of tensors that it shares with the module are copied to the host.
- "module": the module itself. The data of all tensors are copied to the host. Objects among its attributes
  are noted, and so are attributes of its parameters.
"""


@dataclass
class _Before:
    """A tensor as it was; ``data`` are a copy of its data, where there is one."""

    tensor: torch.Tensor
    gradient: torch.Tensor | None
    version: int | None
    requires_grad: bool
    placement: Placement | None
    data: torch.Tensor | None = None


@dataclass(frozen=True)
class StepSnapshot:
    """The state that a step can change, as it was when the snapshot was taken.

    Attributes:
        tensors: By id: parameters, buffers, inputs, and other tensors that modules and the loss refer to.
        generators: PyTorch's, Python's, numpy's, and others that modules, inputs and the loss refer to.
        python: Attributes, plain containers and variables of functions.
        namespaces: The variables of classes and files; None where tensors left there have data.
        modes: Whether gradients are on, the default dtype, and autocast.
    """

    tensors: dict[int, _Before]
    generators: GeneratorStates
    python: PythonState
    namespaces: Namespaces | None
    modes: tuple[bool, torch.dtype, AutocastState]

    @classmethod
    @collector_off()
    def take(
        cls, module: nn.Module, step: Step, runs: Runs = "recorded copy", *, earlier: Self | None = None
    ) -> Self:
        """Note everything as it is now.

        Args:
            module: The module.
            step: The step's arguments and loss.
            runs: What is going to run: the module, or a copy of it and of the tensors among the arguments.
            earlier: A snapshot whose copies are used again where data are still the same.

        Raises:
            CaptureError: The step takes from an iterator, which cannot be put back.
        """
        given = (step.args, dict(step.kwargs))
        attributes = _attributes_of_tensors(module) if runs == "module" else []
        reach = Reach(*(hook for p in parameters_of(module) for hook in all_hooks_on(p)))
        python = PythonState(
            [module],
            (*given, step.loss, *attributes, *reach.objects),
            objects=runs == "module",
            variables=reach.variables,
        )
        for iterator in python.iterators:
            # A hook that reaches one does not run.
            if iterator not in reach and Reach(iterator).opaque is not None:
                raise CaptureError(
                    f"the step takes items from a {type(iterator).__name__}, which gives each of them once: "
                    "running it to plan or compare would take those that training needs. Take them outside "
                    "of the step, and pass them, as in train_step(model, next(batches))"
                )
        tensors: dict[int, _Before] = {}
        reached = [*tensors_in(given), *python.tensors]
        for part in python.modules:
            reached += tensors_of(part)
            if isinstance(part, torch.jit.ScriptModule):  # which keeps its parameters elsewhere
                reached += part.parameters(recurse=False)
        for tensor in reached:
            _note(tensors, tensor)
        if runs != "recorded copy":
            known = {} if earlier is None else earlier.tensors
            own = [*parameters_of(module), *buffers_of(module), *tensors_in(given)] if runs == "copy" else []
            apart = {id(tensor) for tensor in own}
            for tensor in reached:
                before, then = tensors[id(tensor)], known.get(id(tensor))
                if before.data is None and id(tensor) not in apart and not tensor.is_meta:
                    same = then is not None and _is_like(tensor, then.data)
                    before.data = then.data if then is not None and same else on_host(tensor)
        return cls(
            tensors,
            GeneratorStates.now(python.generators),
            python,
            Namespaces(module, step.loss) if runs == "recorded copy" else None,
            (torch.is_grad_enabled(), torch.get_default_dtype(), autocast_state()),
        )

    def about_to_run(self, operator: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Note the tensors that an operator is about to run on, in a step that is recorded.

        Args:
            operator: The operator.
            tensors: Its tensors that the step did not make.
        """
        for tensor in tensors:
            if fake.is_fake(tensor):
                continue
            before = _note(self.tensors, tensor)
            # Batch normalisations write to running statistics, which their schemas do not mention.
            writes = schema_of(operator).is_mutable or "batch_norm" in str(operator)
            if before.data is None and writes:
                with fake.without_modes(), torch.no_grad():
                    before.data = tensor.detach().clone()

    def restore(self) -> None:
        """Put everything back as it was."""
        grad, dtype, autocast = self.modes
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        set_autocast_state(autocast)
        self.restore_tensors()
        self.python.restore()
        if self.namespaces is not None:
            self.namespaces.take_out_tensors()
        self.generators.restore()

    def restore_tensors(self) -> None:
        """Give every tensor its gradient, its version and, where they are copied, its data back."""
        for before in list(self.tensors.values()):
            tensor = before.tensor
            if tensor.requires_grad is not before.requires_grad:
                if not tensor.is_leaf:  # an operation on tensors that require gradients wrote to it
                    tensor.detach_()
                tensor.requires_grad_(before.requires_grad)
            place_as_before(tensor, before.placement)
            if before.data is not None and not _is_like(tensor, before.data):
                with torch.no_grad():
                    if tensor.shape != before.data.shape:
                        tensor.resize_(before.data.shape)  # as observers of quantisation do with buffers
                    tensor.copy_(before.data)
            if before.version is not None and versions.version_of(tensor) != before.version:
                versions.set_version(tensor, before.version)
            if tensor.is_leaf and tensor.grad is not before.gradient:
                tensor.grad = before.gradient

    def drop_gradients(self) -> None:
        """Set the gradient of every tensor to None."""
        for before in self.tensors.values():
            if before.tensor.is_leaf:
                before.tensor.grad = None


def _attributes_of_tensors(module: nn.Module) -> list[dict[str, Any]]:
    """The attributes that hooks and libraries set on parameters and buffers."""
    held = [tensor for part in parts_of(module) for tensor in tensors_of(part)]
    return [vars(tensor) for tensor in held if type(tensor) in (torch.Tensor, nn.Parameter)]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the memory of the host: that of a GPU may be full."""
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def _note(tensors: dict[int, _Before], tensor: torch.Tensor) -> _Before:
    if id(tensor) not in tensors:
        gradient = tensor.grad if tensor.is_leaf else None
        version = versions.version_of(tensor)
        tensors[id(tensor)] = _Before(tensor, gradient, version, tensor.requires_grad, placement_of(tensor))
        if gradient is not None:
            _note(tensors, gradient)
    return tensors[id(tensor)]


def _is_like(tensor: torch.Tensor, data: torch.Tensor | None) -> bool:
    """Whether a tensor has these data; False where they contain NaNs, which equal nothing."""
    if data is None or tensor.shape != data.shape or tensor.layout != data.layout:
        return False
    tensor = tensor.detach().to(data.device)
    if tensor.layout is not torch.strided:
        tensor, data = tensor.to_dense(), data.to_dense()
    return torch.equal(tensor, data)
