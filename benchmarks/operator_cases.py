"""PyTorch's own samples of its operators and modules, as training steps that can be planned.

Its tests have them: `op_db` knows every operator, `module_db` most modules; the others are in
`benchmarks/operator_modules.py`. A case is an operator, or a module in one mode, with some of its samples.
"""

import functools
import importlib
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.operator_modules import MODULES

KINDS = ("operator", "in-place", "train", "eval")
FORMS = ("float32", "bfloat16", "complex64", "autocast")


@functools.cache
def databases() -> tuple[dict[str, Any], dict[str, Any]]:
    """PyTorch's operators that have a gradient, and its modules, by name."""
    try:
        importlib.import_module("expecttest")
    except ImportError:
        # PyTorch's test helpers derive their TestCase from this package's, and use it nowhere else. Only
        # samples are wanted here, so the package need not be there.
        stub = types.ModuleType("expecttest")
        stub.__dict__.update(TestCase=unittest.TestCase, ACCEPT=False)
        sys.modules["expecttest"] = stub
    operators = importlib.import_module("torch.testing._internal.common_methods_invocations").op_db
    for module in list(sys.modules.values()):
        # It calls a random operator in `fork_rng` with a seed: a training step does not, and the state of
        # generators is compared here.
        if getattr(module, "__name__", "").startswith("torch.testing.") and hasattr(
            module, "wrapper_set_seed"
        ):
            module.wrapper_set_seed = _called  # type: ignore[attr-defined]
    modules = importlib.import_module("torch.testing._internal.common_modules").module_db
    known = {_name_of(op): op for op in operators if op.supports_autograd}
    return known, MODULES | {info.name: info for info in modules}


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _name_of(op: Any) -> str:
    return ".".join(part for part in (op.name, op.variant_test_name) if part)


def names(form: str, device: str = "cpu") -> list[str]:
    """Every case of a form that a device has: `float32/in-place/addcmul`, say."""
    operators, modules = databases()
    found = []
    dtype = dtype_of(form)
    for name, op in operators.items():
        if dtype not in op.supported_backward_dtypes(device):
            continue
        found.append(f"{form}/operator/{name}")
        if form != "autocast" and op.supports_inplace_autograd and op.inplace_variant is not None:
            found.append(f"{form}/in-place/{name}")
    for name, info in modules.items():
        if dtype.is_complex and (isinstance(info, list) or dtype not in info.supported_dtypes(device)):
            continue
        found.append(f"{form}/train/{name}")
        if isinstance(info, list) or info.train_and_eval_differ:
            found.append(f"{form}/eval/{name}")
    return found


def dtype_of(form: str) -> torch.dtype:
    """What tensors are of; under autocast single precision."""
    dtype: torch.dtype = torch.float32 if form == "autocast" else getattr(torch, form)
    return dtype


@dataclass(frozen=True, slots=True)
class Sample:
    """A function or module with the arguments of one call."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    in_place: bool = False


def samples(case: str, most: int, device: str = "cpu") -> list[Sample]:
    """Some of a case's samples on a device, spread over all of them."""
    form, kind, name = case.split("/")
    torch.manual_seed(0)
    operators, modules = databases()
    dtype = dtype_of(form)
    found: list[Sample] = []
    if kind in ("operator", "in-place"):
        op = operators[name]
        call = op.inplace_variant if kind == "in-place" else op.op
        found += [
            Sample(call, (s.input, *s.args), dict(s.kwargs), kind == "in-place")
            for s in op.sample_inputs(device, dtype, requires_grad=True)
            if kind == "operator" or not s.broadcasts_input
        ]
    else:
        for made, args, kwargs in _modules(modules[name], dtype, kind == "train", device):
            found.append(Sample(made.to(device, dtype).train(kind == "train"), args, kwargs))
    if len(found) <= most:
        return found
    steps = max(most - 1, 1)
    return [found[round(i * (len(found) - 1) / steps)] for i in range(most)]


def _modules(
    info: Any, dtype: torch.dtype, training: bool, device: str
) -> Iterator[tuple[nn.Module, Any, Any]]:
    if isinstance(info, list):
        for module, args in info:
            with torch.device(device):
                made, found = module(), args()
            yield made, tuple(given.to(dtype) if given.is_floating_point() else given for given in found), {}
        return
    for s in info.module_inputs_func(info, device, dtype, True, training):
        made = info.module_cls(*s.constructor_input.args, **s.constructor_input.kwargs)
        yield made, tuple(s.forward_input.args), dict(s.forward_input.kwargs)


class Calls(nn.Module):
    """Calls of an operator or of modules; the loss is of all that they return.

    What needs a gradient is multiplied before and after, so that there is something to keep or to compute
    again, and an operator in place has something that it may write to.
    """

    def __init__(self, chosen: Sequence[Sample], form: str) -> None:
        super().__init__()
        self.calls = [s.call for s in chosen]
        self.parts = nn.ModuleList(call for call in self.calls if isinstance(call, nn.Module))
        self.in_place = [s.in_place for s in chosen]
        self.scale = nn.Parameter(
            torch.ones((), dtype=torch.bfloat16 if form == "bfloat16" else torch.float32)
        )
        self.form = form

    def forward(self, inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> torch.Tensor:
        loss = self.scale.float() * 0.0
        for call, in_place, (args, kwargs) in zip(self.calls, self.in_place, inputs, strict=True):
            args, kwargs = _mapped(self._scaled, (args, kwargs))
            if in_place and not args[0].requires_grad:
                args = (args[0].clone(), *args[1:])
            if self.form == "autocast":
                with torch.autocast(self.scale.device.type, torch.bfloat16):
                    returned = call(*args, **kwargs)
            else:
                returned = call(*args, **kwargs)
            for result in _tensors(returned):
                if result.is_complex():
                    result = torch.view_as_real(result.resolve_conj())
                if result.is_floating_point():
                    result = result * self.scale
                    loss = loss + (result * result).sum().float()
        return loss

    def _scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * self.scale if tensor.requires_grad else tensor


def step_of(chosen: Sequence[Sample], form: str) -> tuple[Calls, tuple[Any, ...]]:
    """A module that makes some calls, and its arguments, which nothing has changed."""
    torch.manual_seed(0)
    inputs = [
        _mapped(lambda t: t.detach().requires_grad_(t.requires_grad), (s.args, s.kwargs)) for s in chosen
    ]
    model = Calls(chosen, form).to(next(_tensors([(s.args, s.kwargs) for s in chosen])).device)
    model.training = all(part.training for part in model.parts)
    return model, (inputs,)


def runs(sample: Sample, form: str) -> str | None:
    """Runs a sample without a plan; why it cannot be trained, or None."""
    model, args = step_of([sample], form)
    try:
        loss = model(*args)
        if not any(t.requires_grad for t in _tensors(args)) and len(list(model.parameters())) == 1:
            return "nothing has a gradient"
        loss.backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        model.zero_grad()
    return None


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))
    elif isinstance(found, (list, tuple)):
        for each in found:
            yield from _tensors(each)


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return function(given)
    if type(given) in (list, tuple):
        return type(given)(_mapped(function, each) for each in given)
    if type(given) is dict:
        return {key: _mapped(function, each) for key, each in given.items()}
    return given
