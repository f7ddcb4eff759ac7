"""Settings of arithmetic, and PyTorch's own ways to take less memory, for as long as a step is measured."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


@contextlib.contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """TF32 for matrix products and convolutions, or not."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextlib.contextmanager
def checkpointed(model: nn.Module, blocks: tuple[str, ...]) -> Iterator[None]:
    """PyTorch's checkpointing around every block."""
    wrapped = [m for m in model.modules() if type(m).__name__ in blocks]
    for module in wrapped:
        forward = module.forward
        module.forward = lambda *a, forward=forward, **k: checkpoint(  # type: ignore[method-assign]
            forward, *a, use_reentrant=False, **k
        )
    try:
        yield
    finally:
        for module in wrapped:
            del module.forward


@contextlib.contextmanager
def compiled(model: nn.Module, budget: float | None = None) -> Iterator[nn.Module]:
    """The model under torch.compile, perhaps with a memory budget; eager kernels where there is no GPU."""
    import torch._functorch.config as config

    on_gpu = next(model.parameters()).device.type == "cuda"
    torch._dynamo.reset()
    with config.patch(activation_memory_budget=1.0 if budget is None else budget):
        yield torch.compile(model, backend="inductor" if on_gpu else "aot_eager_decomp_partition")  # type: ignore[misc]
    torch._dynamo.reset()
