"""What Inductor computes with what comes before a call of a library, in the programs of a plan."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from planner._torch import fake
from planner.lowering.inductor import InductorLowering

Function = Callable[..., list[torch.Tensor]]
aten: Any = torch.ops.aten


def kernels(function: Function) -> list[str]:
    """What the program of a backward calls, kernels and libraries, in order."""
    mode = fake.fake_mode_with_sizes()
    with mode:
        inputs = [torch.empty(*shape) for shape in ((64, 256), (64, 32), (32, 256))]
    program, _, _ = InductorLowering({}).emitted(make_fx(function)(*inputs), "backward")
    _, _, body = program.source.partition("def call(")
    return re.findall(r"^ +(cpp_fused|extern_kernels\.\w+)", body, re.MULTILINE)


def gradients(x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Those of a layer, a product of an activation that runs again before its own gradient is read."""
    gradient = g @ weight
    again = aten.gelu.default(x)
    of_weight = g.t() @ again
    return [of_weight, aten.gelu_backward.default(gradient, x) @ weight.t()]


def test_an_activation_that_runs_again_is_computed_with_its_gradient() -> None:
    assert kernels(gradients) == ["extern_kernels.mm", "cpp_fused", "extern_kernels.mm", "extern_kernels.mm"]


def test_a_gradient_that_takes_memory_of_its_own_stays_where_it_is() -> None:
    def function(x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        gradient = g @ weight
        of_weight = g.t() @ aten.gelu.default(x)
        late = gradient.t() @ gradient  # reads what the gradient of the activation would be written to
        return [of_weight, late, aten.gelu_backward.default(gradient, x) @ weight.t()]

    found = kernels(function)
    assert found.count("cpp_fused") == 2
    assert found.index("cpp_fused") < len(found) - 2 - found[::-1].index("cpp_fused")


def test_a_kernel_that_reads_what_is_made_later_stays_where_it_is() -> None:
    def function(x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        of_weight = g.t() @ aten.gelu.default(x)
        gradient = g @ weight
        return [of_weight, aten.gelu_backward.default(gradient, x) @ weight.t()]

    assert kernels(function) == [
        "cpp_fused", "extern_kernels.mm", "extern_kernels.mm", "cpp_fused", "extern_kernels.mm",
    ]  # fmt: skip
