"""The buckets of ``DistributedDataParallel``, which are there throughout a step.

The wrapper copies each gradient into a bucket when it is ready, and reduces it there. All buckets together
take the bytes of the gradients, however many there are. With ``gradient_as_bucket_view=True`` the gradient is
freed once it is copied; the optimizer reads the bucket.
"""

from collections.abc import Sequence

import torch

from planner._torch.distributed import active_wrapper
from planner.module_parts import parameters_of
from planner.parallel.strategies import DDP


def wrapped_here() -> DDP | None:
    """The options of the ``DistributedDataParallel`` whose forward is running; None outside of one."""
    wrapper = active_wrapper()
    if wrapper is None:
        return None
    return DDP(wrapper.ranks, wrapper.bucket_cap_mb, wrapper.gradient_as_bucket_view)


def let_go_of_gradients(model: torch.nn.Module, options: DDP, added_to: Sequence[bool]) -> None:
    """Have a copy of a module without data let go of gradients as the wrapper does.

    Args:
        model: The copy.
        options: The wrapper's options.
        added_to: For each parameter, whether its gradient is there already, and added to.
    """
    if not options.gradient_as_bucket_view:
        return
    for parameter, added in zip(parameters_of(model), added_to, strict=True):
        if parameter.requires_grad and not added:
            parameter.register_post_accumulate_grad_hook(_let_go)


def _let_go(parameter: torch.Tensor) -> None:
    parameter.grad = None
